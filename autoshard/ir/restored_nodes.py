"""Forward nodes whose values the backward does not read from saved copies, but recomputes or fetches from the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoshard.ir.repeat import Repeat, names_represented_by


@dataclass(frozen=True, slots=True)
class RestoredNode:
    """The forward's node `name`, issued by `module`, whose value returns just before the backward's node `before`."""

    name: str
    before: str
    module: str


def by_module(programs: Iterable[tuple[Iterable[RestoredNode], tuple[Repeat, ...]]]) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the nodes of each module, by module path.

    A left-out block gets the names of the nodes in the block that stands for it. `programs` has the nodes and repeats
    of a program, or of the program of each stage.
    """
    found: dict[str, tuple[str, ...]] = {}
    for nodes, repeats in programs:
        for node in nodes:
            for module in names_represented_by(repeats, node.module):
                found[module] = (*found.get(module, ()), node.name)
    return found
