"""Requests that begin alike go to the same replica of an application, so that its prefix cache is met.

`home` is pure. `PrefixRouter` is what Serve runs in the gateway's process for each engine application: the less busy of
two at random, as Serve's own router, but the home of the request's session before them. May not decide whether that is
worth it: the gateway gives a request a session only where engines report hits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from hashlib import blake2b

from ray.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

SPARE = 1.25  # a home takes this much of the replicas' mean load, and one request more, before others are asked


def home(session: str, loads: Mapping[str, int]) -> str | None:
    """The replica of `loads` (id → requests in flight) where the session belongs; None when that has too much to do.

    The highest random weight: a replica that comes or goes moves only the sessions that are, or were, its own.
    """
    if not loads:
        return None
    chosen = max(loads, key=lambda replica: (_weight(session, replica), replica))
    bound = SPARE * sum(loads.values()) / len(loads) + 1.0
    return chosen if loads[chosen] <= bound else None


def _weight(session: str, replica: str) -> bytes:
    return blake2b(f"{session}/{replica}".encode(), digest_size=8).digest()


class PrefixRouter(FIFOMixin, LocalityMixin, MultiplexMixin, RequestRouter):
    """See Serve's RequestRouter."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas to try: the session's home, then two of those on the nearest nodes."""
        near = [self._replicas[one] for one in self.apply_locality_routing(pending_request=pending_request)]
        ranks = [random.sample(near, min(2, len(near)))] if near else []
        session = pending_request.metadata.session_id if pending_request is not None else ""
        if session:
            replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
            known = self.replica_queue_len_cache
            chosen = home(session, {name: known.get(one.replica_id) or 0 for name, one in replicas.items()})
            if chosen is not None:
                ranks.insert(0, [replicas[chosen]])
        return ranks
