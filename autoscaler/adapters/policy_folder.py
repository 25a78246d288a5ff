"""The policy as a folder of files, read again whenever one of them changed. May not act on what it finds."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from autoscaler.catalogue import CatalogueProblems, located, resolve
from autoscaler.core.model import Shape
from autoscaler.ports import Broken, Policy
from autoscaler.render import Engine, serve_config
from policies.load import PolicyProblems
from policies.model import PolicySet

POLL_EVERY_S = 10.0
_SHAPES: TypeAdapter[tuple[Shape, ...]] = TypeAdapter(tuple[Shape, ...])


def read_policy(folder: Path, engine: Engine) -> Policy:
    """The policy of a folder with the shapes that the catalogue gives for it, when `engine` can serve them.

    Raises PolicyProblems.
    """
    found = resolve(folder)
    try:
        serve_config(found.policy, found.shapes, engine=engine)
    except CatalogueProblems as error:
        raise located(folder, error) from error
    return Policy(policy=found.policy, shapes=found.shapes, digest=digest(found.policy, found.shapes))


def digest(policy: PolicySet, made: tuple[Shape, ...]) -> str:
    """One word for a policy and its shapes."""
    return hashlib.sha256(policy.model_dump_json().encode() + _SHAPES.dump_json(made)).hexdigest()[:16]


class PolicyFolder:
    """ports.PolicySource over a folder, looked at every 10 s or after `look_now`. `read` raises PolicyProblems."""

    def __init__(self, folder: Path, read: Callable[[Path], Policy]) -> None:
        self._folder = folder
        self._read = read
        self._seen = ""
        self._due_at_s = 0.0
        self._asked = threading.Event()

    def look_now(self) -> None:
        """Look at the next poll, whatever the time; safe in a signal handler."""
        self._asked.set()

    def poll(self, now_s: float) -> Policy | Broken | None:
        """See ports.PolicySource."""
        if now_s < self._due_at_s and not self._asked.is_set():
            return None
        self._asked.clear()
        self._due_at_s = now_s + POLL_EVERY_S
        try:
            seen = _fingerprint(self._folder)
            if seen == self._seen:
                return None
            self._seen = seen
            return self._read(self._folder)
        except PolicyProblems as error:
            return Broken(problems=tuple(str(problem) for problem in error.problems))
        except OSError as error:
            self._seen = ""
            return Broken(problems=(f"{error.filename or self._folder}: {error.strerror}; make it readable",))


def _fingerprint(folder: Path) -> str:
    """Changes when any file of the policy does, contents included: an editor may keep size and time."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".yaml", ".yml"):
            total.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return total.hexdigest()
