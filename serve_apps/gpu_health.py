"""Whether the GPUs of this machine can still serve: Xid errors in the kernel's log, and what nvidia-smi counts.

Only what cannot mend itself is a fault; an error of a program, a corrected bit or a hot minute is a detail. The parsers
are pure; `Watch` reads the two sources in a thread of its own, because a GPU that hangs makes nvidia-smi hang too. May
not act on a fault: the controller empties the node.

Sources: NVIDIA's Xid catalogue (errors whose immediate action is a reset of the GPU, a reboot or a repair); columns of
``nvidia-smi --help-query-gpu``.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

EVERY_S = 30.0
SMI_TIMEOUT_S = 20.0
HANGS = 3  # in a row, before a GPU that does not answer is given up
KMSG = Path("/dev/kmsg")
RECORD_BYTES = 8192
FATAL_XIDS = {
    46: "GPU stopped processing",
    48: "uncorrectable memory error",
    62: "its microcontroller halted",
    64: "a memory row cannot be replaced",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "unrecovered memory error",
    143: "initialisation failed",
}
RECOVERY = 154  # the driver names what the GPU needs now
COLUMNS = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.failure",
    "clocks_event_reasons.hw_thermal_slowdown",
    "clocks_event_reasons.hw_power_brake_slowdown",
)
COMMAND = ("nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+),?(.*)")
_SXID = re.compile(r"SXid \((?:PCI:)?([^)]*)\): (\d+), Fatal")
_LOST = re.compile(r"GPU is lost|Unable to determine the device handle|fallen off the bus", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Health:
    """`fault` is why this machine cannot serve, empty while it can; `detail` is worth knowing and no more."""

    fault: str = ""
    detail: str = ""


def of_log(lines: Iterable[str]) -> Health:
    """What the kernel's log says; the first fault counts, and the last detail."""
    detail = ""
    for line in lines:
        found, switch = _XID.search(line), _SXID.search(line)
        if switch:
            return Health(f"NVSwitch {switch[1]}: SXid {switch[2]}", detail)
        if found is None:
            continue
        code, words = int(found[2]), found[3].strip(" ,.")
        needs_reset = code == RECOVERY and not words.endswith("(None)")
        if code in FATAL_XIDS or needs_reset:
            return Health(f"GPU {found[1]}: Xid {code}, {FATAL_XIDS.get(code, words)}", detail)
        detail = f"GPU {found[1]}: Xid {code}"
    return Health("", detail)


def of_smi(text: str) -> Health:
    """What ``nvidia-smi`` printed: a table of `COLUMNS`, or why there is none."""
    if _LOST.search(text):
        return Health(f"nvidia-smi: {text.strip().splitlines()[0][:200]}")
    hot: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(COLUMNS) or not cells[0].isdigit():
            continue
        index, errors, rows, *slow = cells
        if errors.isdigit() and int(errors) > 0:
            return Health(f"GPU {index}: {errors} uncorrectable memory errors")
        if rows in ("1", "Yes"):
            return Health(f"GPU {index}: a memory row cannot be replaced")
        if "Active" in slow:
            hot.append(index)
    return Health("", f"GPU {', '.join(hot)}: slowed down by heat or power" if hot else "")


@dataclass
class Watch:
    """The newest health. A fault stands; a source that is not there says so once, in `detail`."""

    kmsg: Path = KMSG
    command: tuple[str, ...] = COMMAND
    timeout_s: float = SMI_TIMEOUT_S
    health: Health = field(default_factory=Health)
    _log: int = -1
    _hangs: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin to look, every half minute."""
        threading.Thread(target=self._loop, name="qm-gpu-health", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()

    def look(self) -> Health:
        """Look at both sources now."""
        log, smi = of_log(self._records()), self._smi()
        fault = self.health.fault or log.fault or smi.fault
        self.health = Health(fault, "; ".join(each.detail for each in (log, smi) if each.detail))
        return self.health

    def _loop(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.look()

    def _records(self) -> Iterator[str]:
        """What the kernel wrote since the last look; at first, since it started."""
        try:
            if self._log < 0:
                self._log = os.open(self.kmsg, os.O_RDONLY | os.O_NONBLOCK)
            while True:
                with suppress(BrokenPipeError):  # some of it was overwritten before it was read
                    record = os.read(self._log, RECORD_BYTES)
                    if not record:
                        return
                    yield from record.decode(errors="replace").splitlines()
        except BlockingIOError:
            return
        except OSError as error:
            yield f"{self.kmsg}: {error.strerror}"

    def _smi(self) -> Health:
        try:
            done = subprocess.run(self.command, capture_output=True, text=True, timeout=self.timeout_s, check=False)
        except subprocess.TimeoutExpired:
            self._hangs += 1
            words = f"nvidia-smi does not answer ({self._hangs} times)"
            return Health(words if self._hangs >= HANGS else "", words)
        except OSError as error:
            return Health("", f"{self.command[0]}: {error.strerror}")
        self._hangs = 0
        found = of_smi(done.stdout + done.stderr)
        if done.returncode and not found.fault:
            said = (done.stderr or done.stdout).strip().splitlines()
            return Health("", f"nvidia-smi: {said[0][:200] if said else done.returncode}")
        return found
