"""The clouds that `qm run` can be given, each made from its options and found to answer. May not act on any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoscaler.adapters.clock import SystemClock
from autoscaler.commands.outcome import BadInput
from autoscaler.ports import Cloud, Misconfigured, PortError, Tenure

if TYPE_CHECKING:
    from autoscaler.commands.run import RunOptions

Notes = Callable[[], Mapping[str, tuple[float, bytes]]]


@dataclass(frozen=True, slots=True)
class Connected:
    """A cloud that answered, how to leave it, and how to tell it who may act."""

    cloud: Cloud
    leave: Callable[[], None]
    hold: Callable[[Tenure], None] = lambda _: None


def local(options: RunOptions, _: Notes) -> Connected:
    """The local cloud, which lists notices itself. Raises BadInput."""
    from autoscaler.adapters.local import LocalCloud

    if options.cloud_url is None or options.cloud_token_file is None:
        raise BadInput("--cloud local: give --cloud-url and --cloud-token-file")
    cloud = LocalCloud(options.cloud_url, _token(options.cloud_token_file))
    try:
        cloud.describe(SystemClock().now_s())
    except Misconfigured as error:
        remedy = "give the file that the cloud was started with"
        raise BadInput(f"--cloud-token-file {options.cloud_token_file}: {error}; {remedy}") from error
    except PortError as error:
        raise BadInput(f"--cloud-url {options.cloud_url}: {error}; start the cloud, or correct the address") from error
    return Connected(cloud, cloud.close)


def ec2(options: RunOptions, notes: Notes) -> Connected:
    """EC2 as ``cloud/ec2.yaml`` of the policy folder says. Who only advises leaves the queue of notices alone.

    Raises BadInput, Problems.
    """
    from autoscaler.adapters.ec2 import load, notices, remedies
    from autoscaler.adapters.ec2.cloud import Ec2Cloud
    from autoscaler.adapters.node_notes import NodeNotes
    from autoscaler.commands.run import log

    if options.cloud_url is not None or options.cloud_token_file is not None:
        raise BadInput("--cloud ec2: takes no --cloud-url and no --cloud-token-file; write cloud/ec2.yaml")
    path = options.policies / load.FOLDER / load.FILE
    config = load.load_ec2(options.policies)
    queue = notices.connect(config.region, config.notices_queue) if config.notices_queue else None
    reads = queue is not None and not options.advise
    clock = SystemClock()
    cloud = Ec2Cloud(config, clock.now_s, notices=queue.take if queue and reads else tuple, notes=NodeNotes(notes))
    try:
        view = cloud.describe(clock.now_s())
    except PortError as error:
        raise BadInput(remedies.told(str(path), error)) from error
    if not view.offerings:
        whys = (f"{path}: {name}: {why}; correct it" for name, why in cloud.dropped.items())
        raise BadInput(*(list(whys) or [f"{path}: none of its reservations is there; add `instance_types`"]))
    for name, why in cloud.dropped.items():
        log("not offered", offering=name, why=why)
    if queue is not None and reads:
        queue.say = lambda trouble: log("notices", trouble=trouble or "none any more")
        queue.start()

    def leave() -> None:
        if queue is not None:
            queue.close()
        cloud.close()

    return Connected(cloud, leave, cloud.hold)


CLOUDS: Mapping[str, Callable[[RunOptions, Notes], Connected]] = {"local": local, "ec2": ec2}


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise BadInput(
            f"--cloud-token-file {path}: {error.strerror}; give the file that the cloud was started with"
        ) from error
    if not token:
        raise BadInput(f"--cloud-token-file {path}: is empty; give the file that the cloud was started with")
    return token
