"""EC2 behind the Cloud port. Imports boto3 only when clients are made."""

from autoscaler.adapters.ec2.cloud import Ec2Cloud
from autoscaler.adapters.ec2.config import Ec2Config, OfferConfig

__all__ = ["Ec2Cloud", "Ec2Config", "OfferConfig"]
