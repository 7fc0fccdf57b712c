"""Derives how the loss of a batch follows from the losses of its micro-batches.

A micro-batch, called a *part*, has a slice of dim 0 of all inputs, like a rank under data parallelism. So the sharding
rules say how a value of a part relates to the value of the batch. But a part runs the traced operators unchanged,
without a reduction over parts. So each part's loss needs a weight in the loss of the batch:

1. The program is traced for one part, and for two parts at once. A number that grows with the batch, as in
   `loss.sum() / len(x)`, differs between the two programs.
2. Each value from which the loss is computed gets a state (`batch_states`). It is equal in all parts, split along a
   dim, or a sum over the parts. Its exponent e says that the values of m parts are too large by the factor m ** e.
3. A loss may divide a sum by a count that depends on inputs alone, such as a number of targets. Its state names the
   count. Graphs that compute the count for a part and for the batch are extracted from the program.
4. Indices of samples (`arange(len(x))`) may only read or write each sample at its own index (`places`).
5. The loss must be a sum of such terms. Otherwise the result names the first call that mixes parts.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.extract_graph import needed
from autoshard.ir.loss_weights import Branches, Count, LossWeights, Term
from autoshard.ir.program import InputKind, OutputKind, Program, tensor_values
from autoshard.ir.spec import Reduction
from autoshard.kernels.checks import checked
from autoshard.rules.notation import BoundRule
from passes.strategies.enumerate_strategies import operands_of, resolve, rule_of
from passes.verification.batch_addends import adds_constant
from passes.verification.batch_factor import BatchFactor, batch_factor
from passes.verification.batch_states import BatchIndices, Mixed, OfInputs, Same, SlicedDim, State, Sum
from passes.verification.combine_branches import combine_branches
from passes.verification.places import (
    COUNTS,
    READS_AT,
    WRITES_AT,
    argument,
    counts_from_zero,
    knows_places,
    read_at_places,
)
from passes.verification.written_buffers import refuse_statistics, written_values

aten = torch.ops.aten
_WAY_OUT = "Return a sum or a mean over samples, each of which is computed for itself, or leave micro_batches out."


def weigh_loss(part: Program, pair: Program) -> LossWeights:
    """Return the weights of micro-batches in the loss of a batch.

    If the losses of micro-batches do not determine the loss of the batch, `refusal` of the result has the reason.
    `part` is the program of one micro-batch, and `pair` that of two at once, of which only the forward is needed.
    """
    loss, twin = loss_of(part), loss_of(pair)
    assert loss is not None, "a step has a loss"
    nodes = _ancestors([loss, *written_values(part)])
    theirs = [] if twin is None else _ancestors([twin, *written_values(pair)])
    made, twins = ([node for node in found if not _is_copy(node)] for found in (nodes, theirs))
    if list(map(_kind, made)) != list(map(_kind, twins)):
        pairs = zip_longest(made, twins)
        one, two = next((one, two) for one, two in pairs if one is None or two is None or _kind(one) != _kind(two))
        return _refused(
            f"the model does not run the same operators for another batch size: {_named(one)} where two micro-batches "
            f"at once run {_named(two)}"
        )
    walk = _LossWalk(part, dict(zip(made, twins, strict=True)))
    walk.run(nodes)
    found = walk.result(loss)
    refusal = found.refusal or refuse_statistics(part, walk.twins, walk.states)
    return replace(found, refusal=refusal, branches=_branches(part, pair))


def _branches(part: Program, pair: Program) -> Branches | None:
    """Return graphs that compute the guards' values for a batch from its micro-batches (see `combine_branches`).

    The result is None if `part` or `pair` has no guards, or if their guards run different operators. It is also None if
    the micro-batches do not determine these values. `part` and `pair` are those of `weigh_loss`.
    """
    if part.guard_program is None or pair.guard_program is None:
        return None
    nodes, theirs = (
        [node for node in program.graph.nodes if node.op != "output"]
        for program in (part.guard_program, pair.guard_program)
    )
    if list(map(_kind, nodes)) != list(map(_kind, theirs)):
        return None
    walk = _LossWalk(part, dict(zip(nodes, theirs, strict=True)))
    walk.run(nodes)
    return combine_branches(part, walk.twins, walk.states)


def _is_copy(node: fx.Node) -> bool:
    """Whether a node is a `clone`.

    Copies are not compared, because the sizes of values decide whether a copy is needed.
    """
    return node.target is aten.clone.default


def _kind(node: fx.Node) -> Any:
    """Return a call's operator. All operators that reshape count as one, because sizes decide between them."""
    if node.op != "call_function":
        return node.op
    return aten.view.default if node.target in (aten._unsafe_view.default, aten.reshape.default) else node.target


def loss_of(program: Program) -> fx.Node | None:
    """Return the first floating scalar among a program's outputs, or None if there is none."""
    nodes = program.nodes_by_name()
    values = [nodes[slot.node] for slot in program.outputs if slot.kind == OutputKind.OUTPUT]
    scalars = (node for node in values if node.meta["val"].dim() == 0 and node.meta["val"].is_floating_point())
    return next(scalars, None)


def _named(node: fx.Node | None) -> str:
    if node is None:
        return "nothing"
    return f"node {node.name!r} ({node.target}, {node.meta.get('source') or 'an unknown line'})"


def _refused(why: str) -> LossWeights:
    text = f"micro_batches: the loss of a batch is not made of those of its parts, as {why}. {_WAY_OUT}"
    return LossWeights((), refusal=text)


@dataclass(slots=True)
class _LossWalk:
    """Derives the states of forward values.

    Args:
        program: the program of one part.
        twins: node of the program of one part → the corresponding node of the program of two parts.
        states: for each node, the state of each of its results.
        counts: for each divisor of a loss, the graphs that compute it.
    """

    program: Program
    twins: dict[fx.Node, fx.Node]
    states: dict[fx.Node, list[State]] = field(default_factory=dict)
    counts: dict[fx.Node, Count] = field(default_factory=dict)

    def run(self, nodes: Sequence[fx.Node]) -> None:
        kinds = {slot.node: slot.kind for slot in self.program.inputs}
        for node in nodes:
            if node.op == "placeholder":
                is_cut = kinds.get(node.name) == InputKind.INPUT and node.meta["val"].dim() > 0
                self.states[node] = [SlicedDim(0) if is_cut else Same()]
            elif node.op == "get_attr":
                self.states[node] = [self._constant(node)]
            elif _is_copy(node) or node.target is checked:  # each part is checked by itself
                self.states[node] = list(self.states[node.all_input_nodes[0]])
            elif node.target is operator.getitem:
                source, index = node.args
                found = self.states[source]  # type: ignore[index]
                self.states[node] = [found[index] if len(found) > 1 else found[0]]  # type: ignore[index]
            else:
                self.states[node] = self._call(node)

    def result(self, loss: fx.Node) -> LossWeights:
        (state,) = self.states[loss]
        if isinstance(state, Mixed):
            return _refused(f"{_named(state.node)} {state.why}")
        if isinstance(state, Same):
            return LossWeights((Term(1 + state.exponent),))
        if not isinstance(state, Sum):
            return _refused("no parameter has a part in it")
        plain = {exponent for count, exponent in state.terms if count is None}
        if len(plain) > 1:
            return _refused("it adds a sum over the batch to a mean over it, which weigh parts differently")
        if state.has_constant and plain - {1}:
            return _refused(
                "it adds a term independent of the batch to a sum over it, so this term would count once for each part"
            )
        terms = sorted(state.terms, key=lambda term: (term[0] is not None, str(term[0]), term[1]))
        return LossWeights(tuple(map(self._term, terms)), state.has_constant)

    def _term(self, term: tuple[fx.Node | None, int]) -> Term:
        count, exponent = term
        if count is None:
            return Term(exponent)
        return Term(exponent, self.counts[count], count.meta.get("source") or "")

    # Single calls.

    def _constant(self, node: fx.Node) -> State:
        twin = self.twins[node]
        ours, theirs = node.meta["val"], twin.meta["val"]
        own = getattr(node.graph.owning_module, str(node.target), None)
        other = getattr(twin.graph.owning_module, str(twin.target), None)
        is_equal = ours.shape == theirs.shape and (own is other or _are_equal(own, other))
        return Same() if is_equal else Mixed(node, "is a constant that depends on the size of the batch")

    def _call(self, node: fx.Node) -> list[State]:
        results = len(tensor_values(node))
        operands = operands_of(node)
        given = [self.states[operand][0] for operand in operands]
        mixed = next((state for state in given if isinstance(state, Mixed)), None)
        if mixed is not None:
            return [mixed] * results
        scale = self._scale(node)
        if scale is None:
            return [Mixed(node, "reads a number that depends on the size of the batch")] * results
        if all(isinstance(state, Same) for state in given):
            return self._same(node, given, scale)
        if any(isinstance(state, BatchIndices) for state in given):
            return [self._of_places(node, given) or Mixed(node, _OF_PLACE)] * results
        if any(isinstance(state, Sum | OfInputs) for state in given):
            return [self._of_sums(node, operands, given, scale)] * results
        return self._split(node, given, scale)

    def _scale(self, node: fx.Node) -> int | None:
        """Return e if a number among a call's arguments makes the result of one of m parts too large by m ** e.

        None is returned if the number has any other effect that depends on the size of the batch.
        """
        ours, theirs = (_literals(item) for item in (node, self.twins[node]))
        if ours == theirs or node.target in _SIZED:
            return 0
        if node.target in _PRODUCTS and len(ours) == 1 and len(theirs) == 1 and ours[0] and theirs[0]:
            ratio = theirs[0] / ours[0]
            power = {2.0: 1, 1.0: 0, 0.5: -1}.get(ratio)
            sign = 1 if node.target in _QUOTIENTS else -1
            return None if power is None else sign * power
        return 0 if all(a == b for a, b in zip(_loose(node), _loose(self.twins[node]), strict=False)) else None

    def _same(self, node: fx.Node, given: Sequence[State], scale: int) -> list[State]:
        exponents = {state.exponent for state in given if isinstance(state, Same)} | {0}
        grown = [_grown(a, b) for a, b in zip(tensor_values(node), tensor_values(self.twins[node]), strict=True)]
        if exponents != {0} or scale:
            if any(dim is not None for dim in grown) or node.target not in _PRODUCTS or len(given) > 1:
                return [Mixed(node, "reads a number that depends on the size of the batch")] * len(grown)
            return [Same(sum(exponents) + scale)]
        is_alike = node.target in _ALIKE or _is_random(node) or self._reads_seed(node)
        made: list[State] = []
        for dim in grown:
            other = BatchIndices(0, node.meta["val"].shape[0]) if counts_from_zero(node) else Mixed(node, _OF_PLACE)
            made.append(Same() if dim is None else SlicedDim(dim) if is_alike and dim >= 0 else other)
        return made

    # Calls on places.

    def _of_places(self, node: fx.Node, given: Sequence[State]) -> State | None:
        """Return the state of a call on indices of samples.

        The result is None unless the call reshapes the indices or fulfils `read_at_places`.
        """
        if node.target in (*READS_AT, *WRITES_AT):
            return read_at_places(node, self.states)
        rule = rule_of(self.twins[node])
        place = given[0]
        if len(given) > 1 or rule is None or not rule.transparent or not isinstance(place, BatchIndices):
            return None
        (moved,) = self._split(node, [SlicedDim(place.dim)], 0)
        if not isinstance(moved, SlicedDim) or moved.before != 1:
            return None
        return BatchIndices(moved.dim, place.size)

    def _reads_seed(self, node: fx.Node) -> bool:
        seeds = {slot.node for slot in self.program.inputs if slot.kind == InputKind.SEED}
        return any(operand.name in seeds for operand in node.all_input_nodes)

    def _split(self, node: fx.Node, given: Sequence[State], scale: int) -> list[State]:
        """Return the states of a call's results by its sharding rule.

        Each operand is split into parts, or equal in all parts. `scale` is added to the exponents of the results.
        """
        rule = rule_of(self.twins[node])
        count = len(tensor_values(node))
        factor = None if rule is None else batch_factor(rule, given)
        if rule is None or factor is None or factor.name in rule.blocked or _reaches_across(node, rule, factor):
            return [Mixed(node, "mixes samples across the batch")] * count
        if knows_places(node, rule, factor.name):
            return [Mixed(node, _OF_PLACE)] * count
        if argument(node, "scale_grad_by_freq"):  # only the backward counts ids
            return [Mixed(node, "scales gradients by how often ids occur in the batch")] * count
        exponent = self._exponent(node, rule, given)
        if exponent is None:
            return [Mixed(node, "is not linear in a value that depends on the size of the batch")] * count
        present = [place for place, value in enumerate(tensor_values(node)) if value is not None]
        made: list[State] = [Same()] * count
        for index, place in enumerate(present):
            made[place] = self._result(node, rule, factor, (index, place), exponent + scale)
        return made

    def _result(self, node: fx.Node, rule: BoundRule, factor: BatchFactor, at: tuple[int, int], exponent: int) -> State:
        """Return the state of one result. `at` is its index in the rule, and its index among the call's results."""
        index, place = at
        for dim, factors in enumerate(rule.outputs[index]):
            if factor.name in factors:
                grown = _grown(tensor_values(node)[place], tensor_values(self.twins[node])[place])
                sliced = SlicedDim(dim, exponent, factor.blocks_in(factors, rule.sizes))
                return sliced if grown == dim else Mixed(node, "mixes samples across the batch")
        if rule.local is None and index in rule.whole.get(factor.name, ()):  # independent of the batch
            return Same()
        if node.target in _MEANS or argument(node, "reduction") == _MEAN_REDUCTION:
            is_counted = node.target in _COUNTED
            return Mixed(node, _USE_CROSS_ENTROPY) if is_counted else Sum(frozenset({(None, exponent + 1)}))
        is_sum = rule.is_reduced(factor.name, index) and rule.reduce[factor.name] is Reduction.SUM
        if is_sum and (rule.local is None or node.target in _SUMS):
            return Sum(frozenset({(None, exponent)}), adds_constant(node, rule))
        return Mixed(node, "is computed over the whole batch")

    def _exponent(self, node: fx.Node, rule: BoundRule, given: Sequence[State]) -> int | None:
        """Return the exponent (as in `SlicedDim`) of the results of a call whose operands are `Same` or `SlicedDim`.

        The result is None if the call is not linear in operands whose exponent is not 0.
        """
        exponents = [state.exponent for state in given if isinstance(state, Same | SlicedDim)]
        places = frozenset(index for index, exponent in enumerate(exponents) if exponent)
        if not places:
            return 0
        if len({exponents[index] for index in places}) > 1 or not _passes(rule, places):
            return None
        sign = -1 if node.target in _QUOTIENTS and places == {1} else 1
        return sign * exponents[min(places)]

    def _of_sums(self, node: fx.Node, operands: Sequence[fx.Node], given: Sequence[State], scale: int) -> State:
        """Return the state of the result of a call that reads sums over the parts."""
        if any(isinstance(state, SlicedDim) for state in given):
            return Mixed(node, "reads a sum over the batch beside samples")
        sums = [state for state in given if isinstance(state, Sum)]
        others = [state for state in given if isinstance(state, Same)]
        if node.target in _QUOTIENTS and len(given) == 2 and not isinstance(given[1], Same):
            return self._over_count(node, operands[1], given)
        if len(sums) + len(others) == len(given):
            found = self._linear(node, sums, others, given, scale)
            if found is not None:
                return found
        if self._is_of_inputs(node):
            return OfInputs()
        return Mixed(node, "is not linear in a sum over the batch")

    def _linear(
        self, node: fx.Node, sums: Sequence[Sum], others: Sequence[Same], given: Sequence[State], scale: int
    ) -> State | None:
        exponent = sum(state.exponent for state in others)
        if node.target in _SHIFTS:
            terms = frozenset[tuple[fx.Node | None, int]]().union(*(state.terms for state in sums))
            is_shifted = len(sums) < 2 and (bool(others) or any(_literals(node)))  # Python's `sum` begins with 0
            if exponent or scale:
                return None
            return Sum(terms, is_shifted or any(state.has_constant for state in sums))
        places = frozenset(index for index, state in enumerate(given) if isinstance(state, Sum))
        rule = rule_of(node)
        if rule is None or not _passes(rule, places) or len(sums) > 1 or (exponent and node.target not in _PRODUCTS):
            return None
        more = scale + (-exponent if node.target in _QUOTIENTS else exponent)
        if more and sums[0].has_constant:  # the constant is no sum, so it would be scaled otherwise
            return None
        return Sum(frozenset((count, e + more) for count, e in sums[0].terms), sums[0].has_constant)

    def _over_count(self, node: fx.Node, divisor: fx.Node, given: Sequence[State]) -> State:
        dividend = given[0]
        is_sum = isinstance(dividend, Sum)
        if not is_sum or any(count for count, _ in dividend.terms) or not self._is_of_inputs(divisor):
            return Mixed(node, "divides by a value of the whole batch that depends on more than inputs")
        if dividend.has_constant:
            return Mixed(node, "divides a term independent of the batch by a value of the whole batch")
        if divisor.meta["val"].numel() != 1:
            return Mixed(node, "divides by several values of the whole batch")
        count = self._cut_out(divisor)
        if count is None:
            return Mixed(node, "divides by a number that depends on the size of the batch")
        self.counts[divisor] = count
        return Sum(frozenset((divisor, exponent) for _, exponent in dividend.terms))

    # Counts.

    def _is_of_inputs(self, node: fx.Node) -> bool:
        """Whether a value is computed from inputs and buffers alone, without random numbers."""
        kinds = {slot.node: slot.kind for slot in self.program.inputs}
        allowed = (InputKind.INPUT, InputKind.BUFFER)
        return all(
            item.op != "placeholder" or kinds[item.name] in allowed for item in _ancestors([node]) if item is not node
        ) and not any(_is_random(item) for item in _ancestors([node]))

    def _cut_out(self, divisor: fx.Node) -> Count | None:
        """Return the graphs that compute a divisor: for a part, and for the batch from sums over all parts.

        None is returned if the second graph would depend on the size of the batch.
        """
        sums = self._sums_under(divisor)
        if sums is None:
            return None
        slots, module = {slot.node: slot for slot in self.program.inputs}, self.program.graph_module
        inputs = [node for node in _ancestors([divisor]) if node.op == "placeholder"]
        of_part = _subgraph(module, inputs, [divisor, *sums])
        of_whole = _subgraph(module, [*sums, *inputs], [divisor])
        names = tuple((str(slots[node.name].kind.value), slots[node.name].name) for node in inputs)
        return Count(of_part, of_whole, tuple(sums.values()), names)

    def _sums_under(self, divisor: fx.Node) -> dict[fx.Node, int] | None:
        """Return the sums over the batch from which a divisor is computed, each with its exponent.

        None is returned if the divisor also depends on a number that depends on the size of the batch.
        """
        found, waiting = dict[fx.Node, int](), [divisor]
        while waiting:
            node = waiting.pop()
            state = self.states[node][0]
            exponents = [e for count, e in state.terms if count is None] if isinstance(state, Sum) else []
            if isinstance(state, Sum) and len(state.terms) == len(exponents) == 1 and not state.has_constant:
                found[node] = exponents[0]
            elif isinstance(state, Sum | OfInputs):
                call, _ = resolve(node)
                if not _is_copy(call) and self._scale(call):
                    return None
                waiting += operands_of(call)
            elif state != Same():
                return None
        return found


def _are_equal(one: Any, other: Any) -> bool:
    are_known = all(isinstance(item, torch.Tensor) and not item.is_meta for item in (one, other))
    return are_known and one.dtype == other.dtype and torch.equal(one, other)


def _reaches_across(node: fx.Node, rule: BoundRule, factor: BatchFactor) -> bool:
    """Whether results for one sample may depend on other samples. Samples lie along `factor` of the sharding rule."""
    is_reduced = factor.name in rule.whole and rule.local is not None and node.target not in (*_MEANS, *_COUNTED)
    is_rewritten = rule.local is not None and _kind(node) not in _OF_ROWS
    return factor.name in rule.exchanged or is_reduced or (factor.before > 1 and is_rewritten)


def _passes(rule: BoundRule, places: frozenset[int]) -> bool:
    return places in rule.linear or (rule.transparent and places == {0})


def _grown(part: torch.Tensor | None, pair: torch.Tensor | None) -> int | None:
    """Return the dim that is twice as large in `pair`. Equal shapes give None, and any other change gives -1."""
    if part is None or pair is None or part.shape == pair.shape:
        return None
    dims = [dim for dim, (one, two) in enumerate(zip(part.shape, pair.shape, strict=True)) if one != two]
    return dims[0] if len(dims) == 1 and pair.shape[dims[0]] == 2 * part.shape[dims[0]] else -1


def _literals(node: fx.Node) -> list[Any]:
    """Return the numbers among a call's arguments, those inside lists included."""
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, int | float) and not isinstance(leaf, bool)]


def _loose(node: fx.Node) -> list[Any]:
    """Return the numbers among a call's arguments that are not inside lists, because numbers in lists are sizes."""
    return [leaf for leaf in (*node.args, *node.kwargs.values()) if isinstance(leaf, int | float)]


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _ancestors(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return `nodes`, and all nodes from which they are computed, in the order of the graph."""
    return sorted(needed(nodes))


def _subgraph(module: fx.GraphModule, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{index}") for index, node in enumerate(inputs)}
    for node in sorted(needed(results, inputs).difference(inputs)):
        copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results) if len(results) > 1 else copies[results[0]])
    return fx.GraphModule(module, graph)


_OF_PLACE = "depends on the place of a sample in its batch"
_MEAN_REDUCTION = 1
_MEANS = (aten.mean.default, aten.mean.dim)
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_COUNTED = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_OF_ROWS = (
    *(aten.view.default, aten.embedding.default, aten.native_layer_norm.default, *_MEANS, *_SUMS),
    torch.ops.autoshard.cross_entropy.default,
)
"""Operators with rewrites that do not depend on the order of samples in a dim."""

_USE_CROSS_ENTROPY = "divides by a count of its own: use cross_entropy, or divide nll_loss(reduction='sum') by a count"
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
_PRODUCTS = (*_QUOTIENTS, aten.mul.Tensor, aten.mul.Scalar)
_SHIFTS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
_SIZED = (
    *(aten.slice.Tensor, aten.narrow.default, aten.split.Tensor, aten.select.int, *COUNTS),
    aten.native_group_norm.default,
)
_ALIKE = (
    *(aten.full.default, aten.zeros.default, aten.ones.default, aten.expand.default, aten.repeat.default),
    aten.empty.memory_format,
)
"""Operators whose results have equal values for all samples."""
