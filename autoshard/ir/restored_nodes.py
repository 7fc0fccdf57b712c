"""Forward nodes whose values return in the backward by recomputation or from the host, instead of being saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoshard.ir.repeat import Repeat, names_represented_by


@dataclass(frozen=True, slots=True)
class RestoredNode:
    """A node of the forward, and the place in the backward where its value returns.

    Args:
        name: name of the forward's node.
        before: name of the backward's node just before which the value returns.
        module: path of the module that issued the forward's node.
    """

    name: str
    before: str
    module: str


def by_module(nodes: Iterable[RestoredNode], repeats: tuple[Repeat, ...]) -> Mapping[str, tuple[str, ...]]:
    """Return a dict from the path of each module to the names of its nodes.

    A left-out block gets the names of the nodes in the block that stands for it.
    """
    found: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        for module in names_represented_by(repeats, node.module):
            found[module] = (*found.get(module, ()), node.name)
    return found
