"""Assign each node of a traced training step to a stage of a pipeline.

1. Values computed from inputs and buffers alone (masks, rotary tables) belong to no stage. Each stage computes those
   that it reads.
2. All other calls of the forward, in program order, are cut into consecutive runs, one for each stage. Cuts lie between
   blocks (modules with a number in their path), where the fewest bytes cross. They make the longest stage as short as
   possible. If a plan gives the cuts, or if parameters have stages already, the cuts follow these.
3. A parameter belongs to the first stage that reads it. Values computed from parameters alone belong to the first stage
   that reads them.
4. A call of the backward belongs to the stage of the gradients that it reads. If it also reads a forward value that
   this stage lacks, it belongs to the stage of that value. So the backward goes down the stages as the forward went up.
   If only earlier stages read the call's result, the call moves there, provided that its operands go there anyway.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MappingProxyType

import torch
from torch import fx

from autoshard.errors import NotAvailableError, PlanMismatchError, RecipeError
from autoshard.ir.program import InputKind, OutputKind, Program

NodeSeconds = Callable[[fx.Node], float]
"""Function that returns the time of a node of a traced program, in seconds or any other unit."""

_BLOCK = re.compile(r"((?:.*?\.)?\d+)(?:\.|$)")
_ALONE = (InputKind.INPUT, InputKind.BUFFER, InputKind.SEED)


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The stage of each node of a program.

    Args:
        stage: node to the number of its stage. Parameters are included. Nodes that belong to no stage are absent.
        derived: parameters, and the calls computed from parameters alone.
        cuts: name of the first call of each stage but the first.
    """

    stages: int
    stage: Mapping[fx.Node, int]
    derived: frozenset[fx.Node]
    cuts: tuple[str, ...]


def assign_stages(
    program: Program,
    stages: int,
    seconds: NodeSeconds,
    cuts: Sequence[str] = (),
    homes: Mapping[str, int] = MappingProxyType({}),
    blocks: Sequence[int] | None = None,
) -> StageAssignment:
    """Assign the nodes of a program to stages, by the steps of the module's docstring.

    Args:
        program: forward and backward, as traced; or a forward alone.
        stages: number of stages, at least 2.
        seconds: time of a node, by which stages are balanced.
        cuts: names of the first calls of stages, as in `StageAssignment`; empty to search for cuts.
        homes: name of a parameter to its stage, for parameters whose stage is known already.
        blocks: number of blocks of each stage; None to balance the stages by time.

    Raises:
        RecipeError: `blocks` does not add up to the model's number of blocks, or leaves a stage without calls.
        NotAvailableError: the forward has fewer calls than stages, a gradient belongs to an earlier stage than its
            parameter, or parameters' stages contradict the forward.
        PlanMismatchError: the program lacks a call that `cuts` names.
    """
    return _Assigning(program, stages, seconds, cuts, homes, blocks).run()


@dataclass(slots=True)
class _Assigning:
    program: Program
    stages: int
    seconds: NodeSeconds
    cuts: Sequence[str]
    homes: Mapping[str, int]
    blocks: Sequence[int] | None
    stage: dict[fx.Node, int] = field(default_factory=dict)
    repeated: set[fx.Node] = field(default_factory=set)
    derived: set[fx.Node] = field(default_factory=set)
    there: list[set[fx.Node]] = field(default_factory=list)

    def run(self) -> StageAssignment:
        nodes = {slot.node: slot for slot in self.program.inputs}
        forward: list[fx.Node] = []
        alone: set[fx.Node] = set()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                kind = nodes[node.name].kind
                if kind is InputKind.PARAMETER:
                    self.derived.add(node)
                elif kind in _ALONE:
                    alone.add(node)
            elif node.op == "get_attr" or (node.op == "call_function" and set(node.all_input_nodes) <= alone):
                alone.add(node)
                self.repeated.add(node)
            elif node.op == "call_function" and node.meta["phase"] == "forward":
                (self.derived.add if set(node.all_input_nodes) <= self.derived else forward.append)(node)
        self._cut(forward)
        self._place_derived()
        self.there = [set() for _ in range(self.stages)]
        for node in forward:
            self._know(node)
        for node in self.derived:
            if node.op == "call_function" and node in self.stage:
                self._know(node)
        self._place_backward()
        self._place_results()
        return StageAssignment(self.stages, self.stage, frozenset(self.derived), tuple(self.cuts))

    def _know(self, node: fx.Node) -> None:
        """Record in `there` that the stage of a forward node has the node's value and the values of its operands."""
        self.there[self.stage[node]].update((node, *node.all_input_nodes))

    def _cut(self, forward: Sequence[fx.Node]) -> None:
        if len(forward) < self.stages:
            raise NotAvailableError(
                f"A pipeline of {self.stages} stages needs a forward of so many calls on parameters; this one has "
                f"{len(forward)}. Use a smaller axis 'pipeline'."
            )
        ends = self._ends(forward)
        self.cuts = tuple(forward[end].name for end in ends)
        stage = 0
        for index, node in enumerate(forward):
            while stage < self.stages - 1 and index >= ends[stage]:
                stage += 1
            self.stage[node] = self.stage[node.all_input_nodes[0]] if node.target is operator.getitem else stage

    def _ends(self, forward: Sequence[fx.Node]) -> list[int]:
        """Return, for each stage but the last, the index in `forward` of the first call of the next stage."""
        if not self.cuts and self.blocks is not None:
            return _ends_of_blocks(forward, self.blocks)
        if not self.cuts:
            windows = self._windows(forward) if self.homes else None
            return cut_forward(forward, self.stages, self.seconds, windows)
        places = {node.name: index for index, node in enumerate(forward)}
        missing = [name for name in self.cuts if name not in places]
        if missing or len(self.cuts) != self.stages - 1:
            raise PlanMismatchError(
                f"The plan's stages begin at nodes {', '.join(map(repr, self.cuts))} of a forward, and the model's has "
                f"{'no ' + repr(missing[0]) if missing else f'{self.stages} stages'}. Plan again for this model."
            )
        return [places[name] for name in self.cuts]

    def _windows(self, forward: Sequence[fx.Node]) -> list[tuple[int, int]]:
        """Return for each cut the first and the last index in `forward` at which it may lie.

        The stages in `homes` limit the cuts. A cut lies behind the first reader of each parameter of an earlier stage.
        It lies before all readers of parameters of later stages.
        """
        names = {slot.node: slot.name for slot in self.program.inputs_of(InputKind.PARAMETER)}
        reads: dict[fx.Node, set[str]] = {}
        windows = [[1, len(forward) - 1] for _ in range(self.stages - 1)]
        for node in self.program.graph.nodes:
            if node in self.derived:
                own = {names[node.name]} if node.name in names else set()
                reads[node] = own.union(*(reads.get(item, set()) for item in node.all_input_nodes))
        seen: set[str] = set()
        for index, node in enumerate(forward):
            for name in set().union(*(reads.get(item, set()) for item in node.all_input_nodes)) & self.homes.keys():
                for cut, window in enumerate(windows):
                    if self.homes[name] > cut:
                        window[1] = min(window[1], index)
                    elif name not in seen:
                        window[0] = max(window[0], index + 1)
                seen.add(name)
        return [(low, high) for low, high in windows]

    def _place_derived(self) -> None:
        """Give parameters, and values that depend on parameters alone, the stage of their first forward reader."""
        for node in reversed(list(self.program.graph.nodes)):
            if node in self.derived:
                readers = [self.stage[user] for user in node.users if user in self.stage]
                if readers:
                    self.stage[node] = min(readers)
        for node in self.program.graph.nodes:
            if node in self.derived and node not in self.stage:
                owners = [self.stage[operand] for operand in node.all_input_nodes if operand in self.stage]
                self.stage[node] = max(owners, default=0)

    def _place_backward(self) -> None:
        tangents = {slot.node for slot in self.program.inputs_of(InputKind.TANGENT)}
        outputs = {slot.name: slot.node for slot in self.program.outputs_of(OutputKind.OUTPUT)}
        names = self.program.nodes_by_name()
        backward: list[fx.Node] = []
        for slot in self.program.inputs_of(InputKind.TANGENT):
            of = names[outputs[slot.name.replace("tangent:", "output:")]]
            self.stage[names[slot.node]] = self.stage.get(of, self.stages - 1)
        flows: set[fx.Node] = {names[name] for name in tangents}
        for node in self.program.graph.nodes:
            if node.op != "call_function" or node.meta["phase"] != "backward" or node in self.repeated:
                continue
            gradients = [operand for operand in node.all_input_nodes if operand in flows]
            if not gradients:
                self.repeated.add(node)  # a view of a saved value, or a constant
                continue
            flows.add(node)
            backward.append(node)
            at = min(self.stage[operand] for operand in gradients)
            if node.target is operator.getitem:
                at = self.stage[node.all_input_nodes[0]]
            else:
                at = min([at, *(self.stage[leaf] for leaf in self._leaves(node, flows) if leaf not in self.there[at])])
            self.stage[node] = at
        self._move_down(backward, flows)

    def _leaves(self, node: fx.Node, flows: set[fx.Node]) -> Iterable[fx.Node]:
        """Yield the forward values that a backward call reads.

        Each stage repeats calls that belong to no stage, so the values that such calls read are yielded in their place.
        `flows` has the gradients, which are left out.
        """
        for operand in node.all_input_nodes:
            if operand in flows:
                continue
            if operand in self.repeated:
                yield from self._leaves(operand, flows)
            elif operand in self.stage:
                yield operand

    def _move_down(self, backward: Sequence[fx.Node], flows: set[fx.Node]) -> None:
        homes: dict[fx.Node, int] = {}
        names = self.program.nodes_by_name()
        parameters = {slot.name: names[slot.node] for slot in self.program.inputs_of(InputKind.PARAMETER)}
        for slot in self.program.outputs_of(OutputKind.GRADIENT):
            home = self.stage[parameters[slot.name]]
            homes[names[slot.node]] = max(home, homes.get(names[slot.node], 0))
        wanted: dict[fx.Node, int] = {}
        for node in reversed(backward):
            wants = [wanted[user] for user in node.users if user in wanted]
            wants += [homes[node]] if node in homes else []
            wanted[node] = min(self.stage[node], max(wants, default=self.stage[node]))
        before = dict(self.stage)
        for node in backward:
            at = wanted[node]
            if at == self.stage[node] or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            operands = [operand for operand in node.all_input_nodes if operand in flows]
            comes = all(
                self.stage[item] == at
                or any(self.stage.get(user) == at for user in item.users if user is not node and user in flows)
                for item in operands
            )
            if comes and all(leaf in self.there[at] for leaf in self._leaves(node, flows)):
                self.stage[node] = at
        for node in reversed(backward):  # a call that stays reads no call that moved
            if any(self.stage[user] > self.stage[node] for user in node.users if user in flows):
                self.stage[node] = before[node]

    def _place_results(self) -> None:
        names = self.program.nodes_by_name()
        stage_of = {slot.name: self.stage[names[slot.node]] for slot in self.program.inputs_of(InputKind.PARAMETER)}
        for slot in self.program.outputs_of(OutputKind.GRADIENT):
            found = self.stage.get(names[slot.node], 0)
            if found < stage_of[slot.name]:
                raise NotAvailableError(
                    f"The gradient of {slot.name!r} is computed in stage {found}, before that of the parameter "
                    f"({stage_of[slot.name]}), and would have to go up the pipeline. Use a smaller axis 'pipeline'."
                )


def cut_forward(
    forward: Sequence[fx.Node],
    stages: int,
    seconds: NodeSeconds,
    windows: Sequence[tuple[int, int]] | None = None,
) -> list[int]:
    """Cut a forward into consecutive runs, so that the longest run takes the least time.

    Among cuts whose longest runs take equal time, to three digits, the cuts that the fewest bytes cross are taken.

    Args:
        windows: for each run but the last, the first and last possible index of its end; None: any index.

    Returns:
        For each run but the last, the index in `forward` of the first call behind the run.

    Raises:
        NotAvailableError: no cuts lie in the windows, or there are too few places for cuts.
    """
    crossing = _crossing_bytes(forward)
    candidates = set(_candidates(forward, stages, crossing))
    for low, high in windows or ():
        candidates |= {min(range(low, high + 1), key=crossing.__getitem__)} if low <= high else set()
    ends = [0, *sorted(candidates), len(forward)]
    before = [0.0]
    for node in forward:
        before.append(before[-1] + seconds(node))
    best: list[dict[int, tuple[float, int, tuple[int, ...]]]] = [{0: (0.0, 0, ())}]
    for number in range(stages):
        row: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        low, high = (0, len(forward)) if windows is None or number == stages - 1 else windows[number]
        later = stages - 1 - number  # later ends after this one
        for end in [end for end in ends[: len(ends) - later] if low <= end <= high] if later else ends[-1:]:
            options = [
                (max(longest, before[end] - before[start]), sent + crossing[end], (*found, end))
                for start, (longest, sent, found) in best[-1].items()
                if start < end
            ]
            if options:
                row[end] = min(options, key=lambda option: (float(f"{option[0]:.3g}"), *option[1:]))
        best.append(row)
    if len(forward) not in best[-1] and windows is None:
        raise NotAvailableError(
            f"A pipeline of {stages} stages needs {stages - 1} places for cuts, and the forward has {len(candidates)}: "
            "stages cannot share a tuple of tensors. Use a smaller axis 'pipeline'."
        )
    if len(forward) not in best[-1]:
        raise NotAvailableError(
            "The stages of a pipeline hold their parameters already, and this call reads them in another order. "
            "Compile for a mesh without the axis 'pipeline'."
        )
    return list(best[-1][len(forward)][2][:-1])


def _crossing_bytes(forward: Sequence[fx.Node]) -> list[int]:
    """Return for each index of `forward` the bytes of values that are made before it and read later."""
    places = {node: index for index, node in enumerate(forward)}
    change = [0] * (len(forward) + 2)
    for node, index in places.items():
        last = max((places[user] for user in node.users if user in places), default=index)
        if last > index:
            size = _bytes(node)
            change[index + 1] += size
            change[last + 1] -= size
    total, found = 0, []
    for index in range(len(forward) + 1):
        total += change[index]
        found.append(total)
    return found


_NOT_SENT = 1 << 60
"""Bytes that a tuple counts as, so that no cut crosses a tuple. Stages cannot send tuples."""


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else _NOT_SENT


def _candidates(forward: Sequence[fx.Node], stages: int, crossing: Sequence[int]) -> list[int]:
    """Return the indices before which the forward may be cut into `stages` stages.

    They lie between blocks. If the model has too few blocks, they are the indices that the fewest bytes cross.
    """
    before, between, behind = _around_blocks(forward, crossing)
    places = [*before, *between, *behind]
    if len(places) >= stages - 1:
        return places
    possible = [index for index in range(1, len(forward)) if crossing[index] < _NOT_SENT]
    return sorted(sorted(possible, key=lambda index: (crossing[index], index))[: max(_MOST, stages - 1)])


def _around_blocks(forward: Sequence[fx.Node], crossing: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the indices for cuts before the first block, between blocks, and after the last block, as three lists.

    A cut between two blocks lies where the fewest bytes cross. The first and the last list are empty if no cut is
    possible there.
    """
    keys = [_block_of(node) for node in forward]
    inside = [index for index, key in enumerate(keys) if key is not None]
    if not inside:
        return [], [], []
    between = [
        min(range(last + 1, index + 1), key=crossing.__getitem__)
        for last, index in pairwise(inside)
        if keys[index] != keys[last]
    ]
    ends = [inside[0], inside[-1] + 1]
    before, behind = ([end] if 0 < end < len(forward) and crossing[end] < _NOT_SENT else [] for end in ends)
    return before, between, behind


def _ends_of_blocks(forward: Sequence[fx.Node], blocks: Sequence[int]) -> list[int]:
    """Return indices as `cut_forward` does, but so that stage i has `blocks[i]` blocks.

    Raises:
        RecipeError: the model has another number of blocks, or a stage would be empty.
    """
    before, between, behind = _around_blocks(forward, _crossing_bytes(forward))
    count = len(between) + 1
    if sum(blocks) != count or 0 in blocks[1:-1]:
        raise RecipeError(
            f"stage_layers={tuple(blocks)!r} shares out {sum(blocks)} blocks, and the model's forward passes "
            f"{count}. Give numbers that add up to that, at least 1 but for the first and the last, or leave it out."
        )
    if (blocks[0] == 0 and not before) or (blocks[-1] == 0 and not behind):
        raise RecipeError(
            f"stage_layers={tuple(blocks)!r} leaves a stage without blocks, and the model has no calls on parameters "
            "there. Give each stage a block, or leave it out."
        )
    places = [*(before or [0]), *between, *(behind or [len(forward)])]
    return [places[end] for end in accumulate(blocks[:-1])]


_MOST = 64
"""The most indices to try as cuts in a forward with too few blocks, unless there are more stages."""


def _block_of(node: fx.Node) -> str | None:
    found = _BLOCK.match(node.meta.get("module") or "")
    return None if found is None else found[1]
