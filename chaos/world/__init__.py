"""The simulated world: the same controller, its peers, and everything that goes wrong, under a virtual clock."""

from __future__ import annotations

from .runs import OURS, Factory, UnknownController, facts, mean_mix, simulate
from .watch import OfferingSample, Sample, ServiceSample, Watch

__all__ = [
    "OURS",
    "Factory",
    "OfferingSample",
    "Sample",
    "ServiceSample",
    "UnknownController",
    "Watch",
    "facts",
    "mean_mix",
    "simulate",
]
