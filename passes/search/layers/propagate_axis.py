"""Propagate one mesh axis through a program, as an expert's recipe would: specs flow from fixed values to the others.

The axes of a recipe are independent: each splits, or leaves alone, every value by itself. So each axis is propagated
alone, on a mesh of its own, over the strategies that the rules admit, in program order:

1. Inputs are as the axis asks (split along the sequence, or whole). Parameters are free until their first reader.
2. A call takes the strategy that moves the fewest bytes, given how its operands lie. Parameters do not move. Moves that
   a policy forbids cost infinitely much; among equal strategies the one that splits more wins.
3. A partial value is reduced at its first use but by views and sums, and stays so. A gathered one is not kept.
4. An activation that is split because of a parameter may have to be gathered in the forward, for a norm or a router's
   softmax. Then splitting that parameter was a mistake: it stays whole, and 1 starts again.

Column and row splits of Megatron-LM (Shoeybi et al. 2019, section 3) follow. A product's weight is free, so its result
is split without a move. The next weight is split along the contracted dim, and its partial result is reduced. With a
sequence layout given, partial results are scattered along the sequence instead (Korthikanti et al. 2022, section
4.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import fx

import autoshard.kernels as kernels
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputKind, Program
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.attention import is_ring
from autoshard.rules.enumeration import Strategy
from passes.strategies.enumerate_strategies import EnumerateStrategies, SearchSpace, Site

AXIS = "axis"
MESH = Mesh({AXIS: 2})
"""The axis is propagated with two ranks; the split dims do not depend on the number of ranks."""

WHOLE = PartitionSpec()

LAYERS = frozenset({kernels.experts, kernels.experts_backward})
"""Layers of experts that are one operator, forward and backward."""
_Key = tuple[str, int]


class MoveKind(Enum):
    """How a value changes its layout over the axis."""

    GATHER = "gather"
    REDUCE = "reduce"
    SCATTER = "scatter"
    EXCHANGE = "exchange"


@dataclass(frozen=True, slots=True)
class AxisMove:
    """A collective over the axis: the value (site, result) changes its spec before call `reader`."""

    value: _Key
    reader: str
    kind: MoveKind


@dataclass(frozen=True, slots=True)
class AxisLayout:
    """How one axis splits a program.

    Args:
        operands, results: specs of each call's operands and results (a placeholder has one result).
        moves: the collectives, in program order.
    """

    operands: Mapping[str, tuple[PartitionSpec, ...]]
    results: Mapping[str, tuple[PartitionSpec, ...]]
    moves: tuple[AxisMove, ...]

    def dim_of(self, key: _Key) -> int | None:
        """The dim of a value that the axis splits, or None."""
        return self.results[key[0]][key[1]].dim_of(AXIS)


@dataclass(frozen=True, slots=True)
class Policy:
    """The task of an axis.

    Args:
        inputs: placeholder to the spec of an input; absent ones are whole.
        splits_parameters: whether free parameters may be split.
        parameters: placeholder to its spec, fixed.
        sequence: the layout of the context axis, along whose dims partial results are scattered and whole ones sliced;
            None: activations outside of split products stay whole.
        exchanges: moves between whole and split activations are all-to-alls: "whole" means each rank's own tokens.
        routed: calls whose strategy is given, see `passes.search.layers.route_tokens`.
    """

    inputs: Mapping[str, PartitionSpec] = field(default_factory=dict)
    splits_parameters: bool = False
    parameters: Mapping[str, PartitionSpec] = field(default_factory=dict)
    sequence: AxisLayout | None = None
    exchanges: bool = False
    routed: Mapping[str, Strategy] = field(default_factory=dict)


def axis_space(program: Program) -> SearchSpace:
    """The strategies of every call of a canonical program on one axis; no rings and exchanges inside of a call.

    These have no price here. The axis that shares out experts is given its exchanges (`route_tokens.shared_layers`).
    """
    space = EnumerateStrategies(MESH)(program)
    return replace(space, sites={name: _without_exchanges(site) for name, site in space.sites.items()})


def _without_exchanges(site: Site) -> Site:
    target = None if site.node is None else site.node.target
    return replace(site, strategies=tuple(item for item in site.strategies if not _exchanges(target, item.inputs)))


def _exchanges(target: object, inputs: Sequence[PartitionSpec]) -> bool:
    """Whether a call exchanges tokens or keys with other ranks while it runs."""
    if is_ring(target, inputs):
        return True
    return target in LAYERS and all(spec.dim_of(AXIS) == 0 for spec in (inputs[0], inputs[-1]))


def propagate_axis(space: SearchSpace, policy: Policy) -> AxisLayout:
    """Return the layout of a policy."""
    whole: set[str] = set()
    while True:
        attempt = _Propagation(space, policy, frozenset(whole))
        try:
            attempt.run()
        except _SplitInVainError as error:
            whole |= error.parameters
        else:
            return AxisLayout(attempt.operands, attempt.results, tuple(attempt.moves))


class _SplitInVainError(Exception):
    """Splitting some parameters was a mistake."""

    def __init__(self, parameters: frozenset[str]) -> None:
        super().__init__(*parameters)
        self.parameters = parameters


@dataclass
class _Propagation:
    """One walk through the program; `whole` are the parameters that must not be split."""

    space: SearchSpace
    policy: Policy
    whole: frozenset[str]
    operands: dict[str, tuple[PartitionSpec, ...]] = field(default_factory=dict)
    results: dict[str, tuple[PartitionSpec, ...]] = field(default_factory=dict)
    moves: list[AxisMove] = field(default_factory=list)
    state: dict[_Key, PartitionSpec | None] = field(default_factory=dict)
    origins: dict[_Key, frozenset[str]] = field(default_factory=dict)
    viewed: dict[_Key, _Key] = field(default_factory=dict)
    base: dict[_Key, _Key] = field(default_factory=dict)
    reduced: dict[_Key, PartitionSpec] = field(default_factory=dict)
    gathered: set[tuple[_Key, str]] = field(default_factory=set)
    gradients: dict[_Key, str] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()

    def run(self) -> None:
        """Walk.

        Raises:
            _SplitInVainError: for parameters that should not have been split.
        """
        program = self.space.program
        self.parameters = frozenset(slot.node for slot in program.inputs_of(InputKind.PARAMETER))
        self.gradients = _gradient_owners(self.space, self.parameters)
        read: dict[str, list[_Key]] = {}
        for link in self.space.links:
            if link.operand >= 0:
                read.setdefault(link.head, []).append((link.tail, link.result))
        for name, site in self.space.sites.items():
            if site.node is not None and site.node.op == "call_function":
                self._call(site, read.get(name, []))
            elif site.node is not None:
                self._place(name)

    def _place(self, name: str) -> None:
        """Place a placeholder: a parameter is free unless the policy fixes it, an input has the policy's spec."""
        key = (name, 0)
        self.base[key] = key
        if name in self.parameters:
            self.state[key] = self.policy.parameters.get(name)
            if self.state[key] is None and (name in self.whole or not self.policy.splits_parameters):
                self.state[key] = WHOLE
        else:
            self.state[key] = self.policy.inputs.get(name, WHOLE)
        self.origins[key] = frozenset({name}) if name in self.parameters else frozenset()
        self.results[name] = (self.state[key] or WHOLE,)

    def _call(self, site: Site, read: list[_Key]) -> None:
        """Choose a strategy, record it and the moves to it."""
        for index in range(len(site.results)):
            is_same = site.is_alias and read and self._size((site.name, index)) == self._size(read[0])
            self.base[site.name, index] = self.base[read[0]] if is_same else (site.name, index)
        if site.is_alias and len(read) == 1 and self.state[read[0]] is None and len(site.results) == 1:
            self._stay_free(site, read[0])
            return
        best = self.policy.routed.get(site.name)
        if best is None:
            best = min(site.strategies, key=lambda strategy: self._cost(site, strategy, read))
        for key, need in zip(read, best.inputs, strict=True):
            self._bring(site, key, need)
        self.operands[site.name], self.results[site.name] = best.inputs, best.outputs
        split = [key for key, need in zip(read, best.inputs, strict=True) if need.dims]
        origin = frozenset().union(*(self.origins[key] for key in split))
        for index, spec in enumerate(best.outputs):
            self.state[site.name, index] = spec
            self.origins[site.name, index] = origin if spec.dims else frozenset()

    def _stay_free(self, site: Site, read: _Key) -> None:
        """Keep a view of a free parameter free; the view's first reader decides for both."""
        key = (site.name, 0)
        self.state[key], self.origins[key] = None, self.origins[read]
        self.operands[site.name], self.results[site.name] = (WHOLE,), (WHOLE,)
        self.viewed[key] = read

    def _settle(self, key: _Key, spec: PartitionSpec) -> None:
        """Fix the spec of a free value, and of the parameter that it views."""
        self.state[key] = spec
        self.results[key[0]] = (spec,)
        parent = self.viewed.get(key)
        if parent is not None:
            before = self._before_view(self.space.sites[key[0]], spec)
            assert before is not None, "asked before"
            self.operands[key[0]] = (before,)
            if self.state[parent] is None:
                self._settle(parent, before)

    def _before_view(self, site: Site, spec: PartitionSpec) -> PartitionSpec | None:
        """Return the spec of a view's operand that gives its result `spec`, or None."""
        return next((item.inputs[0] for item in site.strategies if item.outputs[0] == spec), None)

    def _can_settle(self, key: _Key, spec: PartitionSpec) -> bool:
        """Whether a free value can be given a spec."""
        parent = self.viewed.get(key)
        if parent is None:
            return self.state[key] is None or self.state[key] == spec
        before = self._before_view(self.space.sites[key[0]], spec)
        return before is not None and self._can_settle(parent, before)

    def _have(self, key: _Key) -> PartitionSpec | None:
        """Return the present spec of a value: its first spec, unless its shared memory was reduced since."""
        have, now = self.state[key], self.reduced.get(self.base[key])
        if have is None or now is None or not have.is_partial:
            return have
        if now == WHOLE or self.policy.sequence is None:
            return WHOLE
        dim = self.policy.sequence.dim_of(key)
        return WHOLE if dim is None else _split_at(dim)

    def _cost(self, site: Site, strategy: Strategy, read: list[_Key]) -> tuple[float, ...]:
        """Return the cost: first split weights (vectors follow their operands); then bytes moved; then splits of whole
        values.
        """
        moved, cuts, free = 0.0, 0, 0
        for key, need in zip(read, strategy.inputs, strict=True):
            have = self._have(key)
            if have is None:
                if need.is_partial or not self._may_split(site, need) or not self._can_settle(key, need):
                    return (math.inf,)
                free += len(self.space.sites[key[0]].results[0].shape) > 1 and not need.is_fully_replicated
                continue
            cost = self._move_cost(key, have, need, site)
            moved += cost
            cuts += have != need and cost == 0
        if math.isinf(moved):
            return (math.inf,)
        if self.policy.exchanges:
            return self._exchange_cost(site, strategy, read, moved)
        if not free and all(self._have(key) in (None, WHOLE) for key in read):
            cuts += any(spec.axes for spec in strategy.outputs)
        is_split = sum(bool(spec.dims) for spec in strategy.outputs)
        is_split = is_split if _is_lookup(site) else -is_split
        return (-free, self._is_astray(site, strategy), self._carries_on(site, strategy), moved, cuts, is_split)

    def _exchange_cost(self, site: Site, strategy: Strategy, read: list[_Key], moved: float) -> tuple[float, ...]:
        """Split only calls that read a split operand, and leave no value partial, because experts keep to themselves.

        A gradient is made where its parameter lies.
        """
        specs = (*strategy.inputs, *strategy.outputs)
        is_inside = any(self._have(key) not in (None, WHOLE) for key in read)
        if any(spec.is_partial for spec in specs) or (not is_inside and any(spec.dims for spec in specs)):
            return (math.inf,)
        return (self._is_astray(site, strategy), moved, sum(bool(spec.dims) for spec in specs))

    def _is_astray(self, site: Site, strategy: Strategy) -> bool:
        """Whether a parameter's gradient would have another spec than the parameter, apart from a reduction."""
        owners = (self.gradients.get((site.name, index)) for index in range(len(strategy.outputs)))
        wanted = (None if owner is None else self.state[owner, 0] for owner in owners)
        return any(
            want is not None and spec.dims != want.dims for want, spec in zip(wanted, strategy.outputs, strict=True)
        )

    def _carries_on(self, site: Site, strategy: Strategy) -> bool:
        """Whether activations stay partial beyond views and sums; they have to be reduced where they are made."""
        if site.is_alias or (site.name, 0) in self.gradients:
            return False
        partial = [need.is_partial for need in strategy.inputs]
        return any(partial) and not (all(partial) and len(partial) > 1)

    def _may_split(self, site: Site, need: PartitionSpec) -> bool:
        """Whether a table may be split: inputs are looked up in it, not positions."""
        return need.is_fully_replicated or not _is_lookup(site) or _reads_inputs(site)

    def _move_cost(self, key: _Key, have: PartitionSpec, need: PartitionSpec, site: Site) -> float:
        """Bytes of moving a value into a spec; infinite if the policy forbids the move."""
        if self._is_there(key, have, need, site):
            return 0.0
        if need.is_partial or (key[0] in self.parameters and not need.is_fully_replicated):
            return math.inf
        if key[0] in self.parameters:
            return math.inf if have.dims else 0.0
        size = self._size(key)
        if self.policy.exchanges:
            return size
        if have == WHOLE:  # activations are cut only along the sequence, where there is one
            return 0.0 if self._is_sequence(key, need) else math.inf
        if have.is_partial:
            if need == WHOLE:
                return 2 * size
            return size if self._is_sequence(key, need) else math.inf
        return size

    def _is_sequence(self, key: _Key, need: PartitionSpec) -> bool:
        layout = self.policy.sequence
        if layout is None:
            return bool(self.policy.inputs)
        return need.dim_of(AXIS) is not None and need.dim_of(AXIS) == layout.dim_of(key)

    def _size(self, key: _Key) -> float:
        value = self.space.sites[key[0]].results[key[1]]
        return float(math.prod(value.shape) * value.itemsize)

    def _bring(self, site: Site, key: _Key, need: PartitionSpec) -> None:
        """Bring an operand into the needed spec."""
        have = self._have(key)
        if have is None:
            self._settle(key, need)
        if have is None or self._is_there(key, have, need, site):
            return
        if have.dims and not self._is_sequence(key, have) and site.phase == "forward" and self.policy.splits_parameters:
            free = (name for name in self.origins[key] - self.whole if self.policy.parameters.get(name) is None)
            if blamed := frozenset(free):
                raise _SplitInVainError(blamed)
            return
        kind = MoveKind.EXCHANGE if self.policy.exchanges else _kind(have, need)
        if kind is not None and key[0] not in self.parameters:
            self.moves.append(AxisMove(key, site.name, kind))
        if have.is_partial:
            self.reduced[self.base[key]] = need
        elif self.policy.exchanges:
            self.gathered.add((self.base[key], ""))
        elif need == WHOLE:
            self.gathered.add((self.base[key], site.phase))

    def _is_there(self, key: _Key, have: PartitionSpec, need: PartitionSpec, site: Site) -> bool:
        """Whether a call needs no move: a copy was gathered in this phase, or exchanged at any time before."""
        is_read = site.node is not None and site.node.target not in _FACTORIES
        if have == need or not is_read:
            return True
        if self.policy.exchanges:
            return (self.base[key], "") in self.gathered
        return need == WHOLE and (self.base[key], site.phase) in self.gathered


def _split_at(dim: int) -> PartitionSpec:
    return PartitionSpec(*(AXIS if position == dim else None for position in range(dim + 1)))


def _gradient_owners(space: SearchSpace, parameters: frozenset[str]) -> dict[_Key, str]:
    """Map gradients of parameters, with their addends and views, to the parameters."""
    owners = {
        (link.tail, link.result): link.head for link in space.links if link.operand < 0 and link.head in parameters
    }
    sources: dict[str, list[_Key]] = {}
    for link in space.links:
        sources.setdefault(link.head, []).append((link.tail, link.result))
    for name in reversed(list(space.sites)):
        site = space.sites[name]
        owner = owners.get((name, 0))
        if owner is not None and site.node is not None and site.node.target is torch.ops.aten.add.Tensor:
            owners.update(dict.fromkeys(sources[name], owner))
    return owners


def _kind(have: PartitionSpec, need: PartitionSpec) -> MoveKind | None:
    if have.is_partial:
        return MoveKind.SCATTER if need.dims else MoveKind.REDUCE
    if have.dims:
        return MoveKind.EXCHANGE if need.dims else MoveKind.GATHER
    return None


_FACTORIES = frozenset({
    torch.ops.aten.new_zeros.default, torch.ops.aten.new_empty.default, torch.ops.aten.new_full.default,
    torch.ops.aten.zeros_like.default, torch.ops.aten.ones_like.default, torch.ops.aten.empty_like.default,
})  # fmt: skip
"""Calls that read the shape of their operand alone."""


def _is_lookup(site: Site) -> bool:
    return site.node is not None and site.node.target is torch.ops.aten.embedding.default


def _reads_inputs(site: Site) -> bool:
    """Whether a lookup's indices come from the program's inputs."""
    assert site.node is not None
    indices = site.node.args[1]
    seen: list[fx.Node] = [indices] if isinstance(indices, fx.Node) else []
    while seen:
        node = seen.pop()
        if node.op == "placeholder":
            return True
        seen += node.all_input_nodes
    return False
