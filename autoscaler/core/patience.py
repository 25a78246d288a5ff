"""Work that may wait: how fast a queue has to be cleared so that every request in it still meets its deadline.

Pure; may not do I/O or read a clock. A service whose only limits are on the whole answer (`e2e_s`, `deadline_s`), that
queues and never sheds, and whose goal is not latency, is patient: load that comes in a burst is worked off over the
time it has, by fewer replicas that are always full, instead of by many that come too late anyway.
"""

from __future__ import annotations

from policies.model import Service

# Of the deadline. Work is done at (queued / window): in a steady state a request waits one window; after a burst the
# queue falls by 63 % a window until one replica carries the rest, so a start from ten replicas' work takes
# ln 10 + 1 = 3.3 windows (and the hold keeps the rate up for longer than that).
WINDOW = 0.25


def window_s(entry: Service, lead_s: float) -> float | None:
    """Seconds over which what is queued is to be worked off; None for a service that is not patient, or whose deadline
    is so near that there is nothing to wait for.
    """
    slo = entry.slo
    whole_s = min((limit for limit in (slo.e2e_s, slo.deadline_s) if limit is not None), default=0.0)
    waits = "queue" in entry.sacrifice and "shed" not in entry.sacrifice
    if entry.goal == "latency" or slo.ttft_s is not None or slo.tpot_s is not None or not waits:
        return None
    return WINDOW * whole_s if WINDOW * whole_s > lead_s else None
