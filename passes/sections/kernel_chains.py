"""Our own kernels as chains of a folded program, parted where values change their layout.

A kernel's calls are one chain, whatever sections they lie in: what a section has of it are the values that its calls
are the first to read and those that they write, and whoever has the last call has the launch. So a norm that is fused
with the sum at the end of the block before costs what it does in a long run of blocks. Where an axis moves a value
between two calls of a kernel (`AxisLayout.moves`), the kernel is parted: the calls behind are a chain of their own,
which is launched, and reads the value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autoshard.ir.program import tensor_values
from passes.sections.chains import ChainDemand, Chains
from passes.sections.fold_program import FoldedProgram
from passes.sections.propagate_axis import AxisLayout
from passes.sections.trace_values import is_free, readers_of, source_of
from passes.strategies.enumerate_strategies import operands_of

_Value = tuple[fx.Node, int]
"""What makes a value, and which of its results that is."""
_Operand = tuple[fx.Node, int]
"""A call, and which of its operands."""


@dataclass(frozen=True, slots=True)
class ProgramKernel:
    """A kernel in place of memory-bound calls.

    Args:
        name: its operator's, "triton_add_rms_norm".
        members: the calls.
        reads: the nodes whose results it reads, and which of them; several may be views of one value.
        phase: that it runs in.
        later_launches, later_bytes: what comes behind its first launch.
    """

    name: str
    members: tuple[str, ...]
    reads: tuple[tuple[str, int], ...]
    phase: str
    later_launches: int = 0
    later_bytes: int = 0

    def concerns(self, node: str) -> bool:
        """Whether it computes or reads a value."""
        return node in self.members or any(node == name for name, _ in self.reads)

    def __str__(self) -> str:
        return f"{self.name} for {', '.join(self.members)} ({self.phase})"


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """A kernel in its program.

    Args:
        kernel: the kernel.
        members: the calls, in order.
        sources: what makes the values that it reads, views undone.
        levels: member to how many moves within the kernel lie before it.
    """

    kernel: ProgramKernel
    members: tuple[fx.Node, ...]
    sources: tuple[_Value, ...]
    levels: Mapping[fx.Node, int]

    def first_reader(self, source: _Value) -> fx.Node:
        """The first call that has a value as operand; the last call of all for what kernels make again from it."""
        return next((node for node in self.members if any(_operands_from(node, source))), self.members[-1])


class KernelChains(Chains):
    """The chains that kernels of ours are.

    Args:
        folded: the program.
        working: names of its calls that do work.
        added: of those that add a bias in the product before, unless a kernel of ours does.
        kernels: its kernels where every value is whole.
        layouts: how axes split it.
    """

    def __init__(
        self,
        folded: FoldedProgram,
        working: Collection[str],
        added: Collection[str],
        kernels: Iterable[ProgramKernel],
        layouts: Mapping[str, AxisLayout],
    ) -> None:
        nodes = folded.single.nodes_by_name()
        self.working = working
        moves = {(move.value[0], move.reader) for layout in layouts.values() for move in layout.moves}
        self.placed: dict[fx.Node, _Placed] = {}
        self.read_by: dict[_Value, list[_Placed]] = {}
        for kernel in kernels:
            members = sorted(nodes[name] for name in kernel.members if name in working or name in added)
            if any(node.name in working for node in members):
                self._add(_place(kernel, members, nodes, moves))

    def _add(self, placed: _Placed) -> None:
        self.placed |= dict.fromkeys(placed.members, placed)
        for source in placed.sources:
            self.read_by.setdefault(source, []).append(placed)

    def chain_of(self, call: fx.Node) -> str:
        """The kernel's last call, and the level."""
        placed = self.placed.get(call)
        return call.name if placed is None else f"{placed.members[-1].name}/{placed.levels[call]}"

    def is_fused(self, chain: Sequence[fx.Node]) -> bool:
        """Whether a kernel of ours stands in."""
        return chain[0] in self.placed

    def phase_of(self, call: fx.Node) -> str:
        """That of the call's kernel."""
        placed = self.placed.get(call)
        return call.meta["phase"] if placed is None else placed.kernel.phase

    def readers(self, node: fx.Node, index: int | None = None) -> list[fx.Node]:
        """Calls in no kernel, or in the one that makes the value; and of each kernel that reads it the first one."""
        own = self.placed.get(node)
        found = [item for item in readers_of(node, index) if self.placed.get(item) in (None, own)]
        indices = range(len(tensor_values(node))) if index is None else (index,)
        values = [(node, place) for place in indices]
        return [*found, *(placed.first_reader(value) for value in values for placed in self.read_by.get(value, ()))]

    def asked(self, chain: Sequence[fx.Node]) -> ChainDemand:
        """What the calls of a kernel, on one level and in one section, are the first to read."""
        placed = self.placed.get(chain[0])
        if placed is None:
            return ChainDemand(tuple((chain[0], index) for index in range(len(operands_of(chain[0])))))
        level = placed.levels[chain[0]]
        together = [node for node in placed.members if placed.levels[node] == level]
        working = [node for node in together if node.name in self.working]
        operands: list[_Operand] = []
        values: list[_Value] = []
        for source in (*placed.sources, *_from_levels_before(placed, level)):
            reading = [operand for node in together for operand in _operands_from(node, source)]
            reader = reading[0][0] if reading else placed.first_reader(source)
            if reader in together and _owner(reader, together, working) in chain:
                views, is_whole = _least(source, reading)
                operands += views
                values += [source] * is_whole
        if working[-1] is not chain[-1]:
            return ChainDemand(tuple(operands), tuple(values), launches=0)
        if level < max(placed.levels.values()):
            return ChainDemand(tuple(operands), tuple(values))
        kernel = placed.kernel
        return ChainDemand(tuple(operands), tuple(values), 1 + kernel.later_launches, kernel.later_bytes)


def _owner(reader: fx.Node, together: Sequence[fx.Node], working: Sequence[fx.Node]) -> fx.Node:
    """The call that has what a member reads: itself, or a neighbour of an addition that a product else does."""
    behind = together[together.index(reader) :]
    return next((node for node in behind if node in working), working[-1])


def _place(
    kernel: ProgramKernel, members: Sequence[fx.Node], nodes: Mapping[str, fx.Node], moves: Collection[tuple[str, str]]
) -> _Placed:
    reads = ((nodes[name], index) for name, index in kernel.reads)
    sources = tuple(dict.fromkeys(source_of(node) if is_free(node) else (node, index) for node, index in reads))
    levels: dict[fx.Node, int] = {}
    for node in members:
        before = [operand for operand in operands_of(node) if source_of(operand)[0] in levels]
        found = (levels[source_of(operand)[0]] + _is_moved(operand, node, moves) for operand in before)
        levels[node] = max(found, default=0)
    return _Placed(kernel, tuple(members), sources, levels)


def _is_moved(operand: fx.Node, reader: fx.Node, moves: Collection[tuple[str, str]]) -> bool:
    """Whether a value moves on its way from the call that makes it, by way of views, to one that reads it."""
    while (operand.name, reader.name) not in moves:
        if not (is_free(operand) and operand.all_input_nodes):
            return False
        operand, reader = operand.all_input_nodes[0], operand
    return True


def _operands_from(node: fx.Node, source: _Value) -> Iterator[_Operand]:
    """The operands of a call that are views of a value."""
    return ((node, index) for index, operand in enumerate(operands_of(node)) if source_of(operand) == source)


def _from_levels_before(placed: _Placed, level: int) -> list[_Value]:
    """The values that calls of a level read, and others of the kernel on a lower one make."""
    here = (node for node in placed.members if placed.levels[node] == level)
    found = dict.fromkeys(source_of(operand) for node in here for operand in operands_of(node))
    return [source for source in found if placed.levels.get(source[0], level) < level]


def _least(source: _Value, reading: Sequence[_Operand]) -> tuple[list[_Operand], bool]:
    """How few bytes of a value are read by way of some operands: some of these; or all, as one of them or as it is."""
    value = tensor_values(source[0])[source[1]]
    assert value is not None, "absent results are not read"
    views = {operands_of(node)[index]: (node, index) for node, index in reading}
    if reading and sum(math.prod(view.meta["val"].shape) for view in views) < value.numel():
        return list(views.values()), False
    whole = next((views[view] for view in views if view.meta["val"].numel() == value.numel()), None)
    return ([], True) if whole is None else ([whole], False)
