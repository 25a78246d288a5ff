"""What can go wrong with a call, beyond a refusal. Data; may not do I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "error",  # answer `code` with `status`, nothing is done
    "error_after",  # it is done, and `code` is answered
    "lost_before",  # the connection breaks before it is done
    "lost_after",  # it is done, and the connection breaks
    "hang",  # it is done, and no answer comes until the client gives up
    "duplicate",  # the network delivers it twice
    "html",  # a proxy answers with a page, nothing is done
    "page",  # a gateway that wants a login answers with a page, well-formed and with status 200; nothing is done
    "garbled",  # it is done, and the answer is cut off
]


@dataclass(slots=True)
class Fault:
    """`kind` happens to the next `times` calls of `action` ("*": of any)."""

    kind: FaultKind
    action: str = "*"
    times: int = 1
    code: str = "InternalError"
    status: int = 500

    def takes(self, action: str) -> bool:
        """Whether it strikes this call; counts it."""
        if self.times <= 0 or self.action not in ("*", action):
            return False
        self.times -= 1
        return True
