"""What operators have ordered: each order stands until its time is over, and says who gave it and why.

Pure; may not do I/O or read a clock. An order is the policy's word for a while: a frozen service wants the replicas
that it had when the order came, no more and no fewer; a floor raises `min_replicas`. An instance that is to be drained
gets no more work. So everything that keeps the policy keeps an order, and a replay does too.
"""

from __future__ import annotations

from dataclasses import replace

from policies.model import PolicySet, Service

from .beliefs import Beliefs
from .events import Ordered
from .model import Demand
from .reasons import ReasonCode, why

LONGEST_S = 7 * 86_400.0  # whatever is wanted for longer belongs into the policy


def ordered(beliefs: Beliefs, event: Ordered) -> Beliefs:
    """The orders that stand after one more. A newer one replaces the older of its kind on the same subject."""
    orders = {key: order for key, order in beliefs.orders.items() if order.until_s > event.at_s}
    targets = beliefs.last_plan.targets if beliefs.last_plan is not None else ()
    lifts = event.verb == "unfreeze" or (event.verb == "floor" and not event.replicas)
    if event.verb == "freeze":
        lifts = not any(row.service == event.subject for row in targets)  # nothing was given yet that could stay
        event = replace(event, replicas=sum(row.wanted for row in targets if row.service == event.subject))
    key = _key("freeze" if event.verb == "unfreeze" else event.verb, event.subject)
    orders.pop(key, None)
    if not lifts and event.until_s > event.at_s:
        orders[key] = event
    return replace(beliefs, orders=orders)


def in_force(beliefs: Beliefs, now_s: float) -> tuple[Ordered, ...]:
    """The orders that stand, by what they concern."""
    rows = (order for order in beliefs.orders.values() if order.until_s > now_s)
    return tuple(sorted(rows, key=lambda row: (row.subject, row.verb)))


def policy_under(policy: PolicySet, beliefs: Beliefs, now_s: float) -> PolicySet:
    """The policy as the orders leave it."""
    if not in_force(beliefs, now_s):
        return policy
    return policy.model_copy(
        update={
            "units": tuple(
                unit.model_copy(
                    update={
                        "services": tuple(_under(f"{unit.unit}/{s.name}", s, beliefs, now_s) for s in unit.services)
                    }
                )
                for unit in policy.units
            )
        }
    )


def _under(key: str, entry: Service, beliefs: Beliefs, now_s: float) -> Service:
    frozen, floor = _standing(beliefs, "freeze", key, now_s), _standing(beliefs, "floor", key, now_s)
    if frozen is not None:
        count = min(frozen.replicas, entry.max_replicas)
        bounds = {"min_replicas": count, "max_replicas": count, "warm_replicas": 0, "scale_to_zero": False}
        return entry.model_copy(update=bounds | {"on_demand_floor": min(entry.on_demand_floor, count)})
    if floor is not None:
        count = min(max(entry.min_replicas, floor.replicas), entry.max_replicas)
        return entry.model_copy(update={"min_replicas": count, "scale_to_zero": False})
    return entry


def told(demand: Demand, beliefs: Beliefs, now_s: float) -> Demand:
    """The demand with the order that it stands under among its reasons."""
    verbs = ("freeze", "floor")
    order = next((row for verb in verbs if (row := _standing(beliefs, verb, demand.service, now_s))), None)
    if order is None:
        return demand
    reason = why(ReasonCode.ORDERED, f"{order.verb} by {order.who}", replicas=order.replicas, until_s=order.until_s)
    return replace(demand, reasons=(*demand.reasons, reason))


def drain_of(beliefs: Beliefs, instance_id: str, now_s: float) -> Ordered | None:
    """The order to drain an instance, while it stands."""
    return _standing(beliefs, "drain", instance_id, now_s)


def problem(order: Ordered, beliefs: Beliefs) -> str:
    """What is wrong with an order as things stand, in words with the remedy; empty when nothing is."""
    entries = {key: entry for key, _, entry in beliefs.policy.services()} if beliefs.policy is not None else {}
    if not order.who.strip() or not order.why.strip():
        return "who orders it and why are journalled: give both"
    if order.verb == "drain":
        known = beliefs.instances.get(order.subject)
        gone = known is None or known.state in ("draining", "terminating", "gone")
        return f"{order.subject}: is no instance in service; qm status and the console name them" if gone else ""
    if order.subject not in entries:
        return f"{order.subject}: is no service of the policy in force; names are UNIT/SERVICE"
    most = entries[order.subject].max_replicas
    if order.verb == "floor" and not 0 <= order.replicas <= most:
        return f"{order.subject}: a floor of {order.replicas} is not within 0 and its max_replicas {most}"
    return ""


def _standing(beliefs: Beliefs, verb: str, subject: str, now_s: float) -> Ordered | None:
    order = beliefs.orders.get(_key(verb, subject))
    return order if order is not None and order.until_s > now_s else None


def _key(verb: str, subject: str) -> str:
    return f"{verb} {subject}"
