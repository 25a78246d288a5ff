"""Instance types, models and performance constants, with sources; and the engine shapes that follow for a policy."""

from .load import load_catalogue
from .model import Catalogue
from .resolve import Resolved, located, resolve, written_by
from .shapes import CatalogueProblems, ShapeProblem, gpu_timing, one_shape, shapes, sync_share

__all__ = [
    "Catalogue",
    "CatalogueProblems",
    "Resolved",
    "ShapeProblem",
    "gpu_timing",
    "load_catalogue",
    "located",
    "one_shape",
    "resolve",
    "shapes",
    "sync_share",
    "written_by",
]
