"""Whether some layouts hold between them what others need: asked often while lanes lose and gain sources, computed
seldom."""

from __future__ import annotations

from collections.abc import Callable

from refitd.errors import MismatchError
from refitd.layout import Layout
from refitd.plan import Rank, covered

Digests = frozenset[str]


class Coverage:
    """What is known of each set of layouts that is needed, by digest.

    With more layouts nothing is held by fewer: what some hold those and others hold, and what some do not hold no part
    of them does.
    """

    def __init__(self, layout: Callable[[str], Layout | None]) -> None:
        """``layout`` gives the layout of a digest, None where it is not known here."""
        self._layout = layout
        self._enough: dict[Digests, list[Digests]] = {}
        self._short: dict[Digests, list[Digests]] = {}
        self._differing: set[tuple[Digests, Digests]] = set()

    def holds(self, have: Digests, need: Digests) -> bool:
        """Whether ``have`` hold all that ``need`` need. Sides that contradict each other count: their lane will say
        what is wrong. False, for now, where a layout that is needed is not known here, and where nothing is needed;
        who has one that is not known holds nothing, for now."""
        if not need or need <= have:
            return bool(need)
        if any(known <= have for known in self._enough.get(need, ())):
            return True
        if any(have <= known for known in self._short.get(need, ())):
            return False
        if (have, need) in self._differing:
            return True
        known = frozenset(digest for digest in have if self._layout(digest))
        if not all(map(self._layout, need)) or not known:
            return False
        return self._compute(have, need) if known == have else self.holds(known, need)

    def _compute(self, have: Digests, need: Digests) -> bool:
        found_here = ([self._layout(digest) for digest in sorted(side)] for side in (have, need))
        sources, members = ([layout for layout in side if layout] for side in found_here)
        try:
            found = covered(_ranks("s", sources), _ranks("d", members))
        except MismatchError:
            self._differing.add((have, need))
            return True
        (self._enough if found else self._short).setdefault(need, []).append(have)
        return found


def _ranks(side: str, layouts: list[Layout]) -> list[Rank]:
    return [Rank(f"{side}{i}", f"{side}{i}", f"{side}{i}", layout) for i, layout in enumerate(layouts)]
