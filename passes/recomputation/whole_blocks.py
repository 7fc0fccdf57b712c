"""What recipes say of activations, decided before specs are: all that blocks compute again, or have on the host.

* `recompute="full"`: of each repeated block everything is computed again, from the values that enter it, just before
  its backward begins (Chen et al., "Training deep nets with sublinear memory cost", 2016). What the next segment reads
  of a block is kept, and so is what may not run again;
* `offload="activations"`: what the backward reads of a block, or what its recomputation reads of the one before, goes
  to the host, and comes back just before it is first read.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.errors import RecipeError
from autoshard.ir.offload import OffloadedNode
from autoshard.ir.recipe import Recipe
from autoshard.ir.recompute import RecomputedNode
from autoshard.ir.text import format_bytes
from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.fitting import JointSolution
from passes.recomputation.recompute_options import is_alias, is_forward, is_pure, may_be_remade
from passes.recomputation.recompute_problem import NOTHING_AGAIN, Again
from passes.recomputation.recompute_segments import block_segments
from passes.recomputation.with_again import host_bytes, with_again
from passes.strategies.elided import NotAlikeError
from passes.strategies.enumerate_strategies import Link, SearchSpace, leaves_program


def with_whole_blocks(planning: PlanningProblem, recipe: Recipe) -> PlanningProblem:
    """The problem of the program that recomputes and offloads as a recipe says; it remembers what that is.

    Raises:
        NotAlikeError: the program leaves blocks out.
    """
    recompute, offload = recipe.recompute == "full", recipe.offload == "activations"
    if not (recompute or offload):
        return planning
    if planning.elided.sites:
        raise NotAlikeError("the recipe recomputes or offloads whole blocks, which are not all there")
    again = whole_blocks(planning.space, recompute=recompute, offload=offload)
    decided = with_again(planning, again)
    decided.derived[_DECIDED] = (planning, again)
    return decided


def joint_with_blocks(found: JointSolution) -> tuple[PlanningProblem, JointSolution]:
    """What a solution of `with_whole_blocks` does, and the problem of the program that does none of it.

    Raises:
        RecipeError: the hosts have no room for what it offloads.
    """
    without, again = found.planning.derived.get(_DECIDED, (found.planning, NOTHING_AGAIN))
    if not again:
        return without, found
    size, room = host_bytes(found.planning, found.solution.choice), without.prices.cluster.host_bytes_per_device
    if room is not None and size > room:
        raise RecipeError(
            f"offload='activations' needs {format_bytes(size)} of the host's memory for each device, which has "
            f"{format_bytes(room)}. Use recompute='full', more devices or smaller micro-batches."
        )
    counts = (len(again.recomputed), len(again.offloaded))
    return without, JointSolution(found.planning, found.solution, again, *counts, host_bytes=size)


_DECIDED = "decided blocks"


def whole_blocks(space: SearchSpace, *, recompute: bool, offload: bool) -> Again:
    """What the blocks of a program compute again and offload."""
    blocks = _Blocks(space)
    remade = blocks.remade(views_alone=not recompute) if recompute or offload else {}
    moved = blocks.moved(remade) if offload else {}
    return Again(
        tuple(RecomputedNode(name, remade[name], blocks.module(name)) for name in blocks.forward if name in remade),
        tuple(OffloadedNode(name, moved[name], blocks.module(name)) for name in blocks.forward if name in moved),
    )


@dataclass
class _Blocks:
    space: SearchSpace
    readers: dict[str, list[Link]] = field(default_factory=lambda: defaultdict(list))
    operands: dict[str, list[Link]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for link in self.space.links:
            self.readers[link.tail].append(link)
            self.operands[link.head].append(link)

    @cached_property
    def forward(self) -> tuple[str, ...]:
        """The calls of the forward."""
        return tuple(name for name, site in self.space.sites.items() if is_forward(site))

    @cached_property
    def order(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.space.sites)}

    @cached_property
    def segment(self) -> dict[str, int]:
        """Sites of repeated blocks to the number of their block."""
        return dict(block_segments([self.space.sites[name] for name in self.forward]))

    def remade(self, *, views_alone: bool) -> dict[str, str]:
        """What is computed again, and before which site: the first one that reads any of it behind the forward.

        `views_alone`: only views, which are made of what comes back from the host.
        """
        wanted: set[str] = set()
        for name in reversed(self.forward):
            is_read = bool(self._late(name)) or any(link.head in wanted for link in self.readers[name])
            if is_read and self._stays_within(name) and (self.space.sites[name].is_alias or not views_alone):
                wanted.add(name)
        anchors: dict[int, str] = {}
        for name in wanted:
            reads = [*self._late(name), *filter(None, [anchors.get(self.segment[name])])]
            if reads:
                anchors[self.segment[name]] = min(reads, key=self.order.__getitem__)
        return {name: anchors[self.segment[name]] for name in wanted}

    def moved(self, remade: dict[str, str]) -> dict[str, str]:
        """What goes to the host, and before which site it comes back."""
        found: dict[str, str] = {}
        for name in self.segment:
            reads = [*self._late(name), *(remade[link.head] for link in self.readers[name] if link.head in remade)]
            if reads and name not in remade and self._may_move(name):
                found[name] = min(reads, key=self.order.__getitem__)
        return found

    def module(self, name: str) -> str:
        """The module that issued a call."""
        node = self.space.sites[name].node
        assert node is not None, "calls have nodes"
        return node.meta.get("module", "")

    def _late(self, name: str) -> list[str]:
        """What reads a value behind the forward."""
        heads = ((self.space.sites[link.head], link) for link in self.readers[name])
        return [head.name for head, link in heads if not is_forward(head) and not leaves_program(head, link)]

    def _stays_within(self, name: str) -> bool:
        """Whether a value may be computed again, and no other segment's forward reads it."""
        readers = [(self.space.sites[link.head], link) for link in self.readers[name]]
        outside = (is_forward(head) and self.segment.get(head.name) != self.segment.get(name) for head, _ in readers)
        is_free = all(may_be_remade(head, link) for head, link in readers)
        return name in self.segment and is_pure(self.space.sites[name]) and is_free and not any(outside)

    def _may_move(self, name: str) -> bool:
        is_of_input = any(self.space.sites[link.tail].is_input for link in self.operands[name] if link.operand == 0)
        readers = ((self.space.sites[link.head], link) for link in self.readers[name])
        return not is_alias(self.space.sites[name], is_of_input) and all(may_be_remade(*pair) for pair in readers)
