"""What every test may use: where recorded data lie, and an environment in which Ray asks for no token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports Ray: a cluster started by a test must not write a token into the home directory.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Before anything imports numpy: over matrices this small BLAS threads only contend (a fit takes 4 s instead of 0.04 s).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# `make test` tries the same examples every time; `make proof` tries other ones, and twenty times as many.
settings.register_profile("test", deadline=None, derandomize=True, database=None)
settings.register_profile("proof", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("test")


def data_folder() -> Path | None:
    """The folder of recorded data that ``$QM_DATA`` names, or None when unset. An unusable value is an error."""
    named = os.environ.get("QM_DATA")
    if not named:
        return None
    folder = Path(named)
    if not folder.is_dir():
        raise pytest.UsageError(f"QM_DATA={named}: no such folder; unset it to leave the tests on recorded data out")
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without recorded data their tests are left out and counted as deselected: nothing is ever skipped."""
    if data_folder() is not None:
        return
    absent = [item for item in items if item.get_closest_marker("data")]
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item in items if not item.get_closest_marker("data")]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def qm_data() -> Path:
    """The recorded data; only for tests marked ``data``."""
    folder = data_folder()
    if folder is None:
        pytest.fail("a test that uses qm_data must be marked with @pytest.mark.data")
    return folder
