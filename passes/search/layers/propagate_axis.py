"""Propagate one mesh axis through a program as an expert would: specs flow from fixed values to all other values.

The axes of a recipe are independent: each axis splits a value, or leaves it whole, whatever the other axes do. So each
axis is propagated alone, on a mesh of its own. Calls are visited in program order, and each takes one of the strategies
of its sharding rule:

1. The policy fixes the specs of inputs: split along the sequence, or whole. The spec of a parameter is free until the
   first call that reads it.
2. A call takes the strategy that moves the fewest bytes, given the specs of its operands. Parameters do not move. A
   move that the policy forbids costs infinitely much. Among equal strategies the strategy that splits more wins.
3. A partial value is reduced at its first use by a call that is not a view or a sum, and stays reduced. A gathered
   copy is not kept.
4. An activation that is split because of a parameter may have to be gathered in the forward, for a norm or a router's
   softmax. Then splitting that parameter was a mistake. The parameter is fixed as whole, and the walk starts again.

The column and row splits of Megatron-LM follow (Shoeybi et al. 2019, section 3). The weight of a product is free, so
the product's result is split without a move. The next weight is split along the contracted dim, and its partial result
is reduced. With a given layout of the sequence, partial results are reduce-scattered along the sequence instead
(Korthikanti et al. 2022, section 4.2.2).
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
"""A mesh of one axis with two ranks. The split dims do not depend on the number of ranks."""

WHOLE = PartitionSpec()

LAYERS = frozenset({kernels.experts, kernels.experts_backward})
"""The operators that compute all experts of a layer at once, forward and backward."""
_Key = tuple[str, int]


class MoveKind(Enum):
    """The kind of a collective over the axis."""

    GATHER = "gather"
    REDUCE = "reduce"
    SCATTER = "scatter"
    EXCHANGE = "exchange"


@dataclass(frozen=True, slots=True)
class AxisMove:
    """A collective over the axis that changes the spec of a value before the call `reader`.

    `value` is the name of the node that made the value, and the index of the value among the node's results.
    """

    value: _Key
    reader: str
    kind: MoveKind


@dataclass(frozen=True, slots=True)
class AxisLayout:
    """The split of a whole program by one axis.

    Args:
        operands, results: specs of each node's operands and results, by the node's name. A placeholder has one result.
        moves: the collectives, in program order.
    """

    operands: Mapping[str, tuple[PartitionSpec, ...]]
    results: Mapping[str, tuple[PartitionSpec, ...]]
    moves: tuple[AxisMove, ...]

    def dim_of(self, key: _Key) -> int | None:
        """Return the dim of a value that the axis splits, or None if the value is whole.

        `key` is (name of the node that makes the value, index of the result).
        """
        return self.results[key[0]][key[1]].dim_of(AXIS)


@dataclass(frozen=True, slots=True)
class Policy:
    """The part of a recipe that says how an axis splits a program.

    Args:
        inputs: the specs of split inputs, by placeholder. All other inputs are whole.
        splits_parameters: whether parameters that are not fixed may be split.
        parameters: the specs of fixed parameters, by placeholder.
        sequence: the layout of the context axis, or None. Partial results are scattered, and whole results sliced,
            along the dims that this axis splits. With None, activations outside of split products stay whole.
        exchanges: whether each rank has its own tokens, as on the expert axis. Then "whole" means all values of the
            rank's own tokens, and each move between whole and split activations is an all-to-all.
        routed: the only strategy of some calls, by the call's name (`route_tokens`).
    """

    inputs: Mapping[str, PartitionSpec] = field(default_factory=dict)
    splits_parameters: bool = False
    parameters: Mapping[str, PartitionSpec] = field(default_factory=dict)
    sequence: AxisLayout | None = None
    exchanges: bool = False
    routed: Mapping[str, Strategy] = field(default_factory=dict)


def axis_space(program: Program) -> SearchSpace:
    """Return the strategies of each call of a program on one mesh axis. `Canonicalize` has prepared the program.

    Ring attention and the exchange of tokens between experts communicate inside a call. They are left out, because
    recipes have no price for them here. `route_tokens.shared_layers` adds the exchanges on the expert axis.
    """
    space = EnumerateStrategies(MESH)(program)
    return replace(space, sites={name: _without_exchanges(site) for name, site in space.sites.items()})


def _without_exchanges(site: Site) -> Site:
    target = None if site.node is None else site.node.target
    return replace(site, strategies=tuple(item for item in site.strategies if not _exchanges(target, item.inputs)))


def _exchanges(target: object, inputs: Sequence[PartitionSpec]) -> bool:
    """Whether a call of `target` with these operand specs exchanges tokens or keys with other ranks while it runs."""
    if is_ring(target, inputs):
        return True
    return target in LAYERS and all(spec.dim_of(AXIS) == 0 for spec in (inputs[0], inputs[-1]))


def propagate_axis(space: SearchSpace, policy: Policy) -> AxisLayout:
    """Return how an axis splits a program under a policy; `space` is from `axis_space`."""
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
    """If `parameters` were split, the forward would have to gather an activation. These parameters must stay whole."""

    def __init__(self, parameters: frozenset[str]) -> None:
        super().__init__(*parameters)
        self.parameters = parameters


@dataclass
class _Propagation:
    """One walk through the program, which fills the fields below. A value is named by (node's name, index of result).

    Args:
        whole: names of parameters that must not be split.
        operands, results, moves: the fields of `AxisLayout` for the calls visited so far.
        state: for each value, the spec with which it was made; None for a value whose spec is free.
        origins: for each split value, the parameters whose split was the cause.
        viewed: for each view of a value whose spec is free, that value.
        base: for each value, the value that owns its memory.
        reduced: for each partial value that was reduced, the spec after the reduction.
        gathered: pairs of a value and the phase in which a whole copy of it exists. On the expert axis, copies exist in
            all phases, and the phase is "".
        gradients: for each gradient of a parameter, the parameter's name.
        parameters: names of the parameters' placeholders.
    """

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
        """Fill in the layout. Raises `_SplitInVainError` if some parameters should not have been split."""
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
        """Set the spec of a placeholder. The spec is None for a parameter whose spec the first reader decides."""
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
        """Choose the cheapest strategy of a call, and record it with the collectives that its operands `read` need."""
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
        """Keep the spec of a view open if the spec of the viewed parameter is open.

        The first reader of the view then decides both specs.
        """
        key = (site.name, 0)
        self.state[key], self.origins[key] = None, self.origins[read]
        self.operands[site.name], self.results[site.name] = (WHOLE,), (WHOLE,)
        self.viewed[key] = read

    def _settle(self, key: _Key, spec: PartitionSpec) -> None:
        """Fix the spec of a value whose spec is open, and of the parameter that it is a view of."""
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
        """Return the operand's spec for which a view's result has the spec `spec`, or None if there is none."""
        return next((item.inputs[0] for item in site.strategies if item.outputs[0] == spec), None)

    def _is_new(self, key: _Key) -> bool:
        """Whether a value was made by a call of `_NEW`, such as `zeros`."""
        node = self.space.sites[key[0]].node
        return node is not None and node.target in _NEW

    def _can_settle(self, key: _Key, spec: PartitionSpec) -> bool:
        """Whether a value whose spec is open may get the spec `spec`.

        If the value is a view, each value that it is a view of must be able to get a fitting spec.
        """
        parent = self.viewed.get(key)
        if parent is None:
            return self.state[key] is None or self.state[key] == spec
        before = self._before_view(self.space.sites[key[0]], spec)
        return before is not None and self._can_settle(parent, before)

    def _have(self, key: _Key) -> PartitionSpec | None:
        """Return the present spec of a value, or None if the spec is open.

        A partial value that was reduced for an earlier call has the spec after this reduction.
        """
        have, now = self.state[key], self.reduced.get(self.base[key])
        if have is None or now is None or not have.is_partial:
            return have
        if now == WHOLE or self.policy.sequence is None:
            return WHOLE
        dim = self.policy.sequence.dim_of(key)
        return WHOLE if dim is None else _split_at(dim)

    def _cost(self, site: Site, strategy: Strategy, read: list[_Key]) -> tuple[float, ...]:
        """Return the cost of a strategy as a tuple, whose first items weigh most; infinity forbids the strategy.

        * Number of weights that become split; more are better. Vectors follow the other operands, and do not count.
        * Whether a parameter's gradient has other split dims than the parameter.
        * Whether activations stay partial.
        * Bytes moved.
        * Number of whole values that the call cuts.
        * Number of split results; more are better, but not for lookups in a table.
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
        is_misplaced, is_partial = self._misplaces_gradient(site, strategy), self._stays_partial(site, strategy)
        return (-free, is_misplaced, is_partial, moved, cuts, is_split)

    def _exchange_cost(self, site: Site, strategy: Strategy, read: list[_Key], moved: float) -> tuple[float, ...]:
        """Return the cost of a strategy on the expert axis, as a tuple whose first items weigh most.

        `moved` is the bytes that the call's operands move. A call may be split only if it reads a split operand, and no
        value may be partial, because each expert works alone. A gradient is made on the ranks that have its parameter.
        """
        specs = (*strategy.inputs, *strategy.outputs)
        is_inside = any(self._have(key) not in (None, WHOLE) for key in read)
        if any(spec.is_partial for spec in specs) or (not is_inside and any(spec.dims for spec in specs)):
            return (math.inf,)
        return (self._misplaces_gradient(site, strategy), moved, sum(bool(spec.dims) for spec in specs))

    def _misplaces_gradient(self, site: Site, strategy: Strategy) -> bool:
        """Whether a strategy gives a parameter's gradient other split dims than the parameter has."""
        owners = (self.gradients.get((site.name, index)) for index in range(len(strategy.outputs)))
        wanted = (None if owner is None else self.state[owner, 0] for owner in owners)
        return any(
            want is not None and spec.dims != want.dims for want, spec in zip(wanted, strategy.outputs, strict=True)
        )

    def _stays_partial(self, site: Site, strategy: Strategy) -> bool:
        """Whether a call with this strategy reads a partial activation, so that its result stays partial.

        Views, sums of partial values, and gradients of parameters do not count.
        """
        if site.is_alias or (site.name, 0) in self.gradients:
            return False
        partial = [need.is_partial for need in strategy.inputs]
        return any(partial) and not (all(partial) and len(partial) > 1)

    def _may_split(self, site: Site, need: PartitionSpec) -> bool:
        """Whether a call may read an operand whose spec is open, split as `need`.

        The table of a lookup may be split only if its indices are computed from inputs.
        """
        return need.is_fully_replicated or not _is_lookup(site) or _reads_inputs(site)

    def _move_cost(self, key: _Key, have: PartitionSpec, need: PartitionSpec, site: Site) -> float:
        """Return the bytes moved by a change of a value's spec from `have` to `need`; infinity forbids the change.

        `site` is the call that reads the value.
        """
        if self._needs_no_move(key, have, need, site):
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
        """Record the change of an operand's spec to `need`, and the collective that makes it.

        Raises:
            _SplitInVainError: a split parameter is to blame for a gather in the forward.
        """
        have = self._have(key)
        if have is None or self._is_new(key):
            self._settle(key, need)
        if have is None or self._needs_no_move(key, have, need, site):
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

    def _needs_no_move(self, key: _Key, have: PartitionSpec, need: PartitionSpec, site: Site) -> bool:
        """Whether a call needs no collective for its operand `key`, which has the spec `have`.

        The operand has the spec `need`, or is new (`_is_new`), or the call reads only its shape. An operand that was
        gathered for an earlier call of the same phase, on the expert axis of any phase, needs no collective either.
        """
        is_read = site.node is not None and site.node.target not in _FACTORIES
        if have == need or not is_read or (self._is_new(key) and not need.is_partial):
            return True
        if self.policy.exchanges:
            return (self.base[key], "") in self.gathered
        return need == WHOLE and (self.base[key], site.phase) in self.gathered


def _split_at(dim: int) -> PartitionSpec:
    return PartitionSpec(*(AXIS if position == dim else None for position in range(dim + 1)))


def _gradient_owners(space: SearchSpace, parameters: frozenset[str]) -> dict[_Key, str]:
    """Return for each gradient of a parameter, and for each addend of such a gradient, the parameter's name."""
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
    torch.ops.aten.zeros_like.default, torch.ops.aten.ones_like.default, torch.ops.aten.empty_like.default,
})  # fmt: skip
"""Calls that read only the shape of their operand."""

_NEW = frozenset({
    torch.ops.aten.zeros.default, torch.ops.aten.ones.default, torch.ops.aten.full.default,
    torch.ops.aten.empty.memory_format,
})  # fmt: skip
"""Calls that make a new tensor without reading a tensor. Each rank can make any part of the new tensor."""


def _is_lookup(site: Site) -> bool:
    return site.node is not None and site.node.target is torch.ops.aten.embedding.default


def _reads_inputs(site: Site) -> bool:
    """Whether the indices of a lookup in a table are computed from the program's inputs."""
    assert site.node is not None
    indices = site.node.args[1]
    seen: list[fx.Node] = [indices] if isinstance(indices, fx.Node) else []
    while seen:
        node = seen.pop()
        if node.op == "placeholder":
            return True
        seen += node.all_input_nodes
    return False
