"""Physical units of the core, by name. Pure; may not do I/O or read a clock.

Units are in the names, never in the types: seconds end in `_s`, instants (UTC seconds) in `_at_s`, rates in `_rps` or
`_tps`, money in `_usd` or `_usd_per_h`, fractions lie in 0–1.
"""

from __future__ import annotations

SECONDS_PER_HOUR = 3600.0
MINUTE_S = 60.0
