"""A faithful EC2 to test against: what real boto3 talks to, in-process on a virtual clock or over HTTP.

`state` keeps the books, `launch` and `actions` the semantics, `codec` the wire form (read from botocore's own service
model), `faults` what goes wrong, `inproc` how clients reach it. May not decide anything for a client.
"""

from chaos.ec2_server.faults import Fault
from chaos.ec2_server.server import Ec2Server
from chaos.ec2_server.state import Account, Region

__all__ = ["Account", "Ec2Server", "Fault", "Region"]
