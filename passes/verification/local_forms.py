"""Local forms of traced calls and reshards: the sequences of calls to look up in a lowered program.

A sharding rule and a reshard step are each defined by the calls that they emit into a graph
(`autoshard.rules.emit_local`, `autoshard.ir.emit`). The emitted calls depend only on the operator, its literals, the
shapes and dtypes of its operands, and the strategy. So each definition is emitted once, and stored as a `LocalForm`.
Equal blocks of a model are proven with the same forms.

A form numbers its operands first, and then its calls. Such a number is a *place*. The calls of a form name their
operands by places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch.fx.proxy import Proxy, TracerBase

from autoshard.ir.emit import emit_reshard
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import tensor_values
from autoshard.ir.reshard import ReshardKind, ReshardStep
from autoshard.ir.spec import PartitionSpec, Reduction
from autoshard.ir.spec_graph import Move, moves_from, state_of
from autoshard.rules.emit_local import emit_local
from autoshard.rules.enumeration import Strategy, replicated
from autoshard.rules.notation import BoundRule
from autoshard.rules.ranges import Ranges, facts_of
from passes.preparation.number_values import Key, Numbering, call_key, draws_numbers, operands_of
from passes.strategies.enumerate_strategies import rule_of
from passes.strategies.find_strategies import find_strategies

Numbers = frozenset[int]
"""Value numbers of local values, any of which may serve as the same operand."""

Held = tuple[frozenset[PartitionSpec], ...]
"""For each operand of a traced call, the specs under which local values hold it."""

_aten = torch.ops.aten

_OPENINGS = {
    ReshardKind.ALL_GATHER: {_aten.contiguous.default},
    ReshardKind.ALL_REDUCE: {_aten.contiguous.default},
    ReshardKind.ALL_TO_ALL: {_aten.contiguous.default, _aten.constant_pad_nd.default},
    ReshardKind.MAKE_PARTIAL: {_aten.where.ScalarOther},
    ReshardKind.REDUCE_SCATTER: {_aten.contiguous.default, _aten.constant_pad_nd.default},
    ReshardKind.SLICE: {_aten.narrow.default, _aten.constant_pad_nd.default},
}
"""Operators of the first call of a reshard step, by the step's kind.

A step is looked up only if one of these operators reads the local value.
"""


@dataclass(frozen=True, slots=True)
class FormCall:
    """One call of a local form. A place is the index of an operand or call of the form, operands first.

    Args:
        key: the call's operator and arguments (`call_key`), with places as operands.
        places: the places that the call reads.
        is_drawn: whether the call draws random numbers. Equal calls that draw are told apart by their order.
    """

    key: Key
    places: tuple[int, ...]
    is_drawn: bool

    def find(self, local: Numbering, values: Sequence[Numbers], draw: int = 0) -> Numbers:
        """Return the value numbers of the program's calls that match this call.

        Args:
            local: the value numbers of the program.
            values: for each place, the numbers of the program's values at this place, which the call may read.
            draw: for a call that draws random numbers, the number of equal calls before it.
        """
        return local.find((*self.key, draw) if self.is_drawn else self.key, self.places, values)


@dataclass(frozen=True, slots=True)
class LocalForm:
    """The calls of a reshard step or strategy on a rank.

    An entry of `results` is the place of the result, its index among the operands and then the calls of the form. If a
    call returns a tuple, the entry is the call that selects the result from the tuple.
    """

    calls: Sequence[FormCall]
    results: Sequence[int | FormCall]

    def find(self, local: Numbering, held: Sequence[Numbers], draw: int = 0) -> list[Numbers] | None:
        """Look up the calls of the form in the program.

        Return the value numbers at each place; None if a call is missing.

        Args:
            local: the value numbers of the program.
            held: for each operand, the numbers of the program's values that may be this operand.
            draw: for a form that draws random numbers, the number of equal calls before it.
        """
        values = list(held)
        for call in self.calls:
            found = call.find(local, values, draw)
            if not found:
                return None
            values.append(found)
        return values

    def result(self, index: int, local: Numbering, values: Sequence[Numbers]) -> Numbers:
        """Return the value numbers of the program's values that are result number `index` of the form.

        The result is empty if no call of the program selects it from a tuple. `values` is the result of `find`.
        """
        place = self.results[index]
        return values[place] if isinstance(place, int) else place.find(local, values)


@dataclass(frozen=True, slots=True)
class _ProxyMeaning:
    """Takes the place of the fx node of a proxy of `_Recording`; `index` is the proxy's place.

    Emitters compute fake values from a node's `args` and `meta`. This object has neither, so they compute no fake
    values.
    """

    index: int
    args: tuple[None, ...] = (None,)
    meta: Mapping[str, Any] = field(default_factory=dict)


class _Recording(TracerBase):
    """Records the calls of a reshard step or strategy as `FormCall`s, instead of adding nodes to a graph."""

    def __init__(self, operands: int) -> None:
        super().__init__()
        self.operands = [self._proxy(index) for index in range(operands)]
        self.calls: list[FormCall] = []

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> Proxy:
        key = call_key(kind, target, args, kwargs, place_of)
        self.calls.append(FormCall(key, tuple(operands_of(key)), draws_numbers(target)))
        return self._proxy(len(self.operands) + len(self.calls) - 1)

    def _proxy(self, index: int) -> Proxy:
        return Proxy(cast(fx.Node, _ProxyMeaning(index)), self)


def place_of(value: Proxy | fx.Node) -> int:
    """Return the place that a proxy of a recording, or the node of this proxy, stands for."""
    found = value.node if isinstance(value, Proxy) else value
    assert isinstance(found, _ProxyMeaning), "only proxies of a recording are passed to definitions"
    return found.index


@dataclass(frozen=True, slots=True)
class StrategyForm:
    """A strategy of a traced call: specs of operands and results, without axes of size one, and its local calls."""

    inputs: Sequence[PartitionSpec]
    outputs: Sequence[PartitionSpec]
    form: LocalForm


@dataclass(frozen=True, slots=True)
class CallForms:
    """The strategies of a traced call, with the local forms that `emit_local` emits. Equal calls share one object.

    `rule` is the bound rule of the calls; None if the operator has no rule.
    """

    node: fx.Node
    rule: BoundRule | None
    mesh: Mesh
    _by_held: dict[Held, Sequence[StrategyForm]] = field(default_factory=dict)

    def of_held(self, held: Held) -> Sequence[StrategyForm]:
        """Return the strategies that need all operands in specs under which they are held, with their local forms.

        `held` has the specs under which each operand is held. The results are cached by `held`.
        """
        if held not in self._by_held:
            self._by_held[held] = list(self._find(held))
        return self._by_held[held]

    def _find(self, held: Held) -> Iterator[StrategyForm]:
        for strategy in self._strategies(held):
            inputs = [without_single_axes(spec, self.mesh) for spec in strategy.inputs]
            if all(spec in specs for spec, specs in zip(inputs, held, strict=True)):
                outputs = [without_single_axes(spec, self.mesh) for spec in strategy.outputs]
                yield StrategyForm(inputs, outputs, self._form(strategy))

    def _strategies(self, held: Held) -> Iterator[Strategy]:
        if self.rule is not None:
            return find_strategies(self.rule, self.mesh, held)
        results = sum(value is not None for value in tensor_values(self.node))
        return iter([replicated(len(held), results, self.mesh)])

    def _form(self, strategy: Strategy) -> LocalForm:
        node, recording = self.node, _Recording(len(strategy.inputs))
        operands: Iterator[Any] = iter(recording.operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(operands))
        values = tensor_values(node)
        made = emit_local(node.target, args, kwargs, self.rule, strategy, self.mesh, tracer=recording)
        calls = tuple(recording.calls)
        if isinstance(node.meta["val"], torch.Tensor):
            return LocalForm(calls, [place_of(made)])
        places = [place_of(made[index]) for index, value in enumerate(values) if value is not None]
        known = len(strategy.inputs) + len(calls)
        results = [place if place < known else recording.calls[place - known + len(calls)] for place in places]
        return LocalForm(calls, results)


@dataclass(frozen=True, slots=True)
class LocalForms:
    """A cache of the local forms of calls and reshards on a mesh, which several programs may share."""

    mesh: Mesh
    _calls: dict[Key, CallForms] = field(default_factory=dict)
    _moves: dict[Any, Mapping[ReshardKind, Sequence[tuple[Move, PartitionSpec]]]] = field(default_factory=dict)
    _steps: dict[Any, Sequence[LocalForm]] = field(default_factory=dict)

    def of_call(self, node: fx.Node, ranges: Ranges) -> CallForms:
        """Return the strategies of a traced call with their local forms.

        Calls with equal operators, literals, and shapes, strides and dtypes of operands share one object. The facts of
        `ranges` about the operands (finite, not zero) must be equal too.
        """
        key = (*call_key(node.op, node.target, node.args, node.kwargs, _shape_and_type), facts_of(node, ranges))
        if key not in self._calls:
            rule = rule_of(node, ranges)
            self._calls[key] = CallForms(node, rule, self.mesh)
        return self._calls[key]

    def of_reshards(
        self, value: torch.Tensor, spec: PartitionSpec, readers: Collection[Any]
    ) -> Iterator[tuple[PartitionSpec, LocalForm]]:
        """Yield (new spec, local calls) of each reshard step from `spec`.

        Args:
            value: the resharded value, a fake tensor with global shape.
            readers: operators that read the local values of `value` in the program. A step is left out if it begins
                with another operator.
        """
        is_empty = 0 in value.shape
        if not is_empty and all(openings.isdisjoint(readers) for openings in _OPENINGS.values()):
            return
        for kind, moves in self._moves_from(value, spec).items():
            if is_empty or not _OPENINGS[kind].isdisjoint(readers):
                for move, after in moves:
                    for form in self._forms_of_step(value, spec, move, after):
                        yield after, form

    def _moves_from(
        self, value: torch.Tensor, spec: PartitionSpec
    ) -> Mapping[ReshardKind, Sequence[tuple[Move, PartitionSpec]]]:
        key = (spec, value.dim(), value.is_complex())
        if key not in self._moves:
            reductions = (Reduction.SUM,) if value.is_complex() else tuple(Reduction)
            found: defaultdict[ReshardKind, list[tuple[Move, PartitionSpec]]] = defaultdict(list)
            for move, (stacks, partial) in moves_from(state_of(spec, value.dim()), self.mesh, reductions):
                if self.mesh.axis_size(move.axis) > 1:
                    found[move.kind].append((move, PartitionSpec(*stacks, partial=dict(partial))))
            self._moves[key] = found
        return self._moves[key]

    def _forms_of_step(
        self, value: torch.Tensor, spec: PartitionSpec, move: Move, after: PartitionSpec
    ) -> Sequence[LocalForm]:
        """Return the local forms of a reshard step. A slice has two forms: alone, and in front of an all-gather."""
        key = (value.shape, value.dtype, spec, move)
        if key not in self._steps:
            step = self._step(move, spec, after)
            forms = [self._form_of_first(value, [step])]
            if step.kind is ReshardKind.SLICE:
                back = Move(ReshardKind.ALL_GATHER, step.axis, dim=step.to_dim)
                forms.append(self._form_of_first(value, [step, self._step(back, after, spec)]))
            self._steps[key] = forms
        return self._steps[key]

    def _step(self, move: Move, source: PartitionSpec, target: PartitionSpec) -> ReshardStep:
        size = self.mesh.axis_size(move.axis)
        return ReshardStep(move.kind, move.axis, size, move.dim, move.to_dim, move.reduction, source, target, 0, 0)

    def _form_of_first(self, value: torch.Tensor, steps: Sequence[ReshardStep]) -> LocalForm:
        """Return the local form of the first of `steps`: the calls that a reshard by all these steps emits for it."""
        recording = _Recording(1)
        reached: list[int] = []

        def on_node(node: fx.Node, spec: PartitionSpec | None) -> None:
            if spec is not None:
                reached.append(place_of(node))

        emit_reshard(recording.operands[0], steps, tuple(value.shape), self.mesh, dtype=value.dtype, on_node=on_node)
        return LocalForm(tuple(recording.calls[: reached[0]]), reached[:1])


def without_single_axes(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Return a spec without the mesh axes of size one."""
    if all(size > 1 for _, size in mesh.axes):
        return spec
    real = {axis for axis, size in mesh.axes if size > 1}
    dims = [tuple(axis for axis in dim if axis in real) for dim in spec.dims]
    return PartitionSpec(*dims, partial={axis: reduction for axis, reduction in spec.partial if axis in real})


def _shape_and_type(operand: fx.Node) -> Any:
    value = operand.meta["val"]
    return value.shape, value.stride(), value.dtype
