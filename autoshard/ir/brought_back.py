"""Forward nodes whose values return in the backward by recomputation or from the host, instead of being saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoshard.ir.repeat import Repeat, names_alike


@dataclass(frozen=True, slots=True)
class BroughtBack:
    """A node of the forward, and the place in the backward where its value returns.

    Args:
        name: the node.
        before: the node of the backward just after the value's return.
        module: the module that issued the node.
    """

    name: str
    before: str
    module: str


def by_module(nodes: Iterable[BroughtBack], repeats: tuple[Repeat, ...]) -> Mapping[str, tuple[str, ...]]:
    """Names of nodes by their module. Blocks left out get the names of the blocks that stand for them."""
    found: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        for module in names_alike(repeats, node.module):
            found[module] = (*found.get(module, ()), node.name)
    return found
