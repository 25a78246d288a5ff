"""The repository as the checks see it: its root, and the files that git would commit."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("autoscaler", "chaos", "forecasting", "policies", "serve_apps")


@cache
def tracked() -> tuple[Path, ...]:
    """Every file of text that is committed, or is new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    files = (ROOT / name for name in listed.stdout.split("\0") if name)
    return tuple(sorted(file for file in files if file.is_file() and file.suffix != ".png"))


def documents() -> tuple[Path, ...]:
    """The Markdown files that a reader is meant to follow."""
    return tuple(path for path in tracked() if path.suffix == ".md")
