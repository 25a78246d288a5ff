"""Instance types, models and performance constants, with sources; and the engine shapes that follow for a policy."""

from .load import load_catalogue
from .model import Catalogue
from .resolve import Resolved, located, resolve, written_by
from .shapes import CatalogueProblems, ShapeProblem, shapes

__all__ = [
    "Catalogue",
    "CatalogueProblems",
    "Resolved",
    "ShapeProblem",
    "load_catalogue",
    "located",
    "resolve",
    "shapes",
    "written_by",
]
