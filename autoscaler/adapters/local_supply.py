"""The `local` cloud's books: finite pools, refusals in AWS's words, instance states, reclaim notices.

Pure state machine: time is passed in; may not do I/O, read a clock or start a process (`local_server` does, from the
states kept here). The contract suite runs on it in memory, and behind HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator

from autoscaler.core.learn import family
from autoscaler.core.model import CloudInstance, CloudState, CloudView, Offering
from policies.model import Market, Strict

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0.0)]
LabelValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$", max_length=63)]
Key = Annotated[str, Field(min_length=1)]

ICE = "InsufficientInstanceCapacity"
RECLAIMED = "Server.SpotInstanceTermination: reclaimed after its notice"
GIVEN_BACK = "Client.UserInitiatedShutdown: terminated by request"


class OfferingConfig(Strict):
    """A place to get instances. `count` is all its pool can hold, ours included; a pool has one count."""

    offering: Key
    pool: Key
    instance_type: LabelValue
    zone: LabelValue
    region: str = ""
    market: Market = "on_demand"
    gpus: Count
    price_usd_per_h: Annotated[float, Field(ge=0.0)]
    count: Count
    boot_s: Seconds = 0.0
    notice_s: Seconds = 120.0


class QuotaConfig(Strict):
    """An account limit on GPUs of one market and `family` (leading letters of a type: p5.48xlarge is ``p``)."""

    family: Key
    market: Market
    gpus: Count


class CloudConfig(Strict):
    """The local cloud's config file.

    `launch_s` is how long a launch call takes to answer (its effect is at once, as on EC2). `boot_command` replaces the
    raylet by a harmless command. Launch calls beyond `calls_burst` refill at `calls_per_s` or are throttled.
    """

    cluster: Key
    ray_address: Key
    offerings: Annotated[tuple[OfferingConfig, ...], Field(min_length=1)]
    quotas: tuple[QuotaConfig, ...] = ()
    node_env: dict[str, str] = Field(default_factory=dict)
    boot_command: tuple[str, ...] | None = None
    launch_s: Seconds = 0.0
    forget_s: Seconds = 60.0
    calls_burst: Annotated[int, Field(ge=1)] = 100
    calls_per_s: Annotated[float, Field(gt=0.0)] = 10.0

    @model_validator(mode="after")
    def _one_spelling(self) -> CloudConfig:
        names = [row.offering for row in self.offerings]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"offering {twice[0]!r} is given twice; give each a name of its own")
        counts: dict[str, int] = {}
        for row in self.offerings:
            if counts.setdefault(row.pool, row.count) != row.count:
                raise ValueError(f"pool {row.pool!r} has counts {counts[row.pool]} and {row.count}; give it one")
        return self


class Refusal(Exception):
    """A definite no, in AWS's word."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Machine:
    """One instance. Instants are UTC seconds; `ended_at_s` is set when it is terminated."""

    instance_id: str
    offering: str
    token: str
    launched_at_s: float
    boots_at_s: float
    state: CloudState = "pending"
    reclaim_at_s: float | None = None
    ended_at_s: float | None = None
    state_reason: str = ""


class Supply:
    """All pools and instances. Not thread-safe: one caller at a time. Raises Refusal only."""

    def __init__(self, config: CloudConfig, id_prefix: str = "i-") -> None:
        self.offerings = {row.offering: row for row in config.offerings}
        self.machines: dict[str, Machine] = {}
        self._pool_count = {row.pool: row.count for row in config.offerings}
        self._quotas = {(row.family, row.market): row.gpus for row in config.quotas}
        self._config = config
        self._id_prefix = id_prefix
        self._made = 0
        # Kept longer than the instances: a token that comes back late must not launch twice.
        self._granted: dict[tuple[str, str], tuple[str, ...]] = {}
        self._calls_left = float(config.calls_burst)
        self._calls_at_s: float | None = None

    def launch(self, offering: str, count: int, token: str, now_s: float) -> tuple[str, ...]:
        """Ids of 1..`count` new instances, or those that the same `token` in the same `offering` got before."""
        self._take_call(now_s)
        spec = self._spec(offering)
        if count < 1:
            raise Refusal("InvalidParameterValue", f"count is {count}; ask for at least 1")
        if not 1 <= len(token) <= 64:
            raise Refusal("InvalidParameterValue", f"token has {len(token)} characters; give 1 to 64")
        if (offering, token) not in self._granted:
            granted = min(count, self._quota_room(spec), self._pool_room(spec))
            self._granted[offering, token] = tuple(self._add(spec, token, now_s) for _ in range(granted))
        return self._granted[offering, token]

    def terminate(self, instance_id: str) -> None:
        """Begin to give an instance back; a second call is a no-op."""
        self._stop(self._machine(instance_id), GIVEN_BACK)

    def reclaim(self, instance_id: str, now_s: float, notice_s: float | None = None) -> float:
        """Give notice and return the deadline, at which `advance` stops the instance. A second notice only shortens."""
        machine = self._machine(instance_id)
        wait_s = self.offerings[machine.offering].notice_s if notice_s is None else notice_s
        deadline_at_s = min(now_s + wait_s, machine.reclaim_at_s if machine.reclaim_at_s is not None else float("inf"))
        machine.reclaim_at_s = deadline_at_s
        return deadline_at_s

    def set_supply(self, offering: str, count: int) -> None:
        """What the offering's pool can hold from now on. A drop refuses launches; it never stops what is in use."""
        if count < 0:
            raise Refusal("InvalidParameterValue", f"count is {count}; give 0 or more")
        self._pool_count[self._spec(offering).pool] = count

    def advance(self, now_s: float) -> None:
        """Let time pass: boots end, reclaim deadlines strike, terminated instances are forgotten."""
        for machine in tuple(self.machines.values()):
            if machine.state == "pending" and now_s >= machine.boots_at_s:
                machine.state = "running"
            if machine.reclaim_at_s is not None and now_s >= machine.reclaim_at_s:
                self._stop(machine, RECLAIMED)
            if machine.ended_at_s is not None and now_s >= machine.ended_at_s + self._config.forget_s:
                del self.machines[machine.instance_id]

    def ended(self, instance_id: str, now_s: float, reason: str) -> None:
        """Nothing runs on the instance any more, by `reason` unless a cause is known already."""
        machine = self._machine(instance_id)
        machine.state_reason = machine.state_reason or reason
        if machine.ended_at_s is None:
            machine.state, machine.ended_at_s = "terminated", now_s

    def view(self, now_s: float) -> CloudView:
        """What the cloud says at `now_s`."""
        return CloudView(
            at_s=now_s,
            offerings=tuple(_public(spec) for spec in self.offerings.values()),
            instances=tuple(_listed(machine) for machine in self.machines.values()),
        )

    def _take_call(self, now_s: float) -> None:
        since_s = now_s - self._calls_at_s if self._calls_at_s is not None else 0.0
        refilled = self._calls_left + max(0.0, since_s) * self._config.calls_per_s
        self._calls_left, self._calls_at_s = min(float(self._config.calls_burst), refilled), now_s
        if self._calls_left < 1.0:
            raise Refusal("RequestLimitExceeded", "too many launch calls; slow down")
        self._calls_left -= 1.0

    def _spec(self, offering: str) -> OfferingConfig:
        if offering not in self.offerings:
            raise Refusal("InvalidParameterValue", f"no offering {offering!r}; there are {sorted(self.offerings)}")
        return self.offerings[offering]

    def _machine(self, instance_id: str) -> Machine:
        if instance_id not in self.machines:
            raise Refusal("InvalidInstanceID.NotFound", f"no instance {instance_id!r}")
        return self.machines[instance_id]

    def _quota_room(self, spec: OfferingConfig) -> int:
        account = (family(spec.instance_type), spec.market)
        if account not in self._quotas:
            return 1_000_000
        rows = [self.offerings[machine.offering] for machine in self._in_use()]
        used_gpus = sum(row.gpus for row in rows if (family(row.instance_type), row.market) == account)
        room = (self._quotas[account] - used_gpus) // max(1, spec.gpus)
        if room < 1:
            raise Refusal("VcpuLimitExceeded", f"quota of {account[0]}/{account[1]} is {self._quotas[account]} GPUs")
        return room

    def _pool_room(self, spec: OfferingConfig) -> int:
        used = sum(self.offerings[machine.offering].pool == spec.pool for machine in self._in_use())
        room = self._pool_count[spec.pool] - used
        if room < 1:
            raise Refusal(ICE, f"pool {spec.pool!r} has no capacity for {spec.instance_type} in {spec.zone}")
        return room

    def _in_use(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.state != "terminated"]

    def _add(self, spec: OfferingConfig, token: str, now_s: float) -> str:
        self._made += 1
        instance_id = f"{self._id_prefix}{self._made:04x}"
        self.machines[instance_id] = Machine(instance_id, spec.offering, token, now_s, now_s + spec.boot_s)
        return instance_id

    def _stop(self, machine: Machine, reason: str) -> None:
        if machine.state in ("pending", "running"):
            machine.state, machine.state_reason = "terminating", reason


def _public(spec: OfferingConfig) -> Offering:
    return Offering(
        offering=spec.offering,
        pool=spec.pool,
        instance_type=spec.instance_type,
        zone=spec.zone,
        market=spec.market,
        gpus=spec.gpus,
        price_usd_per_h=spec.price_usd_per_h,
        region=spec.region,
    )


def _listed(machine: Machine) -> CloudInstance:
    return CloudInstance(
        instance_id=machine.instance_id,
        offering=machine.offering,
        token=machine.token,
        state=machine.state,
        launched_at_s=machine.launched_at_s,
        reclaim_at_s=machine.reclaim_at_s,
        state_reason=machine.state_reason,
    )
