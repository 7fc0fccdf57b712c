"""Appends the update of an optimizer to a traced program: clipping, new parameters, new state.

Before → after, with inputs on the left of each line and results on the right:

    parameters, inputs ↦ outputs, gradients
    parameters, inputs, state, hyper-parameters ↦ outputs, norm of the gradients, updated parameters, updated state

1. If the update clips gradients or returns their norm, the norm over all gradients is a result. With a limit on the
   norm, gradients are scaled by min(1, limit / (norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`.
2. If the loss is scaled, an input has the inverse of the scale (`InputKind.UNSCALE`). Norm and gradients are multiplied
   by this inverse before they are used.
3. Each parameter with a gradient and a group goes through the update operator of its group
   (`autoshard.kernels.optimizers`). Muon's matrices are orthogonalised before that. Matrices of equal shape within a
   block become one batch, so that ranks can share them.
4. Gradients are no results any more. Their computation stays, because the update needs it.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

import autoshard.kernels  # noqa: F401  (defines the operators)
from autoshard.ir.program import InputKind, InputSlot, OutputKind, OutputSlot, Program
from autoshard.ir.update import Update, UpdateRule, hyper_slot, state_slot

_aten = torch.ops.aten
_autoshard = torch.ops.autoshard
_EPSILON = 1e-6
"""The number that `torch.nn.utils.clip_grad_norm_` adds to the norm before it divides."""

_DROPPED = (OutputKind.GRADIENT, OutputKind.INPUT_GRADIENT)


def append_update(program: Program, update: Update, *, of_stage: bool = False) -> Program:
    """Return the program of the whole training step: `program`, then the optimizer's update.

    The graph of `program` is extended in place.

    Args:
        program: a joint program with gradients, as traced.
        update: the optimizer's update.
        of_stage: whether the program is a stage of a pipeline. In place of the norm, a stage returns the sum of squares
            of its own gradients. With clipping, it takes the sum over all stages (`InputKind.SQUARES`).
    """
    return _Appending(program, update, of_stage).run()


class _Updated(NamedTuple):
    """A parameter that is updated, and the inputs of its update."""

    name: str
    rule: UpdateRule
    parameter: fx.Node
    gradient: fx.Node
    state: list[fx.Node]
    hyper: fx.Node


@dataclass(slots=True)
class _Appending:
    program: Program
    update: Update
    of_stage: bool = False
    inputs: list[InputSlot] = field(init=False)
    values: dict[object, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = list(self.program.inputs)

    def run(self) -> Program:
        graph = self.program.graph
        nodes = self.program.nodes_by_name()
        output = graph.output_node()
        gradients = {slot.name: nodes[slot.node] for slot in self.program.outputs_of(OutputKind.GRADIENT)}
        kept = [slot for slot in self.program.outputs if slot.kind not in _DROPPED]
        results = [nodes[slot.node] for slot in kept]
        with graph.inserting_before(output):
            total, scale = self._squares(gradients), None
            if total is not None:
                inverse = self._inverse(total) if self.update.scales_loss else None
                total = self._unscaled(total, inverse)
                norm = None if self.of_stage else self._call(_aten.sqrt.default, total, name="norm")
                kept.append(_result_of_norm(total, norm))
                results.append(norm or total)
                scale = self._scale(norm, total, inverse)
            for slot, node in self._updates(gradients, scale):
                kept.append(slot)
                results.append(node)
        output.args = (tuple(results),)
        graph.lint()
        self.program.graph_module.recompile()
        return replace(self.program, inputs=tuple(self.inputs), outputs=tuple(kept))

    def _squares(self, gradients: dict[str, fx.Node]) -> fx.Node | None:
        """Return the sum of squares of all gradients, a scalar; None if the update needs no norm."""
        if not (self.update.has_norm and gradients):
            return None
        squares = [self._call(_autoshard.sum_of_squares.default, node, of=name) for name, node in gradients.items()]
        return functools.reduce(self._sum, squares)

    def _sum(self, one: fx.Node, two: fx.Node) -> fx.Node:
        return self._call(_aten.add.Tensor, one, two, of=_module(two), name="sum_of_norm")

    def _inverse(self, total: fx.Node) -> fx.Node:
        """Add an input for the inverse of the loss's scale, a float32 scalar, and return its node.

        The scalar is on the device of `total`.
        """
        value: Tensor = total.meta["val"]
        return self._placeholder(InputKind.UNSCALE, "unscale:all", value.new_empty((), dtype=torch.float32))

    def _unscaled(self, squares: fx.Node, inverse: fx.Node | None) -> fx.Node:
        """Return the sum of squares of the gradients without the loss's scale: `squares` times `inverse`, twice.

        Two products do not underflow, but the square of `inverse` might. If `inverse` is None, return `squares`.
        """
        if inverse is None:
            return squares
        return self._call(_aten.mul.Tensor, self._call(_aten.mul.Tensor, squares, inverse), inverse)

    def _scale(self, norm: fx.Node | None, own: fx.Node, inverse: fx.Node | None) -> fx.Node | None:
        """Return the factor that clips all gradients and removes the scale of the loss, a scalar; None if it is 1.

        Args:
            norm: the norm of all gradients. None in a pipeline stage, which gets an input for the sum of squares over
                all stages here, and computes the norm from it.
            own: the sum of squares of the gradients of this program.
            inverse: the inverse of the scale of the loss; None without scaling.
        """
        limit = self.update.max_grad_norm
        if limit is None:
            return inverse
        if norm is None:
            total = self._placeholder(InputKind.SQUARES, "squares:all", own.meta["val"])
            norm = self._call(_aten.sqrt.default, total, name="norm")
        ratio = self._call(_aten.mul.Tensor, self._call(_aten.reciprocal.default, self._more(norm)), limit)
        clipped = self._call(_aten.clamp.default, ratio, None, 1.0)
        return clipped if inverse is None else self._call(_aten.mul.Tensor, clipped, inverse)

    def _more(self, norm: fx.Node) -> fx.Node:
        return self._call(_aten.add.Tensor, norm, _EPSILON)

    def _updates(self, gradients: dict[str, fx.Node], scale: fx.Node | None) -> Iterator[tuple[OutputSlot, fx.Node]]:
        """Emit the update of each parameter, in the model's order.

        Yield slot and node of each updated parameter and state.
        """
        updated = list(self._updated(gradients))
        orthogonals = self._orthogonals(updated, scale)
        for item in updated:
            operands = [*orthogonals.get(item.name, ()), scale, item.hyper]
            results = self._update(item, [item.parameter, item.gradient, *item.state, *operands])
            yield OutputSlot(results[0].name, OutputKind.PARAMETER_UPDATE, item.name), results[0]
            for name, node in zip(item.rule.state, results[1:], strict=True):
                yield OutputSlot(node.name, OutputKind.STATE_UPDATE, state_slot(name, item.name)), node

    def _updated(self, gradients: dict[str, fx.Node]) -> Iterator[_Updated]:
        """Yield the parameters with a gradient and a group, in the model's order, with the inputs of their updates.

        Placeholders for state and hyper-parameters are added to the program.
        """
        groups, hypers, nodes = self.update.group_of(), dict[int, fx.Node](), self.program.nodes_by_name()
        for slot in self.program.inputs_of(InputKind.PARAMETER):
            number = groups.get(slot.name)
            if slot.name not in gradients or number is None:
                continue
            parameter = nodes[slot.node]
            rule = self.update.groups[number].rule
            if number not in hypers:
                hypers[number] = self._hyper(number, rule, parameter)
            state = [self._state(name, slot.name, parameter) for name in rule.state]
            yield _Updated(slot.name, rule, parameter, gradients[slot.name], state, hypers[number])

    def _orthogonals(self, updated: Sequence[_Updated], scale: fx.Node | None) -> dict[str, list[fx.Node]]:
        """Emit the orthogonalisations of Muon; return the orthogonal matrix of each parameter that needs one, by name.

        Matrices of one shape in one block are a batch. A batch does not cross blocks, because equal blocks are planned
        once.
        """
        batches: dict[object, list[_Updated]] = {}
        for item in updated:
            if item.rule.orthogonal is not None:
                key = item.rule.orthogonal, _block(item.name), tuple(item.gradient.meta["val"].shape)
                batches.setdefault(key, []).append(item)
        found: dict[str, list[fx.Node]] = {}
        for members in batches.values():
            rule = members[0].rule.orthogonal
            assert rule is not None, "members of batches are orthogonalised"
            directions = [
                self._call(
                    _autoshard.muon_direction.default,
                    *(item.gradient, item.state[0], scale, item.hyper, rule.nesterov),
                    of=item.name,
                )
                for item in members
            ]
            of = f"{_common_module([item.name for item in members])}."
            several = len(directions) > 1
            batch = self._call(_aten.stack.default, directions, of=of) if several else directions[0]
            options = [list(rule.coefficients), rule.steps, rule.eps]
            whole = self._call(_autoshard.orthogonalise.default, batch, *options, of=of)
            parts = self._call(_aten.unbind.int, whole, of=of) if several else None
            for index, item in enumerate(members):
                found[item.name] = [whole if parts is None else self._call(operator.getitem, parts, index, of=of)]
        return found

    def _update(self, item: _Updated, operands: Sequence[fx.Node | None]) -> list[fx.Node]:
        """Emit the update of a parameter; return the nodes of the updated parameter and of its updated state."""
        rule = item.rule
        ratio = () if rule.orthogonal is None else (rule.orthogonal.ratio(*item.parameter.meta["val"].shape),)
        call = self._call(getattr(_autoshard, rule.operator).default, *operands, *rule.flags, *ratio, of=item.name)
        if not rule.state:
            return [call]
        return [self._call(operator.getitem, call, index, of=item.name) for index in range(1 + len(rule.state))]

    def _hyper(self, number: int, rule: UpdateRule, parameter: fx.Node) -> fx.Node:
        mode = parameter.meta["val"].fake_mode
        with mode:
            value = torch.empty(len(rule.hyper), dtype=torch.float64, device="cpu")
        return self._placeholder(InputKind.HYPER, hyper_slot(number), value)

    def _state(self, state: str, name: str, parameter: fx.Node) -> fx.Node:
        value: Tensor = parameter.meta["val"]
        key = ("state", _form(value))
        if key not in self.values:
            self.values[key] = value.new_empty(value.shape)
        return self._placeholder(InputKind.STATE, state_slot(state, name), self.values[key])

    def _placeholder(self, kind: InputKind, slot_name: str, value: Tensor) -> fx.Node:
        graph, name = self.program.graph, re.sub(r"\W", "_", slot_name)
        with graph.inserting_after(self.values.get("last") or self.program.nodes_by_name()[self.inputs[-1].node]):
            node = graph.create_node("placeholder", name, (), {}, name=name)
        node.target = node.name
        node.meta = {"val": value, "phase": "update", "module": "", "source": ""}
        self.inputs.append(InputSlot(node.name, kind, slot_name))
        self.values["last"] = node
        return node

    def _call(self, target: Any, *args: Any, of: str = "", name: str | None = None) -> fx.Node:
        """Emit a call of the update, attributed to the module of the parameter `of`.

        With a `name` of its own, the call does not change the names of other calls of the same operator.
        """
        node = self.program.graph.create_node("call_function", target, args, {}, name=name)
        module = of.rpartition(".")[0]
        node.meta = {"phase": "update", "module": module, "source": f"{self.update.optimizer}.step"}
        node.meta["val"] = self._value(target, args)
        return node

    def _value(self, target: Any, args: tuple[Any, ...]) -> Any:
        """Return the fake result of a call.

        Calls of one operator with equal numbers, on operands of equal shape, strides, dtype and device, share one
        result.
        """
        values = fx.map_arg(args, lambda node: node.meta["val"])
        if target is operator.getitem:
            return values[0][values[1]]
        key = (target, tuple(map(_key, values)))
        if key not in self.values:
            self.values[key] = target(*values)
        return self.values[key]


def _result_of_norm(total: fx.Node, norm: fx.Node | None) -> OutputSlot:
    """Return the slot of the norm; without a norm, the slot of the sum of squares `total` of a stage."""
    if norm is None:
        return OutputSlot(total.name, OutputKind.SQUARES, "squares:own")
    return OutputSlot(norm.name, OutputKind.NORM, "norm:all")


def _key(value: Any) -> object:
    """Return a hashable value that is equal for operands with equal fake results."""
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return _form(value) if isinstance(value, Tensor) else value


def _block(name: str) -> tuple[str, ...]:
    """Return the path of a parameter's outermost numbered module: ("layers", "3") for "layers.3.mlp.weight"."""
    parts = name.split(".")
    end = next((index + 1 for index, part in enumerate(parts) if part.isdigit()), 0)
    return tuple(parts[:end])


def _common_module(names: Sequence[str]) -> str:
    """Return the path of the innermost module that contains all parameters of these names."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels))


def _form(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _module(node: fx.Node) -> str:
    """Return the path of a node's module followed by a dot, which `_call` takes as the name `of` a parameter."""
    return f"{node.meta['module']}."
