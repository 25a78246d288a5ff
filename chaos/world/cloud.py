"""The Cloud port over the world's pools: listings that lag, calls that are throttled, answers that get lost.

May not decide who gets an instance (`supply` does). Instants of the port are UTC, the world's count from its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autoscaler.act import refusal_class
from autoscaler.adapters.aws_codes import port_error
from autoscaler.core.model import CloudInstance, CloudView, Offering
from autoscaler.ports import PortError, Transient

from .faults import Faults, value
from .supply import Machine, Pools, Refusal, Row
from .tally import RESERVED, Tally
from .timeline import Timeline

BURST_CALLS = 100.0
THROTTLED = "RequestLimitExceeded"


@dataclass(slots=True)
class Bucket:
    """Launch calls that may be made now; refilled with time."""

    left: float = BURST_CALLS
    at_s: float = 0.0

    def take(self, now_s: float, per_s: float, burst: float) -> bool:
        """One call, if there is one left."""
        self.left = min(burst, self.left + (now_s - self.at_s) * per_s)
        self.at_s = now_s
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


@dataclass
class WorldCloud:
    """ports.Cloud. `epoch_s` is the UTC instant of second 0; `last_refusal` the newest refusal of each offering."""

    pools: Pools
    timeline: Timeline
    faults: Faults
    tally: Tally
    epoch_s: float
    describe_lag_s: float
    api_rate_per_s: float
    last_refusal: dict[str, tuple[float, str]] = field(default_factory=dict)
    _bucket: Bucket = field(default_factory=Bucket)
    _offerings: dict[str, Offering] = field(default_factory=dict)

    def describe(self, now_s: float) -> CloudView:
        """See ports.Cloud. The listing shows the world as it was `describe_lag_s` ago."""
        self._usable()
        if self.faults.active("describe_gone"):
            raise Transient("the listing does not answer", "RequestTimeout")
        lag_s = max([self.describe_lag_s, *(value(fault) for fault in self.faults.active("describe_lag"))])
        at_s = self.timeline.now_s - lag_s
        rows = tuple(self._instances(at_s))
        return CloudView(
            at_s=now_s,
            offerings=tuple(self._offering(row) for row in self.pools.rows.values() if self._known(row)),
            instances=rows * 2 if self.faults.active("describe_twice") else rows,
        )

    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        """See ports.Cloud. Every call, of whichever controller, is counted here."""
        now_s = self.timeline.now_s
        self.tally.tried(offering, now_s)
        row = self.pools.rows.get(offering)
        names = row.names if row is not None else ()
        try:
            self._usable()
            if not self._bucket.take(now_s, self.api_rate_per_s, BURST_CALLS):
                raise port_error(THROTTLED, "too many launch calls; slow down")
            if self.faults.strikes("launch_error", names):
                raise port_error("InternalError", "an internal error has occurred", status=500)
            granted = self._launched(offering, count, token)
        except Transient:
            raise
        except PortError as error:
            kind = refusal_class(error)
            self.tally.was_refused(offering, kind, now_s)
            self.last_refusal[offering] = (now_s, kind)
            raise
        self.tally.granted += 1
        if self.faults.strikes("ambiguous", names):
            raise Transient("no answer", "RequestTimeout")
        return granted

    def terminate(self, instance_id: str) -> None:
        """See ports.Cloud."""
        self._usable()
        try:
            self.pools.terminate(instance_id)
        except Refusal as refusal:
            raise port_error(refusal.code, str(refusal), status=refusal.status) from None

    def _launched(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        try:
            return self.pools.launch(offering, count, token)
        except Refusal as refusal:
            raise port_error(refusal.code, str(refusal), offering=offering, status=refusal.status) from None

    def _usable(self) -> None:
        """Raises Throttled while a fault lets through fewer calls than are made."""
        for fault in self.faults.active("throttle"):
            if not self._bucket.take(self.timeline.now_s, value(fault), 1.0):
                raise port_error(THROTTLED, "too many calls; slow down")

    # ---- listings ---------------------------------------------------------------------------------------------------
    def _instances(self, at_s: float) -> Iterator[CloudInstance]:
        for machine in self.pools.machines.values():
            if machine.launched_at_s <= at_s:
                yield self._instance(machine, at_s)

    def _instance(self, machine: Machine, at_s: float) -> CloudInstance:
        state = machine.state(at_s)
        noticed = machine.noticed_at_s <= at_s
        key = (state, machine.reclaim_at_s if noticed else None)
        if machine.listed is not None and machine.listed[0] == key:
            return machine.listed[1]
        made = CloudInstance(
            instance_id=machine.instance,
            offering=machine.row.id,
            token=machine.token,
            state=state,
            launched_at_s=self.epoch_s + machine.launched_at_s,
            reclaim_at_s=self.epoch_s + machine.reclaim_at_s if noticed else None,
            state_reason=machine.why if machine.stopped_at_s <= at_s else "",
        )
        machine.listed = (key, made)
        return made

    def _known(self, row: Row) -> bool:
        """Whether it is listed: while it exists and has a price, and a reservation from when it was bought."""
        now_s = self.timeline.now_s
        if self.faults.active("price_gone", row.names):
            return False
        return row.open(now_s) or (row.supply.market in RESERVED and now_s < row.supply.start_s)

    def _offering(self, row: Row) -> Offering:
        price = self.pools.price_usd_per_h(row)
        known = self._offerings.get(row.id)
        if known is None or known.price_usd_per_h != price:
            known = self._offerings[row.id] = self._described(row, price)
        return known

    def _described(self, row: Row, price: float) -> Offering:
        supply = row.supply
        return Offering(
            offering=row.id,
            pool=supply.pool or row.id,
            instance_type=supply.instance_type,
            zone=supply.zone,
            market=supply.market,
            gpus=row.gpus,
            price_usd_per_h=price,
            region=supply.region,
            reservation=supply.reservation,
            starts_at_s=self.epoch_s + supply.start_s if supply.start_s > 0.0 else None,
            ends_at_s=None if supply.end_s is None else self.epoch_s + supply.end_s,
        )
