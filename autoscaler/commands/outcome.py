"""How every command ends: bad input as one exception, results as JSON. May not import anything slow."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

OK, VIOLATED, BAD_INPUT = 0, 1, 2
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_SHOWN = 300  # characters of a path
MOST_BYTES = 1 << 30  # of an input that is read whole


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
    if isinstance(error, OSError) and error.errno in FULL:
        return (f"{error.filename or 'standard output'}: {error.strerror}; what was to be written there is not whole",)
    if isinstance(error, OSError) and error.filename is not None:
        return (f"{str(error.filename)[:MOST_SHOWN]}: {error.strerror}; check the path and its permissions",)
    return (str(error),) if isinstance(error, Misconfigured) else None


def write_json(target: str, data: bytes) -> None:
    """`data` to the file `target`, or to standard output for ``-``. Raises BadInput when it cannot be written."""
    if target == "-":
        sys.stdout.write(data.decode() + "\n")
        sys.stdout.flush()
    else:
        write_file("--json", Path(target), data + b"\n")


def flush_output() -> None:
    """The end of every command: what could not be written to standard output is said, and the exit code 2."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"standard output: {error.strerror}; what was to be written there is not whole", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None


def write_file(option: str, path: Path, data: bytes | str) -> None:
    """`data` to the file `path`, given as `option`. Raises BadInput when it cannot be written."""
    try:
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise BadInput(_unwritable(option, path, error.errno or errno.EIO)) from error


def check_json(target: str | None) -> None:
    """Raises BadInput when `write_json` could not write `target`: said before the work, not after. Writes nothing."""
    if target is not None and target != "-":
        check_file("--json", Path(target))


def check_file(option: str, path: Path) -> None:
    """Raises BadInput when a file `path`, given as `option`, cannot be written. Writes nothing."""
    if str(path) == "-" and option != "--json":
        raise BadInput(f"{option} -: goes to a file; name one, only --json writes to the screen")
    why = _why_not(path)
    if why:
        raise BadInput(_unwritable(option, path, why))


def check_apart(inputs: Iterable[Path], outputs: Mapping[str, Path | str | None]) -> None:
    """Raises BadInput when an output, named by its option, is one of the inputs or of the other outputs."""
    seen = {_identity(path): "is what the run reads" for path in inputs}
    for option, target in outputs.items():
        if target is None or target == "-":
            continue
        identity = _identity(Path(target))
        if identity in seen:
            raise BadInput(f"{option} {target}: {seen[identity]}; give it a file of its own")
        seen[identity] = f"is what {option} writes too"


def check_input(path: Path) -> None:
    """Raises BadInput when `path` is no regular file: a pipe might never speak, a device never end. Reads nothing."""
    if path.exists() and not path.is_file():
        raise BadInput(f"{path}: is no regular file; save what it gives, and name that file")
    if path.exists() and path.stat().st_size > MOST_BYTES:
        raise BadInput(f"{path}: is larger than {MOST_BYTES >> 20} MiB; cut it, or check what it is")


def _identity(path: Path) -> tuple[int, int] | Path:
    """Of the file: two names of one file are one. A device is what it is called: many may write to it."""
    if not path.is_file():
        return path.absolute() if path.exists() else path.resolve()
    found = path.stat()
    return found.st_dev, found.st_ino


def _why_not(path: Path) -> int:
    """The error that writing the file would give, 0 for none. A pipe would wait for a reader, perhaps for ever."""
    try:
        if path.is_dir():
            return errno.EISDIR
        if path.is_fifo():
            return errno.ESPIPE
        if not path.parent.is_dir():
            return errno.ENOENT
        path.exists()
    except OSError as error:  # a name that is too long, a loop of links
        return error.errno or errno.EINVAL
    return 0 if os.access(path if path.exists() else path.parent, os.W_OK) else errno.EACCES


def check_port(option: str, port: int) -> None:
    """Raises BadInput when `port`, given as `option`, is none."""
    if not 1 <= port <= 65535:
        raise BadInput(f"{option} {port}: is no port; give a number from 1 to 65535")


def _unwritable(option: str, path: Path, why: int) -> str:
    screen = ", or - for the screen" if option == "--json" else ""
    return f"{option} {str(path)[:MOST_SHOWN]}: {os.strerror(why)}; give a file that can be written{screen}"
