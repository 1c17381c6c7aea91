"""A configuration that is read again while the daemon runs: what takes effect at once, and what needs a restart."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from refitd.config import Config

# Sections and keys that are read each time they are needed. The leader's clocks take theirs when it begins to lead.
AT_ONCE = ("log.level", "log.format", "hook.uids", "hook.gids", "timeouts.", "data.verify", "job.max_lag")


class Change(NamedTuple):
    """The configuration from here on, and the keys that changed: those taken into it, those that wait for a restart."""

    config: Config
    taken: tuple[str, ...]
    waiting: tuple[str, ...]


def merge(old: Config, new: Config) -> Change:
    """``old`` with those of ``new``'s values that can be changed while the daemon runs."""
    taken, waiting, sections = [], [], {}
    for section in (field.name for field in dataclasses.fields(Config)):
        before, after = getattr(old, section), getattr(new, section)
        changed = [f.name for f in dataclasses.fields(before) if getattr(before, f.name) != getattr(after, f.name)]
        now = {key: getattr(after, key) for key in changed if f"{section}.{key}".startswith(AT_ONCE)}
        sections[section] = dataclasses.replace(before, **now)
        taken += [f"{section}.{key}" for key in now]
        waiting += [f"{section}.{key}" for key in changed if key not in now]
    return Change(Config(**sections), tuple(taken), tuple(waiting))
