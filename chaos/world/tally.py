"""What the world's capacity cost, to whom, and how its launch calls fared. Sums only; may not change the world.

Cost. An instance is paid by the second from its grant to its end, at least MIN_BILLED_S, at the price of the moment.
A reservation (odcr) or block is paid for as many instances as it declares, from its start to its end, used or not, and
using it costs nothing more. An instance's cost is shared by GPU-seconds: a replica's go to its unit from its placement
to its end, the rest (empty GPUs, unused reservations, the rest of a first minute) to UNASSIGNED.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from autoscaler.core.events import RefusalClass
from autoscaler.core.units import SECONDS_PER_HOUR
from chaos.facts import MIN_BILLED_S, RUNGS, UNASSIGNED
from chaos.report import CostBy, Launches

RESERVED = frozenset({"odcr", "block"})  # paid for whether used or not


@dataclass(slots=True)
class Meter:
    """One instance. `used` = GPUs by unit now; sums up to `since_s` are in the tally already."""

    offering: str
    market: str
    gpus: int
    from_s: float
    since_s: float
    used: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Bill:
    """One offering. `declared`: instances that a reservation pays for now; `held` and `busy` are counted instances."""

    market: str
    gpus: int
    instance_type: str
    zone: str
    reservation: str
    price_usd_per_h: float
    declared: int = 0
    held: int = 0
    busy: int = 0
    since_s: float = 0.0


@dataclass
class Tally:
    """All sums of one run; instants are passed in and never go back."""

    bills: dict[str, Bill] = field(default_factory=dict)
    meters: dict[str, Meter] = field(default_factory=dict)
    by_market: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_unit: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # held, by market
    idle_reservation_s: float = 0.0
    attempted: int = 0
    granted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    rungs_s: dict[str, float] = field(default_factory=dict)
    _first_refusal: tuple[float, str] | None = None

    # ---- offerings --------------------------------------------------------------------------------------------------
    def price(self, offering: str, usd_per_h: float, now_s: float) -> None:
        """The offering's price from now on, for instances that are held, too."""
        for meter in self.meters.values():
            if meter.offering == offering:
                self._settle(meter, now_s)
        self._settle_bill(self.bills[offering], now_s)
        self.bills[offering].price_usd_per_h = usd_per_h

    def declare(self, offering: str, count: int, now_s: float) -> None:
        """How many instances the offering has from now on, paid for if it is a reservation."""
        bill = self.bills[offering]
        self._settle_bill(bill, now_s)
        bill.declared = count if bill.market in RESERVED else 0

    # ---- instances --------------------------------------------------------------------------------------------------
    def opened(self, instance: str, offering: str, now_s: float) -> None:
        """An instance was granted."""
        bill = self.bills[offering]
        self._settle_bill(bill, now_s)
        bill.held += 1
        self.meters[instance] = Meter(offering, bill.market, bill.gpus, now_s, now_s)

    def closed(self, instance: str, now_s: float) -> None:
        """It ended: it stops being paid for."""
        meter = self.meters[instance]
        self._settle(meter, now_s)
        bill = self.bills[meter.offering]
        self._settle_bill(bill, now_s)
        bill.held -= 1
        bill.busy -= bool(meter.used)
        if bill.market not in RESERVED:
            rest_s = max(0.0, MIN_BILLED_S - (now_s - meter.from_s))
            self._pay(meter.market, UNASSIGNED, bill.price_usd_per_h * rest_s / SECONDS_PER_HOUR)
        del self.meters[instance]

    def occupied(self, instance: str, unit: str, gpus: int, now_s: float) -> None:
        """A unit's replica takes `gpus` of the instance, or leaves them (negative)."""
        meter = self.meters.get(instance)
        if meter is None:  # the instance went first, and took its replicas along
            return
        self._settle(meter, now_s)
        bill = self.bills[meter.offering]
        self._settle_bill(bill, now_s)
        bill.busy -= bool(meter.used)
        left = meter.used.get(unit, 0) + gpus
        if left:
            meter.used[unit] = left
        else:
            del meter.used[unit]
        bill.busy += bool(meter.used)

    def settle(self, now_s: float) -> None:
        """Bring every sum up to now."""
        for meter in self.meters.values():
            self._settle(meter, now_s)
        for bill in self.bills.values():
            self._settle_bill(bill, now_s)

    def cost_usd(self, now_s: float | None = None) -> float:
        """Everything so far: as of the last `settle`, or of now. Asking changes no sum, not even in its last digit."""
        settled = sum(self.by_market.values())
        if now_s is None:
            return settled
        held = sum(
            self.bills[m.offering].price_usd_per_h * (now_s - m.since_s)
            for m in self.meters.values()
            if m.market not in RESERVED
        )
        reserved = sum(
            max(b.declared, b.held) * b.price_usd_per_h * (now_s - b.since_s)
            for b in self.bills.values()
            if b.market in RESERVED
        )
        return settled + (held + reserved) / SECONDS_PER_HOUR

    def cost_by(self) -> CostBy:
        """The same, two ways."""
        return CostBy(unit=dict(sorted(self.by_unit.items())), market=dict(sorted(self.by_market.items())))

    def _settle(self, meter: Meter, now_s: float) -> None:
        held_s = now_s - meter.since_s
        if held_s <= 0.0:
            return
        meter.since_s = now_s
        self.gpu_s[meter.market] += held_s * meter.gpus
        reserved = meter.market in RESERVED
        usd_per_gpu = self.bills[meter.offering].price_usd_per_h * held_s / SECONDS_PER_HOUR / max(1, meter.gpus)
        idle = meter.gpus or 1
        for unit, gpus in meter.used.items():
            self._pay(None if reserved else meter.market, unit, usd_per_gpu * gpus)
            idle -= gpus
        if reserved:  # paid by the offering, as unassigned
            self._pay(None, UNASSIGNED, usd_per_gpu * (idle - (meter.gpus or 1)))
        else:
            self._pay(meter.market, UNASSIGNED, usd_per_gpu * idle)

    def _settle_bill(self, bill: Bill, now_s: float) -> None:
        over_s, bill.since_s = now_s - bill.since_s, now_s
        if over_s <= 0.0 or bill.market not in RESERVED:
            return
        paid = max(bill.declared, bill.held)  # noticed instances outlive a reservation that shrinks
        self._pay(bill.market, UNASSIGNED, paid * bill.price_usd_per_h * over_s / SECONDS_PER_HOUR)
        self.idle_reservation_s += (paid - bill.busy) * over_s

    def pay(self, market: str, unit: str, usd: float) -> None:
        """Anything else that is paid for, by the unit that used it."""
        self._pay(market, unit, usd)

    def _pay(self, market: str | None, unit: str, usd: float) -> None:
        if usd == 0.0:
            return
        if market is not None:
            self.by_market[market] += usd
        self.by_unit[unit] += usd

    # ---- launch calls -----------------------------------------------------------------------------------------------
    def tried(self, offering: str, now_s: float) -> None:
        """A launch call. The time from the first refusal ever to the first call on each rung of the ladder is kept."""
        self.attempted += 1
        if self._first_refusal is None:
            return
        first_s, name = self._first_refusal
        refused, tried = self.bills.get(name), self.bills.get(offering)
        if refused is None or tried is None:
            return
        rung = next((rung for rung in RUNGS if getattr(refused, rung) != getattr(tried, rung)), None)
        if rung is not None:
            self.rungs_s.setdefault(rung, now_s - first_s)

    def was_refused(self, offering: str, error: RefusalClass, now_s: float) -> None:
        """The call got a definite no."""
        self.refused[error] += 1
        self._first_refusal = self._first_refusal or (now_s, offering)

    def launches(self) -> Launches:
        """The calls, as the report has them."""
        return Launches(attempted=self.attempted, granted=self.granted, refused=dict(sorted(self.refused.items())))
