"""How every command ends: bad input as one exception, results as JSON. May not import anything slow."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

OK, VIOLATED, BAD_INPUT = 0, 1, 2


class BadInput(Exception):
    """What is wrong with what the user gave; `problems` name file, key and remedy. Exit code 2, nothing was started."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def problems_of(error: Exception) -> tuple[str, ...] | None:
    """The words for an error that is the user's to mend, or None for a defect of ours."""
    from autoscaler.ports import Misconfigured
    from policies.problems import Problems

    if isinstance(error, BadInput):
        return error.problems
    if isinstance(error, Problems):
        return tuple(str(problem) for problem in error.problems)
    return (str(error),) if isinstance(error, Misconfigured) else None


def write_json(target: str, data: bytes) -> None:
    """`data` to the file `target`, or to standard output for ``-``. Raises BadInput when it cannot be written."""
    if target == "-":
        sys.stdout.write(data.decode() + "\n")
        return
    try:
        Path(target).write_bytes(data + b"\n")
    except OSError as error:
        raise _unwritable(target, str(error.strerror)) from error


def check_json(target: str | None) -> None:
    """Raises BadInput when `write_json` could not write `target`: said before the work, not after. Writes nothing."""
    if target is None or target == "-":
        return
    why = _why_not(Path(target))
    if why:
        raise _unwritable(target, os.strerror(why))


def check_file(option: str, path: Path) -> None:
    """Raises BadInput when a file `path`, given as `option`, cannot be written. Writes nothing."""
    why = _why_not(path)
    if why:
        raise BadInput(f"{option} {path}: {os.strerror(why)}; give a file that can be written")


def check_apart(inputs: Iterable[Path], outputs: Mapping[str, Path | str | None]) -> None:
    """Raises BadInput when an output, named by its option, is one of the inputs or of the other outputs."""
    seen = {path.resolve(): "is what the run reads" for path in inputs}
    for option, target in outputs.items():
        if target is None or target == "-":
            continue
        path = Path(target).resolve()
        if path in seen:
            raise BadInput(f"{option} {target}: {seen[path]}; give it a file of its own")
        seen[path] = f"is what {option} writes too"


def _why_not(path: Path) -> int:
    """The error that writing the file would give, 0 for none. A pipe would wait for a reader, perhaps for ever."""
    if path.is_dir():
        return errno.EISDIR
    if path.is_fifo():
        return errno.ESPIPE
    if not path.parent.is_dir():
        return errno.ENOENT
    return 0 if os.access(path if path.exists() else path.parent, os.W_OK) else errno.EACCES


def check_port(option: str, port: int) -> None:
    """Raises BadInput when `port`, given as `option`, is none."""
    if not 1 <= port <= 65535:
        raise BadInput(f"{option} {port}: is no port; give a number from 1 to 65535")


def _unwritable(target: str, why: str) -> BadInput:
    return BadInput(f"--json {target}: {why}; give a file that can be written, or - for the screen")
