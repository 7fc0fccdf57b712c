"""Nodes of the forward whose values are not kept for the backward, but come back in it: computed again, or fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoshard.ir.repeat import Repeat, names_alike


@dataclass(frozen=True, slots=True)
class BroughtBack:
    """A node of the forward, and when its value is there again.

    Args:
        name: the node.
        before: the node of the backward just before which its value comes back.
        module: the module that issued it.
    """

    name: str
    before: str
    module: str


def by_module(nodes: Iterable[BroughtBack], repeats: tuple[Repeat, ...]) -> Mapping[str, tuple[str, ...]]:
    """The names of nodes by the module that issued them; of blocks left out, the names of those that stand for them."""
    found: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        for module in names_alike(repeats, node.module):
            found[module] = (*found.get(module, ()), node.name)
    return found
