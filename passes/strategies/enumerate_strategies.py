"""List the strategies that the sharding rule of each node admits.

The result is a `SearchSpace`, a graph of sites (nodes that need a strategy) and links (values between sites).

A model repeats few kinds of calls, so two results are shared. Calls with equal operators, literals, shapes and dtypes
share one bound rule (`BoundRule`: a sharding rule with the sizes of the call). Bound rules that admit the same
strategies share one list of strategies. Whether an axis may split a factor depends on the divisibility of the factor's
size, so few lists differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autoshard.errors import NoShardingRuleError
from autoshard.ir.boundary import matches_dtensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import OWNERS, InputKind, OutputKind, OutputSlot, Program, tensor_values
from autoshard.ir.spec import PartitionSpec
from autoshard.kernels.library import NAMESPACE
from autoshard.kernels.optimizers import IN_PLACE
from autoshard.rules.enumeration import Groups, Strategy, choices_of_groups, enumerate_strategies, replicated
from autoshard.rules.fan_out import fan_out
from autoshard.rules.notation import BoundRule
from autoshard.rules.ranges import Ranges, facts_of, find_ranges
from autoshard.rules.registry import bound_rule
from passes.preparation.canonicalize import is_view
from passes.preparation.insert_fan_outs import is_gradient_fan_out
from passes.strategies.narrow_gradients import find_narrow_gradients


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """Global shape and dtype of a value, before any split."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the value."""
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Site:
    """A place of a program for which the search chooses a strategy: a call, a placeholder, or an output of the program.

    Args:
        name: the node's name; the slot's name for an output of the program, such as "output:0".
        node: the fx node; None for an output of the program.
        phase: "forward", "backward" or "update".
        results: shapes and dtypes of the site's tensors, in order, without a call's results that are None.
        rule: the call's bound rule; None for an operator without a rule, and for placeholders and outputs.
        call: a number that equal calls share: calls with the same operator, literals, shapes and dtypes. The number
            that tells random operators of one program apart is not compared. -1 for placeholders and outputs.
    """

    name: str
    node: fx.Node | None
    phase: str
    strategies: tuple[Strategy, ...]
    results: tuple[ValueInfo, ...]
    rule: BoundRule | None = None
    call: int = -1

    @property
    def is_alias(self) -> bool:
        """Whether the site is a view, a fan-out or an update in place, whose results share memory with its operands."""
        return (
            self.node is not None
            and self.node.op == "call_function"
            and (self.node.target is fan_out or self.node.target in IN_PLACE or is_view(self.node))
        )

    @property
    def is_input(self) -> bool:
        """Whether the site is a placeholder of the program: a parameter, buffer, state, input or tangent."""
        return self.node is not None and self.node.op == "placeholder"

    @property
    def is_constant(self) -> bool:
        """Whether the site is a tensor that the program contains, such as a mask that the model makes once."""
        return self.node is not None and self.node.op == "get_attr"


@dataclass(frozen=True, slots=True)
class Link:
    """A value on its way from the site that makes it to a site that reads it. A reshard may lie on the link.

    Args:
        tail: name of the site that makes the value.
        result: index of the value among the results of `tail`.
        head: name of the site that reads the value.
        operand: index of the value among the tensor operands of `head`. If the value leaves the program in the spec of
            a placeholder, `head` is this placeholder, and `operand` is -1. An example is a gradient, which takes the
            spec of its parameter.
        keeps_sums: whether reshards on the link must not reduce a partial sum.
    """

    tail: str
    result: int
    head: str
    operand: int
    keeps_sums: bool = False


def specs_of(site: Site, result: int) -> tuple[PartitionSpec, ...]:
    """Return the specs of the site's result number `result`, one for each strategy of the site."""
    return tuple(strategy.outputs[result] for strategy in site.strategies)


def needs_of(head: Site, link: Link) -> tuple[PartitionSpec, ...]:
    """Return the specs in which `head` reads the value of `link`, one for each strategy of `head`."""
    if link.operand < 0:
        return specs_of(head, 0)
    return tuple(strategy.inputs[link.operand] for strategy in head.strategies)


def leaves_program(head: Site, link: Link) -> bool:
    """Whether a link carries an output, a gradient or an updated tensor out of the program.

    `head` is the site named `link.head`.
    """
    return link.operand < 0 or head.node is None


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The graph in which the search chooses one strategy for each site.

    Args:
        sites: site by name, in program order; the outputs of the program come last.
        links: all links. Other modules refer to a link by its index in this tuple.
        replicated_operators: (operator's name, user's line) of operators without a sharding rule, which every rank runs
            whole.
    """

    program: Program
    mesh: Mesh
    sites: Mapping[str, Site]
    links: tuple[Link, ...]
    replicated_operators: tuple[tuple[str, str], ...]

    def owner(self, slot: OutputSlot) -> str:
        """Return the name of the placeholder to which an output belongs, for example the parameter of a gradient."""
        return _owners(self.program)[OWNERS[slot.kind], slot.name]


@dataclass(frozen=True, slots=True)
class _AlikeCalls:
    """Calls with equal operators, literals, shapes and dtypes: their common number (`Site.call`) and bound rule."""

    number: int
    rule: BoundRule | None


@dataclass(frozen=True, slots=True)
class EnumerateStrategies:
    """Build the search space of a canonical program.

    Args:
        strict: raise `NoShardingRuleError` for an operator without a rule. Otherwise every rank runs the operator
            whole.
        wide_gradients: reduce 16-bit gradients after their conversion to a wider type
            (`passes.strategies.narrow_gradients`).
        sums_gradients: a step sums gradients over micro-batches, so the update may reduce their sums. Otherwise each
            gradient is reduced in the backward, where computation hides the reduction.
        groups: groups of neighbouring mesh axes; the axes of a group make the same choice. None: each axis chooses by
            itself.
    """

    mesh: Mesh
    strict: bool = False
    wide_gradients: bool = False
    sums_gradients: bool = True
    groups: Groups | None = None
    _calls: dict[Any, _AlikeCalls] = field(default_factory=dict, repr=False)
    _numbers: dict[Any, int] = field(default_factory=dict, repr=False)
    _cache: dict[Any, tuple[Strategy, ...]] = field(default_factory=dict, repr=False)

    def __call__(self, program: Program) -> SearchSpace:
        """Return the search space of `program`.

        Raises:
            NoShardingRuleError: an operator has no rule, and `strict` is set.
        """
        kinds = {slot.node: slot.kind for slot in program.inputs}
        ranges = find_ranges(program.graph_module)
        calls = {node.name: self._call(node, ranges) for node in program.graph.nodes if _is_call(node)}
        rules = {name: call.rule for name, call in calls.items()}
        narrow = find_narrow_gradients(program, rules) if self.wide_gradients else frozenset()
        sites: dict[str, Site] = {}
        links: list[Link] = []
        replicated_operators: dict[tuple[str, str], None] = {}
        for node in program.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                sites[node.name] = self._input_site(node, kinds.get(node.name))
            elif node.name in calls:
                call = calls[node.name]
                strategies = self._strategies(node, call.rule)
                phase = node.meta["phase"]
                sites[node.name] = Site(node.name, node, phase, strategies, _values(node), call.rule, call.number)
                links += _call_links(node, narrow)
                if call.rule is None:
                    replicated_operators[str(node.target), node.meta.get("source", "")] = None
        owners, nodes = _owners(program), program.nodes_by_name()
        for slot in program.outputs:
            site, link = self._result(nodes[slot.node], slot, owners)
            if site is not None:
                sites[site.name] = site
            links.append(link)
        return SearchSpace(program, self.mesh, sites, tuple(links), tuple(replicated_operators))

    def tied(self, groups: Groups) -> EnumerateStrategies:
        """Return a copy of this pass in which the axes of each of `groups` make the same choice."""
        return replace(self, groups=groups, _cache={})

    def _input_site(self, node: fx.Node, kind: InputKind | None) -> Site:
        value = node.meta["val"]
        splittable = kind in _SPLITTABLE
        key = ("input", tuple(value.shape) if splittable else None)
        if key not in self._cache:
            specs = self.placements(tuple(value.shape)) if splittable else (PartitionSpec(),)
            self._cache[key] = tuple(Strategy((), (spec,), ()) for spec in specs)
        return Site(node.name, node, node.meta["phase"], self._cache[key], _values(node))

    def placements(self, shape: tuple[int, ...]) -> tuple[PartitionSpec, ...]:
        """Return every spec without partial axes that an input or output of the global shape `shape` may take.

        Specs that split a dim unevenly are included if DTensor would place the same elements on each rank.
        """
        options = choices_of_groups(self.mesh, (None, *range(len(shape))), self.groups)
        specs = (_spec_of(self.mesh, len(shape), option) for option in options)
        return tuple(spec for spec in specs if self._may_split(spec, shape))

    def _may_split(self, spec: PartitionSpec, shape: tuple[int, ...]) -> bool:
        if spec.is_even(shape, self.mesh):
            return True
        pieces = [self.mesh.shards(spec.axes_of(dim)) for dim in range(len(shape))]
        has_work = all(count <= size for count, size in zip(pieces, shape, strict=True))
        return has_work and matches_dtensor(spec, shape, self.mesh)

    def _call(self, node: fx.Node, ranges: Ranges) -> _AlikeCalls:
        key = _call_key(node), facts_of(node, ranges)
        if key not in self._calls:
            rule = rule_of(node, ranges)
            if rule is None and self.strict:
                raise NoShardingRuleError(no_rule_message(node))
            alike = (key[0], None if rule is None else rule.linear)
            self._calls[key] = _AlikeCalls(self._numbers.setdefault(alike, len(self._numbers)), rule)
        return self._calls[key]

    def _strategies(self, node: fx.Node, rule: BoundRule | None) -> tuple[Strategy, ...]:
        counts = (len(operands_of(node)), len(_values(node)))
        is_reduced = not self.sums_gradients and is_gradient_fan_out(node)
        key = (counts if rule is None else _structure(rule, self.mesh), is_reduced)
        if key not in self._cache:
            found = (
                [replicated(*counts, self.mesh)] if rule is None else enumerate_strategies(rule, self.mesh, self.groups)
            )
            self._cache[key] = tuple(each for each in found if not (is_reduced and each.outputs[0].partial))
        return self._cache[key]

    def _result(
        self, node: fx.Node, slot: OutputSlot, owners: Mapping[tuple[InputKind, str], str]
    ) -> tuple[Site | None, Link]:
        tail, result = resolve(node)
        if slot.kind in OWNERS:
            return None, Link(tail.name, result, owners[OWNERS[slot.kind], slot.name], -1)
        shape = tuple(node.meta["val"].shape)
        specs = self.placements(shape)
        strategies = tuple(Strategy((spec,), (), ()) for spec in specs)
        phase = "forward" if slot.kind is OutputKind.OUTPUT else node.meta["phase"]
        return Site(slot.name, None, phase, strategies, ()), Link(tail.name, result, slot.name, 0)


def no_rule_message(node: fx.Node) -> str:
    """Return the error message for a call without a sharding rule; it names the operator and the user's line."""
    line = node.meta.get("source")
    return (
        f"strict=True, but operator {node.target}{f' at {line}' if line else ''} has no sharding rule. Write one with "
        "@autoshard.sharding_rule, let autoshard.infer_rule find one, or compile with strict=False to run the operator "
        "whole on every device."
    )


def rule_of(node: fx.Node, ranges: Ranges | None = None) -> BoundRule | None:
    """Return the bound rule of a call, or None if its operator has no rule.

    Args:
        node: the call.
        ranges: the range of each value of the program (`find_ranges`). If None, operands are assumed to be finite and
            not zero. This assumption may be wrong for partial sums, so plans must not use such a rule.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    values = tensor_values(node)
    known = None if ranges is None else [ranges[operand] for operand in operands_of(node)]
    return bound_rule(node.target, args, kwargs, values, known)


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of a call's tensor operands in order. A node that is used as two operands is listed twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return [item for item in found if isinstance(item.meta.get("val"), torch.Tensor)]


def resolve(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the call that computes the value of `node`, and the value's index among the call's tensor results.

    Usually these are `node` and 0. If `node` is a `getitem`, the call is the one with several results.
    """
    if not _is_selection(node):
        return node, 0
    source, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    return source, sum(value is not None for value in tensor_values(source)[:index])


def _is_selection(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and not isinstance(node.target, torch._ops.OpOverload)


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and not _is_selection(node) and bool(_values(node))


def _structure(rule: BoundRule, mesh: Mesh) -> Any:
    """Return a key that is equal for two bound rules only if they admit the same strategies on `mesh`.

    The key has all fields of the rule but its rewrite. Each factor's size is replaced by its class. Strategies compare
    a size with the number of its pieces, and divide the size by this number. The number of pieces divides `mesh.size`.
    So two sizes of at least `2 * mesh.size` are in one class if their remainders by `mesh.size` are equal. If ranks
    exchange data along a factor, each piece needs a least number of elements (`BoundRule.exchanged`). Sizes of such a
    factor must be at least this number times `mesh.size` to share a class.
    """

    def kind(factor: str, size: int) -> int:
        enough = mesh.size * max(2, rule.exchanged.get(factor, 0))
        return size if size < enough else enough + size % mesh.size

    sizes = tuple((factor, kind(factor, size)) for factor, size in rule.sizes.items())
    others = (getattr(rule, item.name) for item in fields(rule) if item.name not in ("sizes", "local"))
    return sizes, *(tuple(value.items()) if isinstance(value, Mapping) else value for value in others)


def _values(node: fx.Node) -> tuple[ValueInfo, ...]:
    return tuple(ValueInfo(tuple(v.shape), v.dtype) for v in tensor_values(node) if v is not None)


def _call_links(node: fx.Node, narrow: Collection[tuple[str, str]]) -> list[Link]:
    """Return a link for each tensor operand of a call.

    `narrow` has pairs (operand, reader) of names. Their links have `keeps_sums` set.
    """
    links = []
    for index, operand in enumerate(operands_of(node)):
        tail, result = resolve(operand)
        links.append(Link(tail.name, result, node.name, index, (operand.name, node.name) in narrow))
    return links


def _call_key(node: fx.Node) -> Any:
    def key(argument: fx.Node) -> Any:
        value = argument.meta.get("val")
        return ("value", tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else argument.name

    return repr((str(node.target), fx.map_arg((_without_site(node), node.kwargs), key)))


def _without_site(node: fx.Node) -> list[Any]:
    """Return the arguments of a call, with None for the number that tells random operators of one program apart."""
    target: Any = node.target
    is_ours = isinstance(target, OpOverload) and target.namespace == NAMESPACE
    names = [argument.name for argument in target._schema.arguments] if is_ours else []
    return [None if name == "site" else value for name, value in zip_longest(names, node.args)]


def _spec_of(mesh: Mesh, ndim: int, option: tuple[int | None, ...]) -> PartitionSpec:
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for axis, dim in zip(mesh.axis_names, option, strict=True):
        if dim is not None:
            dims[dim].append(axis)
    return PartitionSpec(*dims)


_SPLITTABLE = (
    InputKind.PARAMETER, InputKind.BUFFER, InputKind.INPUT, InputKind.TANGENT, InputKind.STATE,
)  # fmt: skip


def _owners(program: Program) -> dict[tuple[InputKind, str], str]:
    """Return the name of the placeholder of each input, by the kind and name of the input."""
    return {(slot.kind, slot.name): slot.node for slot in program.inputs}
