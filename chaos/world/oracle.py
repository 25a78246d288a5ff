"""Our own loop with perfect knowledge, to split what it lacks: of demand, of supply. Never part of the product.

"oracle-supply" needs no code here: it is the loop in a world whose pools are generous (`supply.Pools`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np

from autoscaler.core.events import Forecast, Forecasted
from autoscaler.loop import Controller
from chaos.scenario import Scenario
from chaos.streams import arrivals

BIN_S = 60.0  # a rate is a mean over so long
QUANTILES = (0.5, 0.8, 0.95)


def future_rps(scenario: Scenario, service: str, seed: int) -> np.ndarray:
    """The true mean rate of each BIN_S of the run, requests/s, follow-up calls of agents left out."""
    stream = arrivals(scenario, service, seed)
    bins = ceil(scenario.duration_s / BIN_S)
    counts = [len(stream.take((index + 1) * BIN_S).at_s) for index in range(bins)]
    return np.array(counts) / BIN_S


def seer(scenario: Scenario, seed: int) -> Callable[..., Controller]:
    """A Controller whose forecasts are the true largest rate from now to one lead and BIN_S ahead."""
    rates = {key: future_rps(scenario, key, seed) for key, _, _ in scenario.policy_set.services()}

    class Seer(Controller):
        def _forecast(self, now_s: float) -> None:
            from autoscaler.core.demand import lead_s

            beliefs = self.ledger.beliefs
            rows = []
            for service, rate in rates.items():
                lead = lead_s(beliefs, service)
                begins = int((now_s - scenario.start_at_s) / BIN_S)
                coming = rate[begins : begins + ceil(lead / BIN_S) + 2]
                rps = float(coming.max()) if len(coming) else 0.0
                pairs = tuple((quantile, rps) for quantile in QUANTILES)
                rows.append(Forecast(service=service, lead_s=lead, quantiles=pairs, member="oracle"))
            self.ledger.record(Forecasted(at_s=now_s, forecasts=tuple(rows)))

    return Seer
