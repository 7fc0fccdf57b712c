"""The calls of a program's forward: which calls read their values later, and which values may be restored."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import torch

from passes.memory.liveness import UPDATE
from passes.preparation.canonicalize import is_view
from passes.preparation.number_values import draws_numbers
from passes.strategies.enumerate_strategies import Link, SearchSpace, Site, leaves_program


@dataclass
class ForwardCalls:
    """The calls of the forward in a search space.

    Args:
        readers: name of a site → the links from the site to its readers.
        operands: name of a site → the links from its operands to the site.
    """

    space: SearchSpace
    readers: dict[str, list[Link]] = field(init=False, default_factory=lambda: defaultdict(list))
    operands: dict[str, list[Link]] = field(init=False, default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for link in self.space.links:
            self.readers[link.tail].append(link)
            self.operands[link.head].append(link)

    @cached_property
    def forward(self) -> tuple[str, ...]:
        """Names of the sites of forward calls, in program order."""
        return tuple(filter(self.is_forward, self.space.sites))

    @cached_property
    def order(self) -> dict[str, int]:
        """Index of each site of the search space in program order, by name."""
        return {name: index for index, name in enumerate(self.space.sites)}

    def is_forward(self, name: str) -> bool:
        """Whether a site is a call of the forward."""
        site = self.space.sites[name]
        return site.node is not None and site.phase == "forward" and site.node.op == "call_function"

    def late_readers(self, name: str) -> list[str]:
        """Return the names of the calls that read the value of site `name` after the forward."""
        return [link.head for link in self.readers[name] if is_late(self.space, link)]

    def may_be_remade(self, name: str) -> bool:
        """Whether the value of site `name` may be recomputed.

        Its call must be pure. The optimizer's update must not read the value, and the value must not leave the program.
        """
        return _is_pure(self.space.sites[name]) and all(map(self._leaves_open, self.readers[name]))

    def may_move(self, name: str) -> bool:
        """Whether the value of site `name` may be offloaded.

        The value must own its memory. The optimizer's update must not read the value, and the value must not leave the
        program.
        """
        site = self.space.sites[name]
        assert site.node is not None, "calls have nodes"
        is_of_input = any(self.space.sites[link.tail].is_input for link in self.operands[name] if link.operand == 0)
        is_alias = is_view(site.node) or (site.is_alias and is_of_input)
        return not is_alias and all(map(self._leaves_open, self.readers[name]))

    def _leaves_open(self, link: Link) -> bool:
        """Whether the reader of a link may read a recomputed or offloaded value.

        This is False if the reader belongs to the optimizer's update, or if the value leaves the program by the link.
        """
        head = self.space.sites[link.head]
        return not leaves_program(head, link) and head.phase != UPDATE


def is_late(space: SearchSpace, link: Link) -> bool:
    """Whether the head of a link is a call that runs after the forward.

    A link that carries its value out of the program does not count.
    """
    head = space.sites[link.head]
    return head.phase != "forward" and not leaves_program(head, link)


def _is_pure(site: Site) -> bool:
    """Whether a second run of a call gives the same value, and has no other effect."""
    assert site.node is not None, "calls have nodes"
    target = site.node.target
    writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return not writes and not draws_numbers(target)
