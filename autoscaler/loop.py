"""One tick: observe → journal → learn → forecast → decide → check → journal → act → journal.

The same loop drives a Ray cluster, a cloud and the simulated world; it knows no difference. The clock is read once a
tick and never goes back behind the journal. What our own code raises, from a port to the check, is journalled and ends
as a view that is missing or a plan that is not acted on. May not import an adapter, decide anything itself, or keep
state that the journal does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from autoscaler.act import Act, Executor
from autoscaler.core.beliefs import Beliefs
from autoscaler.core.check import check
from autoscaler.core.decide import decide, still_named, to_message
from autoscaler.core.defects import defect
from autoscaler.core.demand import forecast
from autoscaler.core.events import (
    SCHEMA_VERSION,
    CheckFailed,
    Configured,
    Event,
    Forecasted,
    Observed,
    Opened,
    Ordered,
    Planned,
    PolicyRefused,
)
from autoscaler.core.model import Missing, Observation, Plan
from autoscaler.core.orders import policy_under
from autoscaler.ledger import Ledger
from autoscaler.ports import Broken, Clock, Cloud, Journal, Metrics, Orders, Policy, PolicySource, PortError, Serving
from autoscaler.software import versions
from policies.model import PolicySet
from serve_apps.wire import PlanMessage

T = TypeVar("T")
DEFAULT_TICK_S = 10.0
STALE_AFTER_TICKS = 5.0  # a gateway or Serve that missed this many plans goes by its own rule
STALE_AFTER_MIN_S = 10.0


class Telemetry(Protocol):
    """Whoever wants to see the loop's events as they are journalled. May not raise."""

    def event(self, event: Event, beliefs: Beliefs) -> None:
        """One more event, and what is believed after it."""
        ...


class Unwatched:
    """Nobody looks."""

    def event(self, event: Event, beliefs: Beliefs) -> None:
        """Nothing."""


class NoOrders:
    """Nobody orders anything."""

    def waiting(self) -> tuple[tuple[str, Ordered], ...]:
        """None."""
        return ()

    def taken(self, name: str) -> None:
        """Nothing."""


@dataclass
class Controller:
    """The controller of one cluster. `advise` decides and journals as always, and does nothing."""

    clock: Clock
    metrics: Metrics
    serving: Serving
    cloud: Cloud
    journal: Journal
    policy_source: PolicySource
    executor: Executor
    telemetry: Telemetry = field(default_factory=Unwatched)
    orders: Orders = field(default_factory=NoOrders)
    advise: bool = False
    tick_s: float = DEFAULT_TICK_S
    ledger: Ledger = field(init=False)
    _opened: Opened | None = field(default=None, init=False)
    _ticks: int = field(default=0, init=False)
    _found: Policy | Broken | None = field(default=None, init=False)  # by the policy source, and not journalled yet

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.journal, self.telemetry.event)

    def tick(self) -> Plan | None:
        """One round; returns the plan in force, or None before the first.

        Raises Transient when the journal cannot be written; nothing that is not journalled has been done then.
        """
        if self._opened is None:
            self.ledger.resume()
        now_s = max(self.clock.now_s(), self.ledger.at_s)
        opened = self._open(now_s)
        self._take_policy(now_s)
        policy = self.ledger.beliefs.policy
        if policy is None:
            return None
        self._ticks += 1
        self._take_orders(now_s)
        observation = self._observe(now_s)
        self._forecast(now_s)
        judged = judge(observation, policy, self.ledger.beliefs, now_s, f"{opened.run_id}/{self._ticks}")
        if isinstance(judged, CheckFailed):
            self._fall_back(judged)
        else:
            self._carry_out(Planned(at_s=now_s, plan=judged))
        return self.ledger.beliefs.last_plan

    def _open(self, now_s: float) -> Opened:
        """Journal who writes, once; later only give the journal the chance to start a new segment."""
        if self._opened is None:
            opened = Opened(
                at_s=now_s,
                run_id=f"{int(now_s)}-{self.ledger.seq + 1}",  # no other run, of any journal, has this name
                schema_version=SCHEMA_VERSION,
                versions=versions(),
            )
            self.ledger.record(opened, durable=True)
            self._opened = opened
        else:
            self.ledger.roll(replace(self._opened, at_s=now_s), now_s)
        return self._opened

    def _take_policy(self, now_s: float) -> None:
        self._found = found = self._poll(now_s) or self._found  # a full disk may keep it out of the journal for a while
        if isinstance(found, Broken):
            self.ledger.record(PolicyRefused(at_s=now_s, problems=found.problems))
        elif found is not None and (found.digest != self.ledger.beliefs.digest or self.ledger.beliefs.policy_refused):
            self.ledger.record(
                Configured(at_s=now_s, policy=found.policy, shapes=found.shapes, digest=found.digest), durable=True
            )
        self._found = None

    def _poll(self, now_s: float) -> Policy | Broken | None:
        try:
            return self.policy_source.poll(now_s)
        except Exception as error:
            return Broken(problems=(defect(error),))

    def _take_orders(self, now_s: float) -> None:
        for name, order in self.orders.waiting():
            self.ledger.record(replace(order, at_s=now_s), durable=True)
            self.orders.taken(name)

    def _observe(self, now_s: float) -> Observation:
        seen = Observation(
            at_s=now_s,
            loads=_guarded(lambda: self.metrics.loads(now_s)),
            serving=_guarded(lambda: self.serving.observe(now_s)),
            cloud=_guarded(lambda: self.cloud.describe(now_s)),
            engines=_guarded(lambda: self.metrics.engines(now_s)),
        )
        return self.ledger.record(Observed(at_s=now_s, observation=seen)).observation

    def _forecast(self, now_s: float) -> None:
        rows = forecast(self.ledger.beliefs, now_s)
        if rows:
            self.ledger.record(Forecasted(at_s=now_s, forecasts=rows))

    def _carry_out(self, planned: Planned) -> None:
        written = self.ledger.record(planned, durable=True)
        if self.ledger.beliefs.defect:  # acts are learnt by the plan that they are of
            self._fall_back(_unlearnt(self.ledger.beliefs, written.at_s, written.plan.id))
        elif not self.advise:
            self._act(written.at_s).carry_out(written.plan, self._message(written.plan, written.at_s))

    def _fall_back(self, failed: CheckFailed) -> None:
        """Where there is no plan to act on, the targets of the one before stay in force."""
        self.ledger.record(failed, durable=True)
        before, policy = self.ledger.beliefs.last_plan, self.ledger.beliefs.policy
        if before is not None and policy is not None and not self.advise:
            self._act(failed.at_s).publish(before.id, self._message(still_named(before, policy), failed.at_s))

    def _act(self, now_s: float) -> Act:
        return Act(
            now_s=now_s,
            serving=self.serving,
            cloud=self.cloud,
            record=self.ledger.record,
            executor=self.executor,
            offerings=self.ledger.beliefs.offers,
        )

    def _message(self, plan: Plan, now_s: float) -> PlanMessage:
        beliefs = self.ledger.beliefs
        assert beliefs.policy is not None
        return to_message(
            plan,
            policy_under(beliefs.policy, beliefs, now_s),
            beliefs,
            run_id=beliefs.run_id,
            seq=self._ticks,
            now_s=now_s,
            stale_after_s=max(STALE_AFTER_TICKS * self.tick_s, STALE_AFTER_MIN_S),
        )


def judge(seen: Observation, policy: PolicySet, beliefs: Beliefs, now_s: float, plan_id: str) -> Plan | CheckFailed:
    """The plan of one tick, or why there is none to act on. Pure, and never raises; a replay judges again."""
    if beliefs.defect:
        return _unlearnt(beliefs, now_s, plan_id)
    try:
        policy = policy_under(policy, beliefs, now_s)
        plan = decide(seen, policy, beliefs, now_s, plan_id)
        violations = check(plan, seen, policy, beliefs=beliefs)
    except Exception as error:
        violations = (defect(error),)
    return CheckFailed(at_s=now_s, plan_id=plan_id, violations=violations) if violations else plan


def _unlearnt(beliefs: Beliefs, at_s: float, plan_id: str) -> CheckFailed:
    return CheckFailed(at_s=at_s, plan_id=plan_id, violations=(beliefs.defect,))


def _guarded(call: Callable[[], T]) -> T | Missing:
    """What a port says, or why it said nothing."""
    try:
        return call()
    except PortError as error:
        return Missing(why=f"{error.code}: {error}")
    except Exception as error:
        return Missing(why=defect(error))
