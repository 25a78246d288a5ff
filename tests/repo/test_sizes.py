"""Nothing grows beyond what can be read at one sitting."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

import pytest

from tests.repo.tree import PACKAGES, ROOT, tracked

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MEDIAN_FUNCTION_LINES = 12


def functions(path: Path) -> dict[str, int]:
    """``file:line name`` and length in lines of every function of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    where = path.relative_to(ROOT)
    return {f"{where}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1 for node in found}


def lengths(*tops: str) -> dict[str, int]:
    """Every function of the tracked Python files under the given top-level folders."""
    files = [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in tops]
    return {name: size for path in files for name, size in functions(path).items()}


def test_no_python_file_is_too_long() -> None:
    counts = {
        str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in tracked() if path.suffix == ".py"
    }
    assert {name: count for name, count in counts.items() if count > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    long = {name: size for name, size in lengths(*PACKAGES, "tests").items() if size > MAX_FUNCTION_LINES}
    assert long == {}


def test_the_median_function_is_short() -> None:
    assert median(lengths(*PACKAGES).values()) <= MEDIAN_FUNCTION_LINES


def test_a_long_function_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.repo.test_sizes.ROOT", tmp_path)
    source = tmp_path / "long.py"
    source.write_text("async def long():\n" + "    x = 1\n" * 80)
    assert functions(source) == {"long.py:1 long": 81}
