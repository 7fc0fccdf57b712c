"""Replace the eight calls of a written-out tanh gelu by one operator, and the ten calls of its gradient by another.

Before → after: `mul(mul(z, 0.5), add(tanh(mul(add(z, mul(pow(z, 3), 0.044715)), sqrt(2/pi))), 1))` → `gelu(z,
approximate="tanh")`. The gradient's ten calls become `gelu_backward(grad, z, approximate="tanh")`. A step then saves
only z for the backward, and intermediate values do not go through memory. Calls are compared by value number
(`number_values`), so repeated views of z do not matter. To verify the pass,
`passes.verification.verify_preparation` writes both operators out again.

The pass applies to types of 32 bits and more. In narrower types the written-out calls round after each step, so the
result would differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.proxy import GraphAppendingTracer

from autoshard.ir.program import Program
from autoshard.kernels.tanh_gelu import written_out, written_out_backward
from passes.preparation.number_values import Key, Numbering, call_key, number_graph, operands_of
from passes.preparation.rewriting import copy_program, insert_call, replace_slot_node

_aten = torch.ops.aten
_TANH = {"approximate": "tanh"}
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class JoinGelu:
    """Replace written-out tanh gelus and their gradients by operators."""

    def __call__(self, program: Program) -> Program:
        """Return a copy of the program without written-out gelus.

        If the program has no written-out gelu, the program itself is returned.
        """
        if not any(map(_is_cube, program.graph.nodes)):
            return program
        joining = _Joining(copy_program(program))
        inputs = sorted(
            {joining.numbering.numbers[node.all_input_nodes[0]] for node in joining.nodes if _is_cube(node)}
        )
        for number in inputs:
            joining.join_gradients(number)
        joining.program.graph.eliminate_dead_code()
        for number in inputs:
            joining.join(number)
        joining.program.graph.eliminate_dead_code()
        joining.program.graph_module.recompile()
        return joining.program


def number_written_out(node: fx.Node, numbering: Numbering) -> bool:
    """Number a tanh gelu or its gradient like its written-out calls, for the proof of this pass.

    Return whether `node` is a tanh gelu or its gradient. `node` gets the value number that the result of its
    written-out calls has or would have. Other calls get no number.
    """
    if node.target not in (_aten.gelu.default, _aten.gelu_backward.default) or node.kwargs != _TANH:
        return False
    form = _form(is_backward=node.target is _aten.gelu_backward.default)
    operands = [numbering.number_for(operand, node) for operand in node.all_input_nodes]
    numbers = dict(zip(form.find_nodes(op="placeholder"), operands, strict=True))
    for call in _calls(form):
        numbers[call] = numbering.add(node, _key(call, numbers))
    return True


@dataclass(slots=True)
class _Joining:
    """A program in which written-out gelus are replaced one after the other.

    `numbering` has the value numbers of the program's original nodes.
    """

    program: Program
    numbering: Numbering = field(init=False)

    def __post_init__(self) -> None:
        self.numbering = number_graph(self.program.graph_module)

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.program.graph.nodes)

    def join_gradients(self, number: int) -> None:
        """Replace the written-out gradients of gelu(z) by `gelu_backward`. `number` is the value number of z."""
        found = self._find(_form(is_backward=False), (number,))
        readers = {user for inner in found for user in self.numbering.users[inner]}
        read = {operand for user in readers for operand in operands_of(self.numbering.key_of(user))}
        for gradient in sorted(read.difference(found)):
            if made := self._find(_form(is_backward=True), (gradient, number)):
                self._replace(made[-1], _aten.gelu_backward.default, (gradient, number))

    def join(self, number: int) -> None:
        """Replace the written-out gelu(z) by `gelu`, unless other calls read its intermediate values.

        `number` is the value number of z.
        """
        if found := self._find(_form(is_backward=False), (number,)):
            within = {node for node in self.nodes if self.numbering.numbers.get(node) in found[:-1]}
            whole = within | {node for node in self.nodes if self.numbering.numbers.get(node) == found[-1]}
            if all(user in whole for node in within for user in node.users):
                self._replace(found[-1], _aten.gelu.default, (number,))

    def _find(self, form: fx.Graph, operands: tuple[int, ...]) -> list[int]:
        """Return the value numbers of the calls of `form` in the program, in order, or [] if the program lacks a call.

        `operands` has the value numbers of the inputs of the form.
        """
        numbers: dict[fx.Node, int] = dict(zip(form.find_nodes(op="placeholder"), operands, strict=True))
        for call in _calls(form):
            if (number := self.numbering.keys.get(_key(call, numbers))) is None:
                return []
            numbers[call] = number
        return [numbers[call] for call in _calls(form)]

    def _replace(self, result: int, operator: OpOverload, operands: tuple[int, ...]) -> None:
        """Replace each node with the value number `result` by a call on the values with the numbers `operands`.

        Nodes of types narrower than 32 bits stay, and nodes whose shape or type differs from an operand's.
        """
        for node in [node for node in self.nodes if self.numbering.numbers.get(node) == result]:
            args = tuple(self._latest(operand, node) for operand in operands)
            if node.meta["val"].dtype not in _WIDE or len({_form_of(value) for value in (node, *args)}) > 1:
                continue
            with self.program.graph.inserting_before(node):
                made = insert_call(self.program.graph, operator, args, like=node, kwargs=_TANH)
            node.replace_all_uses_with(made)
            self.program = replace_slot_node(self.program, node.name, made.name)

    def _latest(self, number: int, reader: fx.Node) -> fx.Node:
        return max(node for node in self.nodes if self.numbering.numbers.get(node) == number and node < reader)


@cache
def _form(*, is_backward: bool) -> fx.Graph:
    """Return the graph of the written-out gelu, with input z, or of its gradient, with inputs grad_out and z."""
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    names = ("grad_out", "z") if is_backward else ("z",)
    operands = [fx.Proxy(graph.placeholder(name), tracer) for name in names]
    result = written_out_backward(*operands) if is_backward else written_out(*operands)[0]
    graph.output(result.node)
    return graph


def _calls(form: fx.Graph) -> list[fx.Node]:
    return [node for node in form.nodes if node.op == "call_function"]


def _key(call: fx.Node, numbers: Mapping[fx.Node, int]) -> Key:
    return call_key(call.op, call.target, call.args, call.kwargs, numbers.__getitem__)


def _is_cube(node: fx.Node) -> bool:
    return node.target is _aten.pow.Tensor_Scalar and node.args[1:] == (3.0,)


def _form_of(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return (value.dtype, *value.shape)
