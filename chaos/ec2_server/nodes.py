"""Instances of the server as raylets: the books of a region in the form that `adapters.local_nodes` follows.

May not start a process itself or decide when one runs: both follow from the region's books.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoscaler.adapters.local_nodes import Place, raylet
from autoscaler.core.model import CloudState
from chaos.ec2_server.setup import NodesConfig
from chaos.ec2_server.state import Instance, Region
from chaos.ec2_server.weather import STATES, offering


@dataclass(frozen=True, slots=True)
class Machine:
    """An instance as a process has to follow it."""

    instance_id: str
    state: CloudState


@dataclass
class RegionBooks:
    """See local_nodes.Books. Whoever calls holds the server's lock."""

    region: Region
    _now_s: float = field(default=0.0, init=False)

    @property
    def machines(self) -> Mapping[str, Machine]:
        """All instances, as of the last `advance`."""
        return {key: Machine(key, STATES[row.state(self._now_s)]) for key, row in self.region.instances.items()}

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        self._now_s = now_s
        self.region.advance(now_s)

    def ended(self, instance_id: str, now_s: float, reason: str) -> None:
        """Nothing runs on the instance any more."""
        code, _, message = reason.partition(": ")
        self.region.ended(instance_id, now_s, code, message)


def command(config: NodesConfig, region: Region, instance_id: str) -> list[str]:
    """What an instance runs."""
    if config.boot_command is not None:
        return list(config.boot_command)
    return raylet(config.ray_address, place(config, region.instances[instance_id]), instance_id)


def place(config: NodesConfig, row: Instance) -> Place:
    """Where an instance is, in our words."""
    name = offering(row)
    return Place(name, row.instance_type, row.zone, name.split("/")[2], config.gpus[row.instance_type])
