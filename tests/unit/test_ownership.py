"""`qm` does not start where another distribution owns one of its packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.ownership import PACKAGES, check_ownership, foreign_owners


def installed(site: Path, name: str, **files: str) -> Path:
    """A folder of installed distributions in which `name` left metadata `files` (`top_level`, `record`)."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    names = {"top_level": "top_level.txt", "record": "RECORD"}
    for key, text in files.items():
        (info / names[key]).write_text(text)
    return site


def test_a_distribution_that_declares_our_package_is_an_owner(tmp_path: Path) -> None:
    site = installed(tmp_path, "rules-of-others", top_level="policies\nunrelated\n")
    assert foreign_owners([str(site)]) == ("policies: rules-of-others",)


def test_files_count_when_nothing_is_declared(tmp_path: Path) -> None:
    record = "chaos/__init__.py,,\nchaos/monkey.py,,\nforecasting.py,,\nother/policies.py,,\nserve_apps/data.json,,\n"
    site = installed(tmp_path, "monkey", record=record)
    assert foreign_owners([str(site)]) == ("chaos: monkey", "forecasting: monkey")


@pytest.mark.parametrize("spelling", ["quartermaster-serve", "Quartermaster_Serve", "quartermaster.serve"])
def test_our_own_distribution_is_no_stranger_however_it_is_spelt(tmp_path: Path, spelling: str) -> None:
    site = installed(tmp_path, spelling, top_level="\n".join(PACKAGES))
    assert foreign_owners([str(site)]) == ()


def test_a_foreign_owner_ends_the_program_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = installed(installed(tmp_path, "b-dist", top_level="policies"), "a-dist", top_level="policies\nchaos")
    with pytest.raises(SystemExit) as end:
        check_ownership([str(site)])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.count("\n") == 1
    assert "chaos: a-dist; policies: a-dist; policies: b-dist" in said
    assert "pip uninstall a-dist b-dist" in said


def test_this_environment_is_clean_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    check_ownership()
    assert capsys.readouterr().err == ""
