"""What the kernel's log and nvidia-smi say of GPUs: only what cannot mend itself is a fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from serve_apps.gpu_health import COLUMNS, COMMAND, HANGS, Watch, of_log, of_smi

HEALTHY = "0, 0, 0, Not Active, Not Active\n1, 0, 0, Not Active, Not Active\n"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("6,1234,5678901,-;NVRM: Xid (PCI:0000:10:1c): 79, pid='<unknown>', GPU has fallen off the bus.",
         "GPU 0000:10:1c: Xid 79, fallen off the bus"),
        ("NVRM: Xid (PCI:0000:20:1c): 48, pid=1896, name=python, DBE (double bit error) ECC Error",
         "GPU 0000:20:1c: Xid 48, uncorrectable memory error"),
        ("NVRM: Xid (PCI:0000:53:00): 119, pid=2, name=ray::LLM, Timeout waiting for RPC from GSP!",
         "GPU 0000:53:00: Xid 119, its system processor does not answer"),
        ("NVRM: Xid (PCI:0000:53:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
         "GPU 0000:53:00: Xid 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"),
        ("nvidia-nvswitch0: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
         "NVSwitch 0000:86:00.0: SXid 20034"),
    ],
)  # fmt: skip
def test_what_needs_a_reset_or_a_repair_is_a_fault(line: str, fault: str) -> None:
    assert of_log(["[   12.3] eth0: link up", line, "something else"]).fault == fault


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        ("NVRM: Xid (PCI:0000:10:1c): 13, pid=9, name=python, Graphics SM Warp Exception", "GPU 0000:10:1c: Xid 13"),
        ("NVRM: Xid (PCI:0000:10:1c): 31, pid=9, name=python, Ch 00000008, MMU Fault", "GPU 0000:10:1c: Xid 31"),
        ("NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked", "GPU 0000:10:1c: Xid 63"),
        ("NVRM: Xid (PCI:0000:10:1c): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
         "GPU 0000:10:1c: Xid 154"),
        ("nvidia-nvswitch0: SXid (PCI:0000:86:00.0): 24007, Non-fatal, Link 30", ""),
        ("usb 1-1: new device", ""),
    ],
)  # fmt: skip
def test_what_a_program_did_or_what_mends_itself_is_none(line: str, detail: str) -> None:
    health = of_log([line])
    assert (health.fault, health.detail) == ("", detail)


@pytest.mark.parametrize(
    ("text", "fault", "detail"),
    [
        (HEALTHY, "", ""),
        ("0, [N/A], [N/A], Not Active, Not Active\n", "", ""),
        ("1, 2, 0, Not Active, Not Active\n", "GPU 1: 2 uncorrectable memory errors", ""),
        ("0, 0, 1, Not Active, Not Active\n", "GPU 0: a memory row cannot be replaced", ""),
        ("0, 0, 0, Active, Not Active\n3, 0, 0, Not Active, Active\n", "", "GPU 0, 3: slowed down by heat or power"),
        ("Unable to determine the device handle for GPU0000:00:1E.0: GPU is lost.  Reboot the system\n",
         "nvidia-smi: Unable to determine the device handle for GPU0000:00:1E.0: GPU is lost.  Reboot the system", ""),
        ("", "", ""),
    ],
)  # fmt: skip
def test_what_nvidia_smi_counts(text: str, fault: str, detail: str) -> None:
    health = of_smi(text)
    assert (health.fault, health.detail) == (fault, detail)


def test_the_command_asks_for_the_columns_that_are_read() -> None:
    assert COMMAND[1] == f"--query-gpu={','.join(COLUMNS)}"


def printing(text: str, code: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; sys.stdout.write({text!r}); sys.exit({code})")


def test_a_fault_once_seen_stands_and_the_log_is_read_on(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("usb 1-1: new device\n")
    watch = Watch(log, printing(HEALTHY))
    assert watch.look().fault == ""
    with log.open("a") as kernel:
        kernel.write("NVRM: Xid (PCI:0000:10:1c): 79, GPU has fallen off the bus.\n")
    assert watch.look().fault.startswith("GPU 0000:10:1c: Xid 79")
    assert watch.look().fault.startswith("GPU 0000:10:1c: Xid 79")


def test_without_a_gpu_or_a_log_there_is_no_fault(tmp_path: Path) -> None:
    health = Watch(tmp_path / "none", ("no-such-nvidia-smi",)).look()
    assert health.fault == ""
    assert "no-such-nvidia-smi: No such file" in health.detail


def test_a_query_that_this_driver_does_not_know_is_a_detail(tmp_path: Path) -> None:
    health = Watch(tmp_path / "none", printing('Field "x" is not a valid field to query.\n', 2)).look()
    assert (health.fault, health.detail) == ("", 'nvidia-smi: Field "x" is not a valid field to query.')


def test_a_gpu_that_never_answers_is_given_up_after_the_third_time(tmp_path: Path) -> None:
    hanging = Watch(tmp_path / "none", (sys.executable, "-c", "input()"), timeout_s=0.05)
    hanging.command = ("sleep", "30")
    faults = [hanging.look().fault for _ in range(HANGS)]
    assert faults == ["", "", f"nvidia-smi does not answer ({HANGS} times)"]
