"""Read the FLOPs and bytes of a quantity off a lowered program, one part for each operation or value.

The operations are contractions (matrix products and attention) and collectives. The values are saved values, inputs and
results.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from autoshard.errors import FormulaError
from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.communicators import group_axes
from autoshard.ir.lowered import LocalSlot, PhasedProgram
from autoshard.ir.program import InputKind, OutputKind
from autoshard.ir.spec import PartitionSpec
from cost_models.formulas import Size
from cost_models.operators import work
from cost_models.work import Kind, TensorInfo
from passes.preparation.canonicalize import is_view
from passes.questions.fitted_program import line_of
from passes.strategies.collective_nodes import collective_of, exchanges
from passes.strategies.enumerate_strategies import operands_of
from passes.strategies.local_tracer import EMITTED_AT
from passes.strategies.operator_names import operator_name
from passes.strategies.tensor_infos import tensor_infos

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default

WITH_STATE = "bytes of parameters with state"
"""Name of a quantity: the bytes of the parameters for which an optimizer keeps state.

If the optimizer is not part of the program, its state is taken to be a multiple of these bytes.
"""


@dataclass(frozen=True, slots=True)
class CountedPart:
    """The part of a quantity that comes from one operation or value of a lowered program.

    Args:
        label: the operation or value in words.
        dims: the dims on a rank that the part depends on.
        count: returns the FLOPs or bytes for given dims, which may be expressions.
        spec: the spec of the first result of the traced node, if `dims` are its shape on a rank; else None.
    """

    label: str
    dims: tuple[int, ...]
    count: Callable[[Sequence[Size]], Size]
    spec: PartitionSpec | None = None


Parts = Iterator[tuple[str, CountedPart]]
"""Pairs of the name of a traced node and a part that its lowered form contributes."""

Read = Callable[[PhasedProgram, Mapping[str, Size]], Parts]
"""Function that yields the parts of a quantity, given a lowered program and the size of each mesh axis."""


def reader_of(name: str) -> Read:
    """Return the function that yields the parts of a quantity of one rank from a lowered program.

    `name` is the quantity's name. "communication_bytes_data" counts only communication over the axis "data".
    """
    _, _, axis = name.partition("communication_bytes")
    return _READERS.get(name) or partial(_sent, axis=axis.removeprefix("_"))


def sent_at_cuts(phased: PhasedProgram, sends: Mapping[str, int]) -> Parts:
    """Yield the bytes that a stage sends to other stages, one part for each of its results.

    `sends` has the number of times that a result is sent, by the result's name.
    """
    for item in phased.lowered.outputs:
        if item.slot.name in sends:
            yield _slot(phased, item, times=sends[item.slot.name])


def _contractions(phased: PhasedProgram, axes: Mapping[str, Size]) -> Parts:
    """Yield the FLOPs of matrix products and attention.

    Raises:
        FormulaError: the program has ring attention, whose FLOPs differ between ranks.
    """
    for site, node in _calls(phased):
        if is_collective(node) or is_wait(node) or not contracts(node):
            continue
        if exchanges(node):
            raise FormulaError(
                f"No formula gives the operations of a rank at {node.target} ({line_of(node)}). They depend on the "
                "pairing of key blocks between ranks. formula('step_flops') counts all ranks together; "
                "plan.predicted has the time."
            )
        dims = tuple(dim for infos in tensor_infos(node) for info in infos for dim in info.shape)
        yield site, CountedPart(operator_name(node), dims, partial(flops_of, node))


def contracts(node: fx.Node) -> bool:
    """Whether a call is a matrix product or attention, the only calls whose FLOPs formulas count."""
    if not isinstance(node.target, torch._ops.OpOverload) or not operands_of(node):
        return False
    done = work(operator_name(node), *tensor_infos(node), _literals(node))
    return bool(done.products) or done.kind is Kind.ATTENTION


def flops_of(node: fx.Node, dims: Sequence[Size]) -> Size:
    """Return the FLOPs of a call from its dims, which may be expressions.

    `dims` has the dims of all operands and then of all results, as one flat sequence.

    Raises:
        FormulaError: the FLOPs depend on which of two sizes is larger.
    """
    given = iter(dims)

    def filled(infos: Sequence[TensorInfo]) -> list[TensorInfo]:
        shapes: list[Any] = [tuple(next(given) for _ in info.shape) for info in infos]
        return [info._replace(shape=shape) for info, shape in zip(infos, shapes, strict=True)]

    try:
        inputs, outputs = map(filled, tensor_infos(node))
        done = work(operator_name(node), inputs, outputs, _literals(node))
    except TypeError as error:
        raise FormulaError(
            f"The FLOPs of {node.target} ({line_of(node)}) depend on which of two sizes is larger, so they are "
            "no formula. Hold the sizes of its operands fixed: formula(..., fixed=('sequence',))."
        ) from error
    return sympy.nsimplify(done.flops, rational=True)


def _literals(node: fx.Node) -> tuple[Any, ...]:
    return tuple(fx.map_arg(node.args, lambda argument: None))


def _sent(phased: PhasedProgram, axes: Mapping[str, Size], axis: str) -> Parts:
    """Yield the bytes that each rank sends over an axis with ring algorithms. "" stands for all axes.

    Raises:
        FormulaError: a call exchanges rows between ranks, in numbers that depend on values.
    """
    for site, node in _calls(phased):
        if exchanges(node):
            raise FormulaError(
                f"The bytes that {node.target} ({line_of(node)}) exchanges between ranks depend on values: they have "
                "no formula."
            )
        if is_collective(node) and axis in ("", group_axes(str(node.args[-1]))[0]):
            sent = collective_of(node, phased.lowered.mesh)
            ranks: Any = sympy.sympify(math.prod([axes[each] for each in sent.axes]))
            others = {"all_gather_into_tensor": ranks - 1, "all_reduce": 2 * (ranks - 1) / ranks}
            value = operands_of(node)[0].meta["val"]
            each = others.get(sent.kind, (ranks - 1) / ranks) * value.dtype.itemsize
            yield site, _bytes(f"{sent.kind} over {','.join(sent.axes)}", value.shape, each)


def _saved(phased: PhasedProgram, axes: Mapping[str, Size]) -> Parts:
    """Yield the bytes that the forward saves for the backward, without inputs and parameters."""
    return _owned(phased, phased.saved)


def _gradients(phased: PhasedProgram, axes: Mapping[str, Size]) -> Parts:
    """Yield the bytes of the gradients that the program returns, or that the backward passes to the update.

    A pipeline stage may pass on a gradient that it gets from a later stage.
    """
    yield from _owned(phased, phased.carried, with_tangents=True)
    yield from (_slot(phased, item) for item in phased.lowered.outputs if item.slot.kind is OutputKind.GRADIENT)


def _held(phased: PhasedProgram, axes: Mapping[str, Size], kind: InputKind) -> Parts:
    return (_slot(phased, item) for item in phased.lowered.inputs if item.slot.kind is kind)


def _with_state(phased: PhasedProgram, axes: Mapping[str, Size]) -> Parts:
    """Yield the bytes of the parameters for which an optimizer keeps state.

    These are the parameters with gradients, or all parameters if the program returns no gradients.
    """
    trained = {item.slot.name for item in phased.lowered.outputs if item.slot.kind is OutputKind.GRADIENT}
    for node, part in _held(phased, axes, InputKind.PARAMETER):
        if not trained or part.label in trained:
            yield node, part


_READERS: Mapping[str, Read] = {
    "rank_flops": _contractions,
    "activation_bytes": _saved,
    "gradient_bytes": _gradients,
    "parameter_bytes": partial(_held, kind=InputKind.PARAMETER),
    WITH_STATE: _with_state,
    "optimizer_bytes": partial(_held, kind=InputKind.STATE),
}


def _slot(phased: PhasedProgram, item: LocalSlot, times: int = 1) -> tuple[str, CountedPart]:
    shape = item.spec.local_shape(item.shape, phased.lowered.mesh)
    return item.slot.node, replace(_bytes(item.slot.name, shape, times * item.dtype.itemsize), spec=item.spec)


def _owned(phased: PhasedProgram, names: Sequence[str], *, with_tangents: bool = False) -> Parts:
    """Yield the bytes of the values with these names. Views of one value count once together.

    Inputs do not count, except tangents if `with_tangents` is set.
    """
    graph = phased.lowered.graph_module.graph
    nodes = {node.name: node for node in graph.nodes}
    inputs = zip(graph.find_nodes(op="placeholder"), phased.lowered.inputs, strict=True)
    tangents = {node: item for node, item in inputs if with_tangents and item.slot.kind is InputKind.TANGENT}
    owners: dict[fx.Node, None] = {}
    for name in names:
        node = nodes[name]
        while _is_alias(node):
            node = node.all_input_nodes[0]
        if node.op == "call_function" or node in tangents:
            owners[node] = None
    for node in owners:
        if node in tangents:
            yield _slot(phased, tangents[node])
            continue
        value = node.meta["val"]
        shape = tuple(value.shape)
        if node.target is _GATHER:  # consecutive pieces
            piece = tuple(node.all_input_nodes[0].meta["val"].shape)
            shape = (math.prod(shape) // math.prod(piece), *piece)
        yield _site(node), _bytes(f"a value of {node.target}", shape, value.dtype.itemsize)


def _bytes(label: str, shape: Sequence[int], each: Size) -> CountedPart:
    return CountedPart(label, tuple(shape), lambda dims: math.prod(dims) * each)


def _is_alias(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_alias(node.all_input_nodes[0])
    return node.op == "call_function" and (is_view(node) or is_wait(node))


def _calls(phased: PhasedProgram) -> Iterator[tuple[str, fx.Node]]:
    for node in phased.lowered.graph_module.graph.nodes:
        if node.op == "call_function":
            yield _site(node), node


def _site(node: fx.Node) -> str:
    """Return the name of the traced node that a local call was lowered from."""
    return str(node.meta[EMITTED_AT])
