"""`qm bench world`: the figures are there and mean what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos.bench_world import world_command


def test_it_says_how_fast_the_world_is_under_both_controllers(tmp_path: Path) -> None:
    assert world_command(130_000, str(tmp_path / "out.json")) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["requests"] == pytest.approx(130_000, rel=0.02)
    assert figures["trivial_rps"] > figures["ours_rps"] > 1000.0
    assert figures["ours_tick_ms"] == pytest.approx(1000.0 * figures["requests"] / figures["ours_rps"] / 65.0)
    assert figures["rss_mib"] > 50.0
