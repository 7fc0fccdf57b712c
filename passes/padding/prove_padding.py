"""Prove that padding of a program's inputs reaches no result.

The padded program is the program of a call with padded inputs. The exact program is that of the same call without
padding. Both are walked node by node. For each pair of nodes, the proof shows that the clean part of the padded value
(its elements outside padding) is the exact value. The clean part must depend only on the clean parts of operands, by
the same operator with the same numbers. The numbers in padding are bounded too, because masks, ignored targets and
zeros depend on them. Then results have equal clean parts, for any parameters and inputs. Their gradients are equal
too, as derivatives of equal functions.

1. Two exact programs are traced, of the two shortest lengths that are padded to the same length. If a number depends
   on the length in another way than as a size (a divisor, a window, a branch), it differs between the programs.
2. If the model's Python reads a value that padding changes (`mask.all()`), the call is traced again as compiled code.
   Models of the library transformers then have no such branches.

Gradients are assumed to be the derivatives of results. `torch.autograd.Function` may break this assumption, so a
program with such functions is not proven. Dropout draws a mask for the padded batch.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

import passes.padding.lookups
import passes.padding.moves
import passes.padding.weighting  # noqa: F401  (fill the table of calls)
from autoshard.errors import TraceError
from autoshard.ir.padding import PaddingProof, SizeDifferences
from autoshard.ir.program import InputKind, OutputKind, Program, tensor_values
from autoshard.ir.request import Request
from autoshard.rules.ranges import range_of_values
from passes.padding.by_rule import by_rule
from passes.padding.contents import PaddedContent, constant, content_of_type
from passes.padding.padded_calls import PaddedCall, results_of
from passes.padding.padded_values import Dim, PaddedValue, ReachedError, Region

_LOGGER = logging.getLogger(__name__)

Values = dict[fx.Node, Any]
"""Node of the padded program to its padded value; a node with several results has a tuple."""


def prove_padding(
    trace: Callable[[Request], Program],
    padded: Request,
    exact: Mapping[int, Request],
    length: int,
    fills: Mapping[str, float],
) -> PaddingProof:
    """Try to prove that padding reaches no result of a call.

    Args:
        trace: traces the program of a call.
        padded: the call with padded inputs, of length `length`.
        exact: maps each of several lengths to the call with inputs of this length, without padding.
        length: the size of the padded dim.
        fills: maps the name of an input ("input:0") to the number in its padding.

    Returns:
        The padded dims of each result, or the reason why there is no proof.
    """
    reason, trained = "", _trained(padded)
    for as_compiled in (False, True):
        asked = [
            replace(item, forward_only=True, update=None, as_compiled=as_compiled) for item in (padded, *exact.values())
        ]
        try:
            program, *others = map(trace, asked)
        except TraceError as error:
            _LOGGER.debug("padding is not proven, as a call cannot be traced: %s", error)
            return PaddingProof(reason=reason or "the call with padding, or one without, cannot be traced")
        try:
            _check_gradients(program)
            found = [
                _Pair(program, other, fills, trained).cuts(length, own)
                for own, other in zip(exact, others, strict=True)
            ]
            if any(cuts != found[0] for cuts in found):
                raise ReachedError("a result does not grow as the inputs do")
            return PaddingProof(found[0], as_compiled=as_compiled)
        except ReachedError as error:
            reason = str(error)
        if not any(item.guards for item in (program, *others)):
            break
    return PaddingProof(reason=reason)


def _trained(request: Request) -> set[str]:
    """Return the names of the parameters and inputs of a call that need gradients."""
    if not request.grad:
        return set()
    leaves = pytree.tree_leaves((request.args, dict(request.kwargs)))
    inputs = {f"input:{number}": leaf for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    named = {**dict(request.model.named_parameters()), **inputs}
    return {name for name, tensor in named.items() if tensor.requires_grad}


def _check_gradients(program: Program) -> None:
    if program.own_gradients:
        raise ReachedError(f"the gradient of {program.own_gradients[0]} is written by hand")


class _Pair:
    def __init__(self, padded: Program, exact: Program, fills: Mapping[str, float], trained: Collection[str]) -> None:
        self._padded, self._exact, self._fills, self._trained = padded, exact, fills, trained

    def cuts(self, length: int, exact: int) -> Mapping[int, SizeDifferences]:
        """Prove that no result of a pair of programs depends on padding.

        Args:
            length, exact: the size of the inputs with padding, and without.

        Returns:
            Number of an output → index of each padded dim → the size of this dim without padding, minus `exact`.

        Raises:
            ReachedError: padding may reach a result.
        """
        self._check_alike()
        inputs = self._inputs()
        values = _PaddedWalk(self._padded.graph_module, self._exact.graph_module, self._with_gradients()).run(inputs)
        self._check_guards(inputs)
        nodes = self._padded.nodes_by_name()
        cuts: dict[int, SizeDifferences] = {}
        for slot in self._padded.outputs:
            value = values[nodes[slot.node]]
            differences = _size_differences(value, slot.name, length, exact)
            if slot.kind is OutputKind.OUTPUT:
                cuts[int(slot.name.split(":")[1])] = differences
            elif differences:
                raise ReachedError(f"{slot.name} grows with the inputs")
        return cuts

    def _check_alike(self) -> None:
        one, other = self._padded, self._exact
        same_results = [(slot.kind, slot.name) for slot in one.outputs] == [
            (slot.kind, slot.name) for slot in other.outputs
        ]
        if not same_results or [slot.name for slot in one.inputs] != [slot.name for slot in other.inputs]:
            raise ReachedError("the results of the model depend on the length")
        constants = [{key: _plain(value) for key, value in item.output_constants.items()} for item in (one, other)]
        if constants[0] != constants[1]:
            raise ReachedError("a number among the results depends on the length")

    def _inputs(self) -> dict[str, PaddedValue]:
        found: dict[str, PaddedValue] = {}
        nodes, others = self._padded.nodes_by_name(), self._exact.nodes_by_name()
        for slot, other in zip(self._padded.inputs, self._exact.inputs, strict=True):
            value, exact = nodes[slot.node].meta["val"], others[other.node].meta["val"]
            fill = self._fills.get(slot.name) if slot.kind is InputKind.INPUT else None
            found[slot.node] = _input(value, exact, fill)
        return found

    def _with_gradients(self) -> set[str]:
        return {slot.node for slot in self._padded.inputs if slot.name in self._trained}

    def _check_guards(self, inputs: Mapping[str, PaddedValue]) -> None:
        """Raise `ReachedError` if the model's Python read a value while it was traced that depends on padding."""
        one, other = self._padded, self._exact
        if [guard.value for guard in one.guards] != [guard.value for guard in other.guards]:
            raise ReachedError("the model reads a value that padding changes")
        if one.guard_program is None or other.guard_program is None:
            return
        values = _PaddedWalk(one.guard_program, other.guard_program).run(inputs)
        results = pytree.tree_leaves(one.guard_program.graph.output_node().args)
        if any(values[node].is_padded for node in results):
            raise ReachedError("the model reads a value that padding changes")


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, tuple)) else None


def _input(value: torch.Tensor, exact: torch.Tensor, fill: float | None) -> PaddedValue:
    if value.dim() != exact.dim() or value.dtype != exact.dtype:
        raise ReachedError("the inputs depend on the length")
    dims: list[Dim] = [(sizes,) for sizes in zip(value.shape, exact.shape, strict=True)]
    clean = content_of_type(value.dtype)
    number = None if fill is None else constant(torch.tensor(fill).to(value.dtype).item())

    def content(region: Region) -> PaddedContent:
        return number if region and number is not None else clean

    return PaddedValue.of(dims, content)


def _size_differences(value: PaddedValue, name: str, length: int, exact: int) -> SizeDifferences:
    differences = {}
    for dim, index in value.places:
        sizes = value.part((dim, index))
        if len(value.dims[dim]) != 1 or sizes[0] - sizes[1] != length - exact:
            raise ReachedError(f"result {name.split(':')[-1]} does not grow as the inputs do")
        differences[dim] = sizes[1] - exact
    return differences


# The walk.


@dataclass(slots=True)
class _PaddedWalk:
    """A walk of the padded and the exact program, node by node.

    `differentiable` has the names of nodes through which gradients flow: at first the placeholders that need gradients.
    `run` adds the calls that read them.
    """

    padded: fx.GraphModule
    exact: fx.GraphModule
    differentiable: set[str] = field(default_factory=set)

    def run(self, inputs: Mapping[str, PaddedValue]) -> Values:
        """Return the `PaddedValue`s of all nodes, given the `PaddedValue`s of placeholders by name.

        Raises:
            ReachedError: padding may reach the clean part of a node's value. The text names the node.
        """
        values: Values = {}
        twins: dict[fx.Node, fx.Node] = {}
        graphs = (self.padded.graph, self.exact.graph)
        starts = [[node for node in graph.nodes if node.op == "placeholder"] for graph in graphs]
        nodes = [[node for node in graph.nodes if node.op != "placeholder"] for graph in graphs]
        if len(nodes[0]) != len(nodes[1]) or len(starts[0]) != len(starts[1]):
            raise ReachedError(
                f"{_first_difference(*nodes)} is not in both the program with padding and the one without"
            )
        for node, twin in zip(*starts, strict=True):
            values[node], twins[node] = inputs[str(node.target)], twin
        for node, twin in zip(*nodes, strict=True):
            if not _are_twins(node, twin, twins):
                raise ReachedError(f"{_named(node)} is not in both the program with padding and the one without")
            twins[node] = twin
            if node.op == "output":
                continue
            try:
                values[node] = self._value_of(node, twin, values)
            except ReachedError as error:
                raise ReachedError(f"{_named(node)} {error}") from error
        return values

    def _value_of(self, node: fx.Node, twin: fx.Node, values: Values) -> Any:
        has_gradient = any(operand.name in self.differentiable for operand in node.all_input_nodes)
        if has_gradient and any(value is not None and value.is_floating_point() for value in tensor_values(node)):
            self.differentiable.add(node.name)
        if node.op == "get_attr":
            return _constant_of(getattr(self.padded, str(node.target)), getattr(self.exact, str(twin.target)))
        if node.target is operator.getitem:
            return values[node.args[0]][node.args[1]]  # type: ignore[index]
        operands: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), operands.append)
        given = tuple(values[operand] for operand in operands)
        results = results_of(PaddedCall(node, twin, given, values, has_gradient), by_rule)
        return results[0] if isinstance(node.meta["val"], torch.Tensor) else results


def _first_difference(one: Sequence[fx.Node], other: Sequence[fx.Node]) -> str:
    pairs = zip(one, other, strict=False)
    return _named(next((node for node, twin in pairs if node.target != twin.target), one[-1]))


def _are_twins(node: fx.Node, twin: fx.Node, twins: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether two nodes call the same operator on corresponding operands.

    `twins` has the pairs of earlier nodes.
    """
    if (node.op, node.target) != (twin.op, twin.target):
        return False
    sides = [pytree.tree_flatten((item.args, item.kwargs)) for item in (node, twin)]
    if sides[0][1] != sides[1][1]:
        return False
    return all(
        twins.get(one) is other if isinstance(one, fx.Node) else not isinstance(other, fx.Node)
        for one, other in zip(sides[0][0], sides[1][0], strict=True)
    )


def _constant_of(value: torch.Tensor, other: torch.Tensor) -> PaddedValue:
    if value.shape != other.shape or not torch.equal(value, other):
        raise ReachedError("is a tensor that depends on the length")
    found = range_of_values(value)
    is_finite = bool(torch.isfinite(value).all())
    return PaddedValue.of(
        [((size, size),) for size in value.shape], lambda _: PaddedContent(found.low, found.high, is_finite)
    )


def _named(node: fx.Node) -> str:
    source = node.meta.get("source")
    return f"{node.target} at {source}" if source else str(node.target)
