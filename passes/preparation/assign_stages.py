"""Say which stage of a pipeline each node of a traced training step belongs to.

1. Values of inputs and buffers alone (masks, rotary tables) belong to no stage: each stage that reads one computes it.
2. The other calls of the forward, in program order, are cut into consecutive runs. Cuts lie between blocks (modules
   with a number in their path), where the fewest bytes cross, so that the longest stage takes least; or where a plan
   says; or, where parameters belong to stages already, so that each stays in its own.
3. A parameter belongs to the first stage that reads it. What is computed from parameters alone goes with its readers.
4. A call of the backward belongs to the stage of its gradients, until it reads a value of the forward that this stage
   does not have: it then belongs to the stage of that value. The backward so goes down the stages as the forward went
   up. Calls of which only stages before read the result move there where their operands go there anyway.
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
"""Seconds of a node of a traced program; any unit will do."""

_BLOCK = re.compile(r"((?:.*?\.)?\d+)(?:\.|$)")
_ALONE = (InputKind.INPUT, InputKind.BUFFER, InputKind.SEED)


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """Where the nodes of a program belong.

    Args:
        stages: how many there are.
        stage: of each node that belongs to one, and of each parameter.
        derived: parameters, and the calls that are computed from them alone.
        repeated: the calls that each stage computes which reads them.
        cuts: names of the calls that the second stage and those behind it begin with.
    """

    stages: int
    stage: Mapping[fx.Node, int]
    derived: frozenset[fx.Node]
    repeated: frozenset[fx.Node]
    cuts: tuple[str, ...]


def assign_stages(
    program: Program,
    stages: int,
    seconds: NodeSeconds,
    cuts: Sequence[str] = (),
    homes: Mapping[str, int] = MappingProxyType({}),
    blocks: Sequence[int] | None = None,
) -> StageAssignment:
    """The stage of each node.

    Args:
        program: forward and backward, as traced; or a forward alone.
        stages: how many; at least 2.
        seconds: of a node, which stages are balanced by.
        cuts: see `StageAssignment`: where stages begin; none: searched for.
        homes: the stage that holds each parameter already, by name.
        blocks: how many blocks (modules with a number in their path) each stage has; None: as balances them.

    Raises:
        RecipeError: the model has not as many blocks.
        NotAvailableError: the forward has fewer calls than there are stages, a gradient belongs to a stage before
            that of its parameter, or parameters lie otherwise than the forward reads them.
        PlanMismatchError: the program has none of the calls that `cuts` names.
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
        derived, repeated = frozenset(self.derived), frozenset(self.repeated)
        return StageAssignment(self.stages, self.stage, derived, repeated, tuple(self.cuts))

    def _know(self, node: fx.Node) -> None:
        """A stage has what it makes, and what its forward reads."""
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
        """Where the runs of all stages but the last end."""
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
        """By cut, where it may lie: behind the first readers of what lies before, before all readers of the rest."""
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
        """Parameters, and what is computed of them alone, go with the first reader in the forward."""
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
                self.repeated.add(node)  # a view of what the forward kept, a constant
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
        """The values of the forward that a call of the backward reads, through calls that each stage repeats."""
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
    """Ends of the first `stages - 1` runs of a forward's calls, so that the longest run takes least.

    Of ends that are alike in this, those across which the fewest bytes go. `windows`: the first and last place that
    each end may have.
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
        later = stages - 1 - number  # as many ends come behind this one
        for end in [end for end in ends[: len(ends) - later] if low <= end <= high] if later else ends[-1:]:
            options = [
                (max(longest, before[end] - before[start]), sent + crossing[end], (*found, end))
                for start, (longest, sent, found) in best[-1].items()
                if start < end
            ]
            if options:
                row[end] = min(options, key=lambda option: (float(f"{option[0]:.3g}"), *option[1:]))
        best.append(row)
    if len(forward) not in best[-1]:
        raise NotAvailableError(
            "The stages of a pipeline hold their parameters already, and this call reads them in another order. "
            "Compile for a mesh without the axis 'pipeline'."
        )
    return list(best[-1][len(forward)][2][:-1])


def _crossing_bytes(forward: Sequence[fx.Node]) -> list[int]:
    """By position, the bytes of calls before it that calls behind it read."""
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
"""Of a tuple, whose elements alone are sent."""


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else _NOT_SENT


def _candidates(forward: Sequence[fx.Node], stages: int, crossing: Sequence[int]) -> list[int]:
    """Where the forward may be cut: between blocks, or anywhere where there are too few of them."""
    before, between, behind = _around_blocks(forward, crossing)
    places = [*before, *between, *behind]
    if len(places) >= stages - 1:
        return places
    least = sorted(range(1, len(forward)), key=lambda index: (crossing[index], index))
    return sorted(place for place in least[:_MOST] if crossing[place] < _NOT_SENT)


def _around_blocks(forward: Sequence[fx.Node], crossing: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Places before the first block, between blocks, with the fewest bytes across, and behind the last one.

    Empty lists where there is nothing before or behind the blocks, or there are none.
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
    """Where the runs of all stages but the last end if each has so many blocks."""
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
"""Places that are tried in a forward without blocks."""


def _block_of(node: fx.Node) -> str | None:
    found = _BLOCK.match(node.meta.get("module") or "")
    return None if found is None else found[1]
