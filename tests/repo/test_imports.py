"""Imports go one way, and the clock is read at the edges only: the tools say so, and would notice."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.repo.tree import PACKAGES, ROOT

SCRIPTS = Path(sysconfig.get_path("scripts"))


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter with the repository's contracts on the packages that lie in `folder`."""
    command = [sys.executable, str(SCRIPTS / "lint-imports"), "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


FORBIDDEN = [
    ("autoscaler/core/units.py", "import time", "autoscaler.core.units -> time"),
    ("autoscaler/core/units.py", "import autoscaler.ports", "autoscaler.core.units -> autoscaler.ports"),
    ("autoscaler/ports.py", "import autoscaler.adapters", "autoscaler.ports -> autoscaler.adapters"),
    ("autoscaler/ports.py", "import chaos", "autoscaler.ports -> chaos"),
    ("forecasting/extra.py", "import random", "forecasting.extra -> random"),
    ("policies/model.py", "import yaml", "policies.model -> yaml"),
    ("policies/extra.py", "import serve_apps", "policies.extra -> serve_apps"),
    ("serve_apps/wire.py", "import ray", "serve_apps.wire -> ray"),
    ("serve_apps/timing.py", "import policies", "serve_apps.timing -> policies"),
]


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What import-linter says of a copy of the packages that holds every forbidden import of the table."""
    copy = tmp_path_factory.mktemp("spoilt")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for module, line, _ in FORBIDDEN:
        with (copy / module).open("a") as spoilt:
            spoilt.write(f"\n{line}\n")
    result = lint_imports(copy)
    assert result.returncode == 1
    return result.stdout


@pytest.mark.parametrize("complaint", [complaint for _, _, complaint in FORBIDDEN])
def test_a_forbidden_import_breaks_a_contract(complaints: str, complaint: str) -> None:
    assert complaint in complaints


@pytest.mark.parametrize(
    "module", ["autoscaler/core/x.py", "autoscaler/loop.py", "forecasting/x.py", "policies/x.py", "serve_apps/wire.py"]
)
@pytest.mark.parametrize(
    "line", ["import time", "from datetime import datetime\ndatetime.now()", "import uuid\nuuid.uuid4()"]
)
def test_reading_the_clock_or_drawing_lots_is_refused_outside_the_edges(module: str, line: str) -> None:
    command = [str(SCRIPTS / "ruff"), "check", "--select", "TID251", "--stdin-filename", module, "-"]
    result = subprocess.run(command, cwd=ROOT, input=f"{line}\n", capture_output=True, text=True, check=False)
    assert "TID251" in result.stdout
