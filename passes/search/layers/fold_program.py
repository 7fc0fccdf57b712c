"""Fold a traced model to one block of each kind and the parts around the blocks, with sizes linear in the batch.

The model, shortened to a few blocks, is traced with two and with three sequences. Both traces must be the same program
but for sizes, and the program of one sequence is extrapolated from them. Then every dim is
`first + step * (batch - 1)`, and one folded program serves all micro-batch sizes. One sequence is not traced, because
autograd and some layers do other things for it (`nn.Transformer`, Mamba, `nn.BatchNorm1d` of vectors). But axes are
propagated through the program of one sequence: in it a flattened dim of tokens is the sequence, which an axis splits.

A layer class has the calls of the blocks of one kind, or of everything before the blocks, or of everything after them.
The last block of a kind in the shortened model stands for all blocks of the kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError
from autoshard.ir.program import InputKind, Program
from autoshard.tracing import BlockList
from passes.preparation.canonicalize import Canonicalize, is_view
from passes.preparation.rewriting import copy_program

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True)
class FoldedProgram:
    """A program cut into layer classes.

    Args:
        single: the canonical program of one sequence.
        twin: for the name of each node of `single`, the same node in the program of two sequences.
        layer_of: for the name of each node, its layer class: "before", "after" or "list:kind". The class is "" in a
            block that another block stands for.
        blocks: the layer class of every block of the whole model, in order.
        parameters: layer class → the names of the placeholders of its parameters.
        lists: the model's lists of blocks.
    """

    single: Program
    twin: Mapping[str, fx.Node]
    layer_of: Mapping[str, str]
    blocks: tuple[str, ...]
    parameters: Mapping[str, tuple[str, ...]]
    lists: tuple[BlockList, ...] = ()

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the whole model's parameters for which a parameter of the shortened model stands.

        The result is empty for a parameter of a block that another block stands for.
        """
        for item in self.lists:
            prefix, _, rest = name.removeprefix(f"{item.path}.").partition(".")
            if name.startswith(f"{item.path}.") and prefix.isdigit():
                kind, is_last = _kind_of(item, int(prefix))
                alike = [position for position, other in enumerate(item.kinds) if other == kind]
                return tuple(f"{item.path}.{position}.{rest}" for position in alike) if is_last else ()
        return (name,)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layer classes: "before", the kinds of blocks, "after"."""
        return (BEFORE, *dict.fromkeys(self.blocks), AFTER)


def fold_program(double: Program, triple: Program, lists: Sequence[BlockList]) -> FoldedProgram:
    """Return the folded form of a model's traces with two and with three sequences.

    Raises:
        TraceError: the two traces differ in more than sizes.
    """
    double, triple = Canonicalize()(double), Canonicalize()(triple)
    single = program_of_one(double, triple)
    places = _places(lists)
    layer_of = _layers(single, places)
    parameters = _parameters(single, places, layer_of)
    blocks = tuple(f"{item.path}:{kind}" for item in lists for kind in item.kinds)
    return FoldedProgram(single, double.nodes_by_name(), layer_of, blocks, parameters, tuple(lists))


def program_of_one(double: Program, triple: Program) -> Program:
    """Return the program of one sequence, extrapolated from two and three sequences.

    Raises:
        TraceError: the traces run different operators, or a size is impossible for one sequence.
    """
    single = copy_program(double)
    for node, three in zip_longest(single.graph.nodes, triple.graph.nodes):
        if node is None or three is None or not _are_alike(node, three):
            raise TraceError(
                f"The model runs other operators for three sequences than for two: {_named(three)} in place of "
                f"{_named(node)}, so its cost cannot be told from one trace."
            )
        node.args, node.kwargs = pytree.tree_map(_size_before, (node.args, node.kwargs), (three.args, three.kwargs))
        if "val" in node.meta:
            values = (node.meta["val"], three.meta["val"])
            node.meta["val"] = pytree.tree_map(lambda two, three, node=node: _value_before(node, two, three), *values)
    return single


def _are_alike(two: fx.Node, three: fx.Node) -> bool:
    if two.op != three.op or (two.op != "placeholder" and two.target != three.target):
        return False
    if [operand.name for operand in two.all_input_nodes] != [operand.name for operand in three.all_input_nodes]:
        return False
    forms = [pytree.tree_structure((node.args, node.kwargs, node.meta.get("val"))) for node in (two, three)]
    return forms[0] == forms[1]


def _named(node: fx.Node | None) -> str:
    return "none" if node is None else f"{node.target} ({node.meta.get('source') or 'unknown line'})"


def _size_before(two: Any, three: Any) -> Any:
    """Return a call's argument for one sequence, from the same argument for two and for three sequences.

    An int is extrapolated: 2 * two - three. Any other argument is returned unchanged.
    """
    return 2 * two - three if type(two) is int and type(three) is int else two


def _value_before(node: fx.Node, two: Any, three: Any) -> Any:
    """Return the value of a node for one sequence, from its values for two and for three sequences.

    Shape and strides of a tensor are extrapolated.

    Raises:
        TraceError: a size would be negative, or the numbers of dims differ.
    """
    if not isinstance(two, torch.Tensor):
        return _size_before(two, three)
    shape = [2 * first - second for first, second in zip(two.shape, three.shape, strict=False)]
    strides = [2 * first - second for first, second in zip(two.stride(), three.stride(), strict=False)]
    if two.ndim != three.ndim or any(size < 0 for size in (*shape, *strides)):
        raise TraceError(
            f"{_named(node)} has a tensor of {list(two.shape)} for two sequences, and of {list(three.shape)} for "
            "three, so its cost cannot be told from one trace."
        )
    fakes: Any = two
    with fakes.fake_mode:
        return torch.empty_strided(shape, strides, dtype=two.dtype, device=two.device)


def is_layout(node: fx.Node) -> bool:
    """Whether a call only selects a result, or only changes a value's layout in memory (a view or a copy)."""
    return is_view(node) or node.target in _COPIES or getattr(node.target, "__name__", "") == "getitem"


_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


def _kind_of(item: BlockList, index: int) -> tuple[int, bool]:
    """Return the kind of block number `index` of the shortened model, and whether it is the last block of this kind."""
    kinds = [item.kinds[position] for position in item.kept]
    return kinds[index], kinds[index] not in kinds[index + 1 :]


def _places(lists: Sequence[BlockList]) -> dict[str, str]:
    """Return the layer class of each block, by the block's path.

    The class is "" if the block is not the last of its kind, because the last block stands for it.
    """
    places: dict[str, str] = {}
    for item in lists:
        for index in range(len(item.kept)):
            kind, is_last = _kind_of(item, index)
            places[f"{item.path}.{index}"] = f"{item.path}:{kind}" if is_last else ""
    return places


def _block_of(path: str, places: Mapping[str, str]) -> str | None:
    """Return the path of the block that contains the module or parameter `path`, or None outside of blocks.

    `places` has the paths of all blocks.
    """
    parts = path.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if prefix in places), None)


def _layers(program: Program, places: Mapping[str, str]) -> dict[str, str]:
    """Return the layer class of every call, by the call's name.

    The class follows from the call's module. A sum of gradients outside of blocks belongs to the block of its operands.
    All further calls belong to the part before or after the blocks, by their position.
    """
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
    """Return the block of a sum of gradients: the block of its last operand that is in a block.

    None is returned for all other calls.
    """
    if node.meta["phase"] == "forward" or "add" not in str(node.target):
        return None
    known = [blocks[item.name] for item in node.all_input_nodes if blocks.get(item.name) is not None]
    return known[-1] if known else None


def _is_constant(node: fx.Node) -> bool:
    return not node.all_input_nodes


def _extent(order: Sequence[fx.Node], blocks: Mapping[str, str | None], phase: str) -> tuple[int, int]:
    """Return the positions in `order` of the first and the last call that lies in a block and has the phase `phase`."""
    inside = [
        index for index, node in enumerate(order) if node.meta["phase"] == phase and blocks[node.name] is not None
    ]
    return (inside[0], inside[-1]) if inside else (len(order), len(order))


def _parameters(program: Program, places: Mapping[str, str], layer_of: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the placeholders of parameters, by layer class.

    A parameter belongs to the class of its block. Outside of blocks, it belongs to the class of its first reader.
    """
    found: dict[str, list[str]] = {}
    nodes = program.nodes_by_name()
    for slot in program.inputs_of(InputKind.PARAMETER):
        block = _block_of(slot.name, places)
        layer = places[block] if block is not None else _reader_layer(nodes[slot.node], layer_of)
        if layer:
            found.setdefault(layer, []).append(slot.node)
    return {layer: tuple(names) for layer, names in found.items()}


def _reader_layer(node: fx.Node, layer_of: Mapping[str, str]) -> str:
    readers = [layer_of[user.name] for user in node.users if user.name in layer_of]
    return readers[0] if readers else AFTER
