"""What our own code raised, as one line for the journal and the log.

Pure. The same fault gives the same line, so that a replay finds what the journal says: no address is in it.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from traceback import walk_tb

DEFECT = "defect: "  # begins a text that is ours to mend, and not the world's doing
FRAMES = 6
MOST = 300  # characters of the error's own text


def defect(error: Exception) -> str:
    """``defect: KeyError: 'p3' at decide.py:61 place.py:100``: the error, and the innermost calls that led to it."""
    frames = [f"{PurePath(frame.f_code.co_filename).name}:{line}" for frame, line in walk_tb(error.__traceback__)]
    text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(error).split()))[:MOST]
    return f"{DEFECT}{type(error).__name__}: {text} at {' '.join(frames[-FRAMES:])}"
