"""Which choices give the program that is walked through, as far as something in it goes.

Strategies do not change who reads what; keepings do (`passes/recomputation/exact_recompute.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

Facts = Mapping[int, np.ndarray]
"""What must hold of a choice: variable to a mask of its options."""


class Wiring(Protocol):
    """Which choices give the program that is walked through, as far as something in it goes."""

    def options(self, variable: int) -> int:
        """How many times the options of a variable stand for its strategies."""
        ...

    def exists(self, name: str) -> Facts:
        """Under which choices the program has a site."""
        ...

    def reads(self, link: int) -> Facts:
        """Under which choices a link's head reads its tail."""
        ...

    def will_read(self, link: int, point: int) -> Facts:
        """Under which choices a link's head, wherever it is behind a point, reads its tail."""
        ...

    def needs(self, link: int, point: int) -> Facts:
        """Under which choices what a link's tail yields, maybe again, is there at a point, and its head reads it."""
        ...

    def family(self, name: str) -> str:
        """The site whose value a site yields, maybe again."""
        ...


class AsTraced:
    """The wiring of a program that is the same under each choice."""

    def options(self, variable: int) -> int:
        """Each stands for one strategy."""
        return 1

    def exists(self, name: str) -> Facts:
        """Under all."""
        return {}

    def reads(self, link: int) -> Facts:
        """Under all."""
        return {}

    def will_read(self, link: int, point: int) -> Facts:
        """Under all."""
        return {}

    def needs(self, link: int, point: int) -> Facts:
        """Under all."""
        return {}

    def family(self, name: str) -> str:
        """The site."""
        return name


def both(*facts: Facts) -> Facts:
    """That all of some facts hold."""
    found: dict[int, np.ndarray] = {}
    for each in facts:
        for variable, mask in each.items():
            found[variable] = found[variable] & mask if variable in found else mask
    return found
