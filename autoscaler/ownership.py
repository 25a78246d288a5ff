"""Refuses to run when another distribution owns one of our top-level packages.

The names `policies`, `chaos` and `forecasting` are common words: a second distribution that installs one of them would
mix its modules with ours, and what then runs is nobody's program. May not import any other module of ours, so that the
check itself cannot be answered by the wrong one. Reads installed metadata only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions

DISTRIBUTION = "quartermaster-serve"
PACKAGES = ("autoscaler", "chaos", "forecasting", "policies", "serve_apps")
_RECORDED = re.compile(rf"^({'|'.join(PACKAGES)})(?:/[^,\n]*)?\.py,", re.MULTILINE)


def _normal(name: str | None) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name or "").lower()


def _packages(distribution: Distribution) -> set[str]:
    """Those of our packages that a distribution says it installs, else those that its recorded files lie in."""
    declared = distribution.read_text("top_level.txt")
    if declared:
        return set(declared.split()) & set(PACKAGES)
    # As text: parsing the records of a whole environment would cost every start of `qm` most of a second.
    return set(_RECORDED.findall(distribution.read_text("RECORD") or ""))


def foreign_owners(path: Sequence[str] | None = None) -> tuple[str, ...]:
    """``package: distribution`` for each of our packages that another distribution claims, in order.

    `path` is where installed distributions are looked for; None means `sys.path`.
    """
    found = distributions(path=list(sys.path if path is None else path))
    claims = {(package, each.metadata["Name"]) for each in found for package in _packages(each)}
    return tuple(f"{package}: {owner}" for package, owner in sorted(claims) if _normal(owner) != DISTRIBUTION)


def check_ownership(path: Sequence[str] | None = None) -> None:
    """Raises SystemExit(2), after one message on standard error, when `foreign_owners` finds any."""
    owners = foreign_owners(path)
    if not owners:
        return
    names = sorted({owner.partition(": ")[2] for owner in owners})
    print(
        f"qm: another distribution owns packages that Quartermaster needs ({'; '.join(owners)}); "
        f"run `pip uninstall {' '.join(names)}`, or install {DISTRIBUTION} in an environment of its own",
        file=sys.stderr,
    )
    raise SystemExit(2)
