"""Fold a traced model: one block of each kind, and what comes before and after the blocks, with sizes linear in batch.

The model, cut short, is traced twice, with one and with two sequences. Both traces must be the same program but for
shapes and for views and copies of layout; then every dim is `first + step * (batch - 1)`, and one folded program serves
all micro-batch sizes. Only sums may be there for two sequences and not for one: gradients of what the sequences share
(GPT-2's embeddings of positions, T5's biases of attention). They are counted for one sequence too.
A section is a maximal part that is repeated as a whole: the calls of one block of a kind, of everything before the
blocks, or of everything after them. Of a kind's blocks the last one that was kept stands for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import fx

from autoshard.errors import TraceError
from autoshard.ir.program import InputKind, Program, tensor_values
from autoshard.tracing import BlockList
from passes.preparation.canonicalize import Canonicalize, is_view
from passes.strategies.enumerate_strategies import operands_of

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True)
class FoldedProgram:
    """A program cut into sections.

    Args:
        single: the canonical program of one sequence.
        twin: name of each call of `single` that is no view or copy to the same call in the program of two sequences.
        section_of: node name to section: "before", "after", "list:kind", or "" for blocks that others stand for.
        blocks: the section of every block of the whole model, in order.
        parameters: section to names of the parameters' placeholders that belong to it.
        lists: the lists of blocks.
        sums: the calls of the program of two sequences that `single` lacks.
    """

    single: Program
    twin: Mapping[str, fx.Node]
    section_of: Mapping[str, str]
    blocks: tuple[str, ...]
    parameters: Mapping[str, tuple[str, ...]]
    lists: tuple[BlockList, ...] = ()
    sums: tuple[fx.Node, ...] = ()

    def names_of(self, name: str) -> tuple[str, ...]:
        """The qualified names, in the whole model, of the parameters that a parameter of the short one stands for.

        None for a parameter of a block that another block stands for.
        """
        for item in self.lists:
            prefix, _, rest = name.removeprefix(f"{item.path}.").partition(".")
            if name.startswith(f"{item.path}.") and prefix.isdigit():
                kind = item.kinds[item.kept[int(prefix)]]
                last = max(index for index, position in enumerate(item.kept) if item.kinds[position] == kind)
                if int(prefix) != last:
                    return ()
                alike = (position for position, other in enumerate(item.kinds) if other == kind)
                return tuple(f"{item.path}.{position}.{rest}" for position in alike)
        return (name,)

    @property
    def sections(self) -> tuple[str, ...]:
        """All sections: before, the kinds of blocks, after."""
        return (BEFORE, *dict.fromkeys(self.blocks), AFTER)


def fold_program(single: Program, double: Program, lists: Sequence[BlockList]) -> FoldedProgram:
    """The folded form of a model's traces with one and with two sequences.

    Raises:
        TraceError: the two traces differ in more than shapes and sums over sequences.
    """
    single, double = Canonicalize()(single), Canonicalize()(double)
    twin, sums = _twins(single, double)
    places = _places(lists)
    section_of = _sections(single, places)
    parameters = _parameters(single, places, section_of)
    return FoldedProgram(single, twin, section_of, _all_blocks(lists), parameters, tuple(lists), sums)


def is_layout(node: fx.Node) -> bool:
    """Whether a call only changes how a value lies in memory: a view, or a copy."""
    return is_view(node) or node.target in _COPIES or getattr(node.target, "__name__", "") == "getitem"


_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


def _twins(single: Program, double: Program) -> tuple[dict[str, fx.Node], tuple[fx.Node, ...]]:
    """Each working call of one sequence to that of two, and the sums that only two sequences need."""
    ones, twos = _working_calls(single), deque(_working_calls(double))
    twin: dict[str, fx.Node] = {}
    sums: list[fx.Node] = []
    for one in ones:
        while twos and _is_sum(twos[0]) and not _is_twin(one, twos[0], twin, sums):
            sums.append(twos.popleft())
        if not twos or twos[0].target is not one.target:
            raise TraceError(
                f"The model runs other operators for two sequences than for one: {twos[0].target if twos else 'none'} "
                f"in place of {one.target} ({one.meta.get('source') or 'unknown line'}), so its cost cannot be told "
                "from one trace."
            )
        _check_shapes(one, twos[0])
        twin[one.name] = twos.popleft()
    if not all(map(_is_sum, twos)):
        raise TraceError(f"The model runs {len(twos)} operators more for two sequences than for one.")
    return twin, (*sums, *twos)


def _check_shapes(one: fx.Node, two: fx.Node) -> None:
    """Raise `TraceError` where a call of one sequence and of two have shapes of different forms.

    So they have where autograd multiplies the other way round for one sequence (a linear layer over a transposed dim).
    """
    pairs = zip_longest(_shapes(one), _shapes(two), fillvalue=())
    wrong = next(((a, b) for a, b in pairs if len(a) != len(b) or not all(map(_is_of_sequences, a, b))), None)
    if wrong is not None:
        first, second = map(list, wrong)
        raise TraceError(
            f"{one.target} ({one.meta.get('source') or 'unknown line'}) has a tensor of {first} for one sequence, and "
            f"of {second} for two, so its cost cannot be told from one trace. If it is a linear layer over a "
            "transposed dim, make its input contiguous."
        )


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    values = [operand.meta["val"] for operand in operands_of(node)]
    return [tuple(value.shape) for value in (*values, *tensor_values(node)) if isinstance(value, torch.Tensor)]


_ONCE, _PART_ONCE = 2, 10
"""How much of a dim there may be once, whatever the sequences (a halo, an offset, rounding up): a choice, by which no
model of our tests is refused; a transposed dim differs by far more."""


def _is_of_sequences(one: int, two: int) -> bool:
    """Whether a dim holds no sequences, or as many for each, but for what is added or cut off once."""
    return two == one or abs(two - 2 * one) <= _ONCE + one // _PART_ONCE


def _is_sum(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sum.dim_IntList


def _is_twin(one: fx.Node, two: fx.Node, twin: Mapping[str, fx.Node], sums: Sequence[fx.Node]) -> bool:
    """Whether a sum of two sequences is, of the same value, one that one sequence has too."""
    if two.target is not one.target:
        return False
    before, after = _maker(one.all_input_nodes[0]), _maker(two.all_input_nodes[0])
    while after in sums:
        after = _maker(after.all_input_nodes[0])
    return after is twin[before.name] if before.name in twin else after.name == before.name


def _maker(node: fx.Node) -> fx.Node:
    """What made a value, views and copies of layout undone."""
    while is_layout(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _working_calls(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and not is_layout(node)]


def _places(lists: Sequence[BlockList]) -> dict[str, str]:
    """Path of each block of the short model to its section, "" unless it is the last of its kind."""
    places: dict[str, str] = {}
    for item in lists:
        last = {item.kinds[position]: index for index, position in enumerate(item.kept)}
        for index, position in enumerate(item.kept):
            kind = item.kinds[position]
            places[f"{item.path}.{index}"] = _section(item, kind) if last[kind] == index else ""
    return places


def _section(item: BlockList, kind: int) -> str:
    return f"{item.path}:{kind}"


def _all_blocks(lists: Sequence[BlockList]) -> tuple[str, ...]:
    return tuple(_section(item, kind) for item in lists for kind in item.kinds)


def _block_of(path: str, places: Mapping[str, str]) -> str | None:
    """The block's path that a module's or parameter's path lies in, or None."""
    parts = path.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if prefix in places), None)


def _sections(program: Program, places: Mapping[str, str]) -> dict[str, str]:
    """The section of every call: by its module, else by where its operands come from."""
    blocks: dict[str, str | None] = {}
    order = [node for node in program.graph.nodes if node.op == "call_function"]
    for node in order:
        blocks[node.name] = _block_of(node.meta.get("module", ""), places) or _inherited(node, blocks)
    first, last = _extent(order, blocks, "forward")
    first_back, _ = _extent(order, blocks, "backward")
    result = {}
    for index, node in enumerate(order):
        block = blocks[node.name]
        if block is not None:
            result[node.name] = places[block]
        elif node.meta["phase"] == "forward":
            result[node.name] = BEFORE if index < first or (index < last and _is_constant(node)) else AFTER
        else:
            result[node.name] = AFTER if index < first_back else BEFORE
    return result


def _inherited(node: fx.Node, blocks: Mapping[str, str | None]) -> str | None:
    """Sums of gradients belong to the block of their latest operand."""
    if node.meta["phase"] == "forward" or "add" not in str(node.target):
        return None
    known = [blocks[item.name] for item in node.all_input_nodes if blocks.get(item.name) is not None]
    return known[-1] if known else None


def _is_constant(node: fx.Node) -> bool:
    return not node.all_input_nodes


def _extent(order: Sequence[fx.Node], blocks: Mapping[str, str | None], phase: str) -> tuple[int, int]:
    """Positions of the first and the last call of a phase that lies in a block."""
    inside = [
        index for index, node in enumerate(order) if node.meta["phase"] == phase and blocks[node.name] is not None
    ]
    return (inside[0], inside[-1]) if inside else (len(order), len(order))


def _parameters(
    program: Program, places: Mapping[str, str], section_of: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """A block's parameters are its own; others belong to the section of their first reader."""
    found: dict[str, list[str]] = {}
    nodes = program.nodes_by_name()
    for slot in program.inputs_of(InputKind.PARAMETER):
        block = _block_of(slot.name, places)
        section = places[block] if block is not None else _reader_section(nodes[slot.node], section_of)
        if section:
            found.setdefault(section, []).append(slot.node)
    return {section: tuple(names) for section, names in found.items()}


def _reader_section(node: fx.Node, section_of: Mapping[str, str]) -> str:
    readers = [section_of[user.name] for user in node.users if user.name in section_of]
    return readers[0] if readers else AFTER
