"""Where jitter comes from: not from the program's own source of chance, whose seed a run may have set."""

from __future__ import annotations

import random

CHANCE = random.Random()  # noqa: S311 - spreads retries, guards nothing
