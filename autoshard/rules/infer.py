"""Finds the sharding rule of an operator by running it on shards.

1. Find the dims of the operands that must have equal sizes. Each set of such dims may be a factor (`sampling`).
2. Draw operands of several sizes and values, and run the operator on the whole operands.
3. For each factor, cut the operands along it, and run the operator on each piece. For each result, keep the ways in
   which the pieces make up the whole: concatenated along a dim, reduced, or all equal. If no way works, also cut other
   operands, such as the bias of a product, into random addends.
4. For each set of operands, cut them into random addends. If the results add up, the operator is linear in the set.

The rule has the factors that work on all draws. A factor that fails once, or that cannot be tried at two sizes, is
blocked. This is evidence and no proof, so `registry.inferred_operators` lists inferred rules. The idea of finding
parallel dims by execution follows EasyDist's ShardCombine (Alibaba, 2023). Redrawn sizes, addends and linearity are
additions of autoshard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import OperatorError, RuleInferenceError
from autoshard.ir.text import first_line
from autoshard.rules.notation import Dims, OperandCondition, Rule, bind, parse, render
from autoshard.rules.registry import checked_operator, has_rule, mark_inferred, sharding_rule, tensor_operands
from autoshard.rules.sampling import (
    REFUSALS,
    SampledCall,
    Sampler,
    TiedDims,
    Trial,
    agree,
    call_of,
    computable,
    is_additive,
)

Outcome = int | str
"""The way in which the pieces of a result make up the whole result.

It is the dim along which the pieces are concatenated, or the reduction of the pieces ("sum", "max", "min"). "whole"
means that each piece equals the whole.
"""

_REDUCERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}
_REDUCTIONS = tuple(_REDUCERS)
_DRAWS = 4
_FEWEST_TRIALS = 4
_MOST_OPERANDS_FOR_ALL_SETS = 5


@dataclass(frozen=True, slots=True)
class FoundFactor:
    """A factor that the operator's calls may be split along.

    Args:
        tie: the operand dims that have the factor.
        outcomes: for each result, the way in which its pieces make up the whole.
        added: indices of operands that must be partial sums if the factor is split.
    """

    tie: TiedDims
    outcomes: tuple[Outcome, ...]
    added: frozenset[int]

    @property
    def reduction(self) -> str | None:
        """The reduction of results over this factor, or None if every result is concatenated or whole."""
        return next((outcome for outcome in self.outcomes if outcome in _REDUCTIONS), None)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Case:
    """An inferred rule, and the text `kind` that `_kind_of_call` returns for the calls that the rule covers."""

    kind: str
    rule: Rule


def infer_rule(operator: Any, sample_inputs: Sequence[Any] | Mapping[str, Any]) -> Rule:
    """Find the sharding rule of an operator by running it on pieces of tensors, register the rule, and return it.

    The rule covers calls like the sample: operands with the same numbers of dims, and equal other arguments. It allows
    even splits only. To cover other calls, call again with another sample. Calls without a rule run whole on every
    rank. Under `torchrun`, all ranks must call this, because each process has its own rules.

    Args:
        operator: a `torch.ops` overload, or the result of `torch.library.custom_op` or `triton_op`.
        sample_inputs: a tuple of positional arguments or a dict of keyword arguments, with tensors that have data. A
            dim of size one counts as size one in all calls. Give other dims sizes of 2 or more, different where
            possible. Use small tensors, because the operator runs hundreds of times.

    Returns:
        The rule. Dims that cannot be split are `_`.

    Raises:
        RuleInferenceError: the operator is random, writes to an operand, returns no tensors, or fails on most generated
            operands. Or the sample has tensors on the meta device. Write the rule with `sharding_rule`.
        OperatorError: `operator` is not an operator, has a rule written by hand, or raises an error for the sample.

    Example:
        >>> @torch.library.custom_op("autoshard_doctest::scaled_sum", mutates_args=())
        ... def scaled_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ...     return (x * w).sum(0)
        >>> print(infer_rule(scaled_sum, (torch.randn(6, 4), torch.randn(4))))
        a b, b -> b  (a: sum; linear in (0), (1))
    """
    operator = checked_operator(operator)
    known = _cases.get(operator)
    if known is None and has_rule(operator):
        raise OperatorError(f"{operator} already has a sharding rule; there is nothing to infer.")
    if not isinstance(sample_inputs, tuple | list | Mapping):
        raise OperatorError(
            f"infer_rule({operator}, ...): sample_inputs is a {type(sample_inputs).__name__}; pass a tuple of "
            "positional or a dict of keyword arguments."
        )
    args, kwargs = ((), sample_inputs) if isinstance(sample_inputs, Mapping) else (sample_inputs, {})
    rule = find_rule(operator, args, kwargs)
    if known is None:
        known = _cases[operator] = []
        sharding_rule(operator)(_rule_function(operator))
    known.insert(0, _Case(_kind_of_call(operator, args, kwargs), rule))
    mark_inferred(operator, tuple(str(case.rule) for case in known))
    return rule


_cases: dict[Any, list[_Case]] = {}


def _rule_function(operator: Any) -> Any:
    """Return the rule function of an operator with inferred rules.

    Inferred rules only allow even splits, because inference does not try padding.
    """

    def inferred(*args: Any, **kwargs: Any) -> Rule | None:
        kind = _kind_of_call(operator, args, kwargs)
        shapes = [tuple(x.shape) for x in tensor_operands(args, kwargs)]
        fitting = (case.rule for case in _cases[operator] if case.kind == kind and _fits(case.rule, shapes))
        rule = next(fitting, None)
        return rule and replace(rule, even=("*",))

    return inferred


def _kind_of_call(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the arguments of a call by name as text, with tensors as kind of number and number of dims: "float[2]"."""
    arguments = {a.name: a.default_value for a in operator._schema.arguments}
    arguments.update(zip(arguments, args, strict=False))
    arguments.update(kwargs)
    return repr({name: _kind_of(value) for name, value in arguments.items()})


def _kind_of(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_kind_of(item) for item in value]
    if isinstance(value, torch.device):
        return "device"
    return _kind_of_tensor(value) if isinstance(value, Tensor) else value


def _kind_of_tensor(x: Tensor) -> str:
    kinds = {"float": x.is_floating_point(), "complex": x.is_complex(), "bool": x.dtype == torch.bool}
    return f"{next((kind for kind, has in kinds.items() if has), 'integer')}[{x.dim()}]"


def _fits(rule: Rule, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether operands of these shapes fit an inferred rule.

    All dims with one factor must have one size, and dims without a factor must have size one.
    """
    assert isinstance(rule.notation, str)
    operands, _ = parse(rule.notation)
    sizes: dict[str, set[int]] = {"1": {1}}
    for dims, shape in zip(operands, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            sizes.setdefault(dim[0] if dim else "1", set()).add(size)
    return all(len(found) == 1 for name, found in sizes.items() if name != "_")


def find_rule(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule:
    """Return the sharding rule that holds for all drawn operands of an operator. The rule is not registered."""
    call, sample = call_of(operator, args, kwargs)
    _check_operator(call, sample)
    sampler = Sampler(call, sample).in_widest_type()
    ties = sampler.ties()
    trials = list(sampler.trials(ties, _DRAWS))
    _check_trials(call, trials)
    factors = [found for tie in ties if (found := _find_factor(sampler, tie, trials)) is not None]
    rule = _assemble(sampler, _compatible(factors), trials)
    for trial in trials:
        bind(rule, [x.shape for x in trial.operands], [x.shape for x in trial.results])
    return rule


def _check_operator(call: SampledCall, sample: Sequence[Tensor]) -> None:
    name, schema = str(call.operator), call.operator._schema
    if schema.is_mutable:
        raise RuleInferenceError(
            f"{name} writes to an operand ({schema}); a rule needs an operator without side effects."
        )
    if torch.Tag.nondeterministic_seeded in call.operator.tags:
        raise RuleInferenceError(f"{name} draws random numbers, which must not depend on the mesh. {_BY_HAND}")
    if any(x.is_meta for x in sample):
        raise RuleInferenceError(f"{name} must be run to find its rule; sample_inputs has tensors without data (meta).")
    before = [x.clone() for x in sample]
    results, again = _run(call, sample), _run(call, sample)
    if not results:
        raise RuleInferenceError(f"{name} gives no tensors ({schema}); there is nothing to split.")
    if not all(_are_equal(x, y) for x, y in zip(before, sample, strict=True)):
        raise RuleInferenceError(f"{name} changes its operands, though its schema does not say so ({schema}).")
    if not all(agree(x, y) for x, y in zip(results, again, strict=True)):
        raise RuleInferenceError(f"{name} gives other results when it is run again: it is random. {_BY_HAND}")


def _are_equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(computable(x).nan_to_num(), computable(y).nan_to_num())


def _run(call: SampledCall, sample: Sequence[Tensor]) -> Sequence[Tensor]:
    try:
        return call.run(sample)
    except REFUSALS as error:
        raise OperatorError(
            f"{call.operator} refuses sample_inputs: {first_line(error)} Pass one call's arguments, a tuple "
            "of positional or a dict of keyword arguments."
        ) from error


_BY_HAND = "Write its rule by hand, with @autoshard.sharding_rule."


def _check_trials(call: SampledCall, trials: Sequence[Trial]) -> None:
    ranks = {tuple(x.dim() for x in trial.results) for trial in trials}
    if len(ranks) != 1:
        raise RuleInferenceError(f"{call.operator}: the ranks of its results vary, {sorted(ranks)}. {_BY_HAND}")
    if len(trials) < _FEWEST_TRIALS:
        raise RuleInferenceError(
            f"{call.operator} accepts the sample, but only {len(trials) - 1} draws with other sizes and values: "
            f"too few to trust a rule. {_BY_HAND}"
        )


def _find_factor(sampler: Sampler, tie: TiedDims, trials: Sequence[Trial]) -> FoundFactor | None:
    """Return the factor of the operand dims `tie`, or None if a split of these dims is wrong in some trial."""
    carriers = {operand for operand, _ in tie}
    addends = [i for i in _additive(sampler.sample) if i not in carriers]
    for added in chain([()], combinations(addends, 1), combinations(addends, 2)):
        outcomes = _outcomes(sampler, tie, frozenset(added), trials)
        chosen = _choose(tie, outcomes, trials)
        if chosen is not None:
            found = FoundFactor(tie, chosen, frozenset(added))
            if not added or found.reduction == "sum":
                return found
    return None


def _outcomes(sampler: Sampler, tie: TiedDims, added: frozenset[int], trials: Sequence[Trial]) -> list[set[Outcome]]:
    """Return, for each result, the outcomes that hold in all trials if the dims `tie` are split.

    The operands `added` are cut into addends. If no two trials split `tie` at different sizes, some set is empty.
    """
    found: list[set[Outcome]] = [
        {*range(x.dim()), "whole", *(_REDUCTIONS if _has_order(x) else ())} for x in trials[0].results
    ]
    sizes = set()
    for trial in trials:
        for pieces in _piece_counts(trial.size(tie)):
            parts = [sampler.call.attempt(operands) for operands in _cut(sampler, tie, added, trial, pieces)]
            found = [
                {
                    outcome
                    for outcome in outcomes
                    if _makes_up(outcome, [None if part is None else part[i] for part in parts], whole)
                }
                for i, (outcomes, whole) in enumerate(zip(found, trial.results, strict=True))
            ]
            sizes.add(trial.size(tie))
            if not all(found):
                return found
    return found if len(sizes) > 1 else [set() for _ in found]


def _has_order(x: Tensor) -> bool:
    """Whether torch computes maxima and sums of the elements of `x`. Booleans and floats of 8 bits are left out."""
    return x.dtype != torch.bool and not x.is_complex() and computable(x) is x


def _piece_counts(size: int) -> list[int]:
    """Return the numbers of pieces to try for a factor of this size: the divisors among 2, 3 and `size`, up to 8."""
    return [count for count in (2, 3, size) if count > 1 and size % count == 0 and count <= 8]


def _cut(
    sampler: Sampler, tie: TiedDims, added: frozenset[int], trial: Trial, pieces: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield, for each of `pieces` pieces, the operands with which to run the call.

    Operands are sliced along the dims of `tie`, or cut into addends if in `added`. All other operands are whole.
    """
    split: list[Sequence[Tensor]] = []
    for index, operand in enumerate(trial.operands):
        parts: Sequence[Tensor] = [operand] * pieces
        if index in added:
            parts = sampler.addends(operand, pieces)
        for dim in sorted(dim for carrier, dim in tie if carrier == index):
            parts = [part.chunk(pieces, dim)[rank].contiguous() for rank, part in enumerate(parts)]
        split.append(parts)
    return iter(zip(*split, strict=True))


def _makes_up(outcome: Outcome, parts: Sequence[Tensor | None], whole: Tensor) -> bool:
    """Whether the results `parts` of the pieces make up the result `whole` in the way `outcome`.

    A part is None if the operator raised an error for the piece.
    """
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len({part.shape for part in present}) != 1:
        return False
    if present[0].dim() != whole.dim() or present[0].dtype != whole.dtype:
        return False
    if isinstance(outcome, int):
        return agree(torch.cat(present, outcome), whole)
    if present[0].shape != whole.shape:
        return False
    if outcome == "whole":
        return all(agree(part, whole) for part in present)
    return agree(_REDUCERS[outcome](torch.stack(present)), whole)


def _choose(tie: TiedDims, outcomes: Sequence[set[Outcome]], trials: Sequence[Trial]) -> tuple[Outcome, ...] | None:
    """Return one outcome for each result, or None if some result has no outcome.

    A dim is preferred to "whole", and "whole" to a reduction. All reduced results have the same reduction.
    """
    for reduction in _REDUCTIONS:
        chosen = [_best(tie, index, found, reduction, trials) for index, found in enumerate(outcomes)]
        if all(outcome is not None for outcome in chosen):
            return tuple(outcome for outcome in chosen if outcome is not None)
    return None


def _best(tie: TiedDims, index: int, found: set[Outcome], reduction: str, trials: Sequence[Trial]) -> Outcome | None:
    dims = [outcome for outcome in sorted(found, key=str) if isinstance(outcome, int)]
    for dim in dims:
        if all(trial.results[index].shape[dim] % trial.size(tie) == 0 for trial in trials):
            return dim
    return next((outcome for outcome in ("whole", reduction) if outcome in found), None)


def _compatible(factors: Sequence[FoundFactor]) -> list[FoundFactor]:
    """Return the factors that fit into one rule. If two factors conflict, only the earlier one is returned.

    Two factors must not be concatenated along the same result dim. All reduced factors must need the same operands as
    addends.
    """
    kept: list[FoundFactor] = []
    for factor in factors:
        taken = {(i, outcome) for other in kept for i, outcome in enumerate(other.outcomes) if isinstance(outcome, int)}
        is_free = not taken & set(enumerate(factor.outcomes))
        reduced = [other for other in kept if other.reduction]
        if is_free and (factor.reduction is None or all(other.added == factor.added for other in reduced)):
            kept.append(factor)
    return kept


def _assemble(sampler: Sampler, factors: Sequence[FoundFactor], trials: Sequence[Trial]) -> Rule:
    """Return the rule with the found `factors`, and with the linearity that holds in all trials (`_linear_sets`)."""
    names = {factor: _name(position) for position, factor in enumerate(factors)}
    operands = tuple(_operand_dims(index, x, names) for index, x in enumerate(sampler.sample))
    results = tuple(_result_dims(index, names, trials) for index in range(len(trials[0].results)))
    whole = {
        name: tuple(i for i, outcome in enumerate(factor.outcomes) if outcome == "whole")
        for factor, name in names.items()
    }
    return Rule(
        f"{render(operands)} -> {render(results)}",
        reduce={name: factor.reduction for factor, name in names.items() if factor.reduction is not None},
        linear=_linear_sets(sampler, trials),
        beside=dict.fromkeys(range(len(sampler.sample)), OperandCondition.NEVER),  # trials do not reveal poles
        added=sorted({index for factor in factors for index in factor.added}),
        whole={name: results for name, results in whole.items() if results},
    )


def _name(position: int) -> str:
    return chr(ord("a") + position) if position < 26 else f"f{position}"


def _operand_dims(index: int, operand: Tensor, names: Mapping[FoundFactor, str]) -> Dims:
    owners = {dim: (name,) for factor, name in names.items() for carrier, dim in factor.tie if carrier == index}
    return tuple(owners.get(dim, () if size == 1 else ("_",)) for dim, size in enumerate(operand.shape))


def _result_dims(index: int, names: Mapping[FoundFactor, str], trials: Sequence[Trial]) -> Dims:
    owners = {factor.outcomes[index]: (factor, name) for factor, name in names.items()}
    return tuple(_result_dim(index, dim, owners.get(dim), trials) for dim in range(trials[0].results[index].dim()))


def _result_dim(
    index: int, dim: int, owner: tuple[FoundFactor, str] | None, trials: Sequence[Trial]
) -> tuple[str, ...]:
    """Return the factors of dim `dim` of result `index`. `owner` is the found factor along the dim, with its name.

    If the dim is larger than the factor in some trial, a blocked minor factor `_` follows the name. Without an owner,
    the dim is blocked, or has no factor if its size is one in all trials.
    """
    sizes = [trial.results[index].shape[dim] for trial in trials]
    if owner is None:
        return () if set(sizes) == {1} else ("_",)
    factor, name = owner
    is_factor = all(size == trial.size(factor.tie) for size, trial in zip(sizes, trials, strict=True))
    return (name,) if is_factor else (name, "_")


def _linear_sets(sampler: Sampler, trials: Sequence[Trial]) -> list[tuple[int, ...]]:
    """Return the sets of operand indices in which all results are jointly linear in all trials.

    With more than `_MOST_OPERANDS_FOR_ALL_SETS` additive operands, only sets of one or two operands are tried.
    """
    if not all(map(is_additive, trials[0].results)):
        return []
    additive = _additive(sampler.sample)
    largest = len(additive) if len(additive) <= _MOST_OPERANDS_FOR_ALL_SETS else 2
    sets = chain.from_iterable(combinations(additive, size) for size in range(1, largest + 1))
    return [chosen for chosen in sets if all(_is_linear(sampler, chosen, trial) for trial in trials)]


def _is_linear(sampler: Sampler, chosen: Sequence[int], trial: Trial) -> bool:
    """Whether results add up to the whole results if the operands `chosen` are cut into random addends."""
    for count in (2, 3):
        cut = [sampler.addends(x, count) if index in chosen else [x] * count for index, x in enumerate(trial.operands)]
        parts = [sampler.call.attempt(operands) for operands in zip(*cut, strict=True)]
        for index, whole in enumerate(trial.results):
            if not _makes_up("sum", [None if part is None else part[index] for part in parts], whole):
                return False
    return True


def _additive(operands: Sequence[Tensor]) -> list[int]:
    return [index for index, operand in enumerate(operands) if is_additive(operand)]
