"""Recompute or offload whole blocks, as a recipe says, before specs are chosen.

* `recompute="full"`: each repeated block is recomputed from its inputs just before its backward (Chen et al.,
  "Training deep nets with sublinear memory cost", 2016). Values that the next segment reads are kept, and so are values
  that must not be computed twice.
* `offload="activations"`: values of a block that its backward or a recomputation reads go to the host. They come back
  just before they are first read.
"""

from __future__ import annotations

from functools import cached_property

from autoshard.errors import RecipeError
from autoshard.ir.offload import OffloadedNode
from autoshard.ir.recipe import Recipe
from autoshard.ir.recompute import RecomputedNode
from autoshard.ir.text import format_bytes
from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.fitting import JointSolution
from passes.recomputation.forward_calls import ForwardCalls
from passes.recomputation.recompute_problem import NOTHING_RESTORED, Restored
from passes.recomputation.recompute_segments import block_segments
from passes.recomputation.with_restored import host_bytes, with_restored
from passes.strategies.enumerate_strategies import SearchSpace


def with_whole_blocks(planning: PlanningProblem, recipe: Recipe) -> PlanningProblem:
    """Return the planning problem of the program that recomputes and offloads whole blocks, as a recipe says.

    The result stores the problem without recomputation, for `joint_with_blocks`.

    Raises:
        NotAlikeError: the program leaves out blocks, and the blocks beside them do not restore equal values at equal
            places.
    """
    recompute, offload = recipe.recompute == "full", recipe.offload == "activations"
    if not (recompute or offload):
        return planning
    restored = whole_blocks(planning.space, recompute=recompute, offload=offload)
    decided = with_restored(planning, restored)
    decided.derived[_DECIDED] = (planning, restored)
    return decided


def joint_with_blocks(found: JointSolution) -> tuple[PlanningProblem, JointSolution]:
    """Return the problem without recomputation, and the solution `found` with its recomputed and offloaded nodes.

    `found` is a solution of a problem from `with_whole_blocks`. A solution of any other problem is returned unchanged,
    with its own problem.

    Raises:
        RecipeError: the hosts lack memory for the offloaded values.
    """
    without, restored = found.planning.derived.get(_DECIDED, (found.planning, NOTHING_RESTORED))
    if not restored:
        return without, found
    size, room = host_bytes(found.planning, found.solution.choice), without.prices.cluster.host_bytes_per_device
    if room is not None and size > room:
        raise RecipeError(
            f"offload='activations' needs {format_bytes(size)} of the host's memory for each device, which has "
            f"{format_bytes(room)}. Use recompute='full', more devices or smaller micro-batches."
        )
    counts = without.counts()
    numbers = (sum(counts.get(node.name, 1) for node in nodes) for nodes in (restored.recomputed, restored.offloaded))
    return without, JointSolution(found.planning, found.solution, restored, *numbers, host_bytes=size)


_DECIDED = "decided blocks"


def whole_blocks(space: SearchSpace, *, recompute: bool, offload: bool) -> Restored:
    """Return the forward calls to recompute and to offload if a recipe recomputes or offloads whole blocks."""
    blocks = _Blocks(space)
    remade = blocks.remade(views_alone=not recompute) if recompute or offload else {}
    moved = blocks.moved(remade) if offload else {}
    return Restored(
        tuple(RecomputedNode(name, remade[name], blocks.module(name)) for name in blocks.forward if name in remade),
        tuple(OffloadedNode(name, moved[name], blocks.module(name)) for name in blocks.forward if name in moved),
    )


class _Blocks(ForwardCalls):
    @cached_property
    def segment(self) -> dict[str, int]:
        """The number of the block of each site in a repeated block, by the site's name."""
        return dict(block_segments([self.space.sites[name] for name in self.forward]))

    def remade(self, *, views_alone: bool) -> dict[str, str]:
        """Return the recomputed calls, each with the site before which its block is recomputed.

        This site is the first site after the forward that reads a recomputed value of the block. With `views_alone`,
        only views of offloaded values are recomputed.
        """
        wanted: set[str] = set()
        for name in reversed(self.forward):
            is_read = bool(self.late_readers(name)) or any(link.head in wanted for link in self.readers[name])
            if is_read and self._stays_within(name) and (self.space.sites[name].is_alias or not views_alone):
                wanted.add(name)
        anchors: dict[int, str] = {}
        for name in wanted:
            reads = [*self.late_readers(name), *filter(None, [anchors.get(self.segment[name])])]
            if reads:
                anchors[self.segment[name]] = min(reads, key=self.order.__getitem__)
        return {name: anchors[self.segment[name]] for name in wanted}

    def moved(self, remade: dict[str, str]) -> dict[str, str]:
        """Return the calls whose values are offloaded to the host, each with the site that needs its value again.

        The value is copied back before this site. `remade` is the result of the method `remade`.
        """
        found: dict[str, str] = {}
        for name in self.segment:
            reads = [
                *self.late_readers(name),
                *(remade[link.head] for link in self.readers[name] if link.head in remade),
            ]
            if reads and name not in remade and self.may_move(name):
                found[name] = min(reads, key=self.order.__getitem__)
        return found

    def module(self, name: str) -> str:
        node = self.space.sites[name].node
        assert node is not None, "calls have nodes"
        return node.meta.get("module", "")

    def _stays_within(self, name: str) -> bool:
        """Whether a value may be recomputed, and all its readers in the forward are in its own block."""
        heads = (link.head for link in self.readers[name] if self.is_forward(link.head))
        is_read_within = all(self.segment.get(head) == self.segment.get(name) for head in heads)
        return name in self.segment and self.may_be_remade(name) and is_read_within
