"""The best plan that never changes: so many replicas of each service for the whole run, found by trying them.

Pure; whoever searches runs the world. The search halves, for all services at once, between the largest number of
replicas that missed a service's objective and the smallest that met it; services that share pools disturb each other a
little, so the best is the cheapest plan tried that meets every objective, else the one that meets them best.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Trial:
    """What a plan gave: attainment by service (None: nobody came) and cost."""

    attainment: dict[str, float | None]
    cost_usd: float


@dataclass
class Search:
    """`fraction` and `most` by service, most important first. Ask for `plan`, run it, `tell` what it gave."""

    fraction: dict[str, float]
    most: dict[str, int]
    low: dict[str, int] = field(default_factory=dict)
    high: dict[str, int] = field(default_factory=dict)
    tried: dict[tuple[tuple[str, int], ...], Trial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.low = dict.fromkeys(self.fraction, -1)
        self.high = dict(self.most)

    def plan(self) -> tuple[tuple[str, int], ...] | None:
        """Replicas by service to be tried next; None when there is nothing left to try."""
        if not self.tried:
            return self._plan(self.most)
        following = self._plan({key: self._next(key) for key in self.fraction})
        return following if len(self.tried) <= ROUNDS and following not in self.tried else None

    def tell(self, plan: tuple[tuple[str, int], ...], trial: Trial) -> None:
        """What the plan gave."""
        first = not self.tried
        self.tried[plan] = trial
        for key, replicas in plan:
            if self._met(key, trial):
                self.high[key] = min(self.high[key], replicas)
            elif not first:  # where even the most is too few, fewer may do as well: the pools are what is short
                self.low[key] = max(self.low[key], min(replicas, self.high[key] - 1))

    def best(self) -> tuple[tuple[str, int], ...]:
        """The cheapest plan that met every objective; else the one that met most of them, the important ones first."""
        return min(self.tried, key=lambda plan: (*self._misses(self.tried[plan]), self.tried[plan].cost_usd, plan))

    def _misses(self, trial: Trial) -> tuple[float, ...]:
        """By service, how much the objective was missed by, to a thousandth."""
        short = (self.fraction[key] - (1.0 if (got := trial.attainment[key]) is None else got) for key in self.fraction)
        return tuple(round(max(0.0, each), 3) for each in short)

    def _met(self, key: str, trial: Trial) -> bool:
        got = trial.attainment[key]
        return got is None or got >= self.fraction[key]

    def _next(self, key: str) -> int:
        """Half way; the least that met the objective once nothing lies between."""
        low, high = self.low[key], self.high[key]
        return high if high - low <= 1 else (low + high) // 2

    @staticmethod
    def _plan(replicas: dict[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple((key, max(0, count)) for key, count in replicas.items())
