"""Run one call under one strategy on all ranks, and compare the results with one device's.

The module is the reference of sharding rules: every strategy of a rule must give one device's results. Partial operands
are cut into random addends, so that a nonlinear operator cannot pass by chance. Padding of uneven pieces is poisoned by
NaN and integers out of range, so that a read of padding is found. Differences near rounding are settled in float64.
Rounding shrinks there by a factor of 2e-9, and a fault does not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree

from autoshard.ir.boundary import shard_all, unshard
from autoshard.ir.mesh import Mesh
from autoshard.ir.reduction import identity_of
from autoshard.ir.spec import PartitionSpec, Reduction
from autoshard.rules.emit_local import emit_local
from autoshard.rules.enumeration import Strategy, enumerate_strategies
from autoshard.rules.notation import BoundRule
from autoshard.rules.registry import bound_rule, tensor_operands
from autoshard.runtime.simulator import simulate

_LOGGER = logging.getLogger(__name__)


def results_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensor results of a call on one device, in order."""
    with torch.no_grad():
        return [leaf for leaf in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The global results of a strategy, and the distinct pieces of operands and results on the ranks."""

    results: list[Tensor]
    pieces: list[Tensor]

    def largest(self) -> float:
        """The largest finite number among the pieces."""
        return max(map(_largest, self.pieces), default=0.0)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A call under one strategy, and its results on one device."""

    op: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    strategy: Strategy
    mesh: Mesh
    expected: Sequence[Tensor]

    def run(self, rule: BoundRule) -> _Outcome:
        """Run the strategy on all ranks; raise `AutoshardError` if copies on ranks differ."""
        shapes = [tuple(result.shape) for result in self.expected]
        program, operands = local_program(self.op, self.args, self.kwargs, rule, self.strategy, self.mesh)
        inputs = [_pieces(x, spec, self.mesh) for x, spec in zip(operands, self.strategy.inputs, strict=True)]
        results = [leaf for leaf in _transposed(simulate(program, self.mesh, inputs), self.mesh) if leaf[0] is not None]
        found = [
            unshard([_plain(piece) for piece in pieces], spec, self.mesh, shape, check=True)
            for pieces, spec, shape in zip(results, self.strategy.outputs, shapes, strict=True)
        ]
        return _Outcome(found, list({id(piece): piece for pieces in (*inputs, *results) for piece in pieces}.values()))

    def compare(self, found: _Outcome, slack: float = 1.0) -> None:
        """Raise `AssertionError` if a result differs by more than `slack` times the allowed difference."""
        tensors = [*tensor_operands(self.args, self.kwargs), *self.expected]
        coarsest = slack * max(map(_tolerance, tensors), default=0.0)
        epsilon = max(map(_epsilon, tensors), default=0.0) if _has_pending_sum(self.strategy) else 0.0
        rounded = slack * epsilon * found.largest() * _ROUNDINGS if epsilon else 0.0
        for index, (ours, theirs) in enumerate(zip(found.results, self.expected, strict=True)):
            tolerance = coarsest if _tolerance(theirs) else 0.0
            name = f"{self.op} result {index} under {self.strategy} on {self.mesh}"
            torch.testing.assert_close(
                ours, _plain(theirs), equal_nan=True, check_stride=False,
                rtol=tolerance, atol=tolerance + rounded if tolerance else 0.0,
                msg=lambda message, name=name: f"{name}:\n{message}",
            )  # fmt: skip

    def is_close(self, found: _Outcome, slack: float = 1.0) -> bool:
        """Whether `compare` raises nothing."""
        try:
            self.compare(found, slack)
        except AssertionError:
            return False
        return True

    def in_double(self) -> _Trial | None:
        """Return the call in double precision; None if no operand changes, or the operator refuses doubles."""
        args, kwargs = pytree.tree_map(_doubled, (tuple(self.args), dict(self.kwargs)))
        pairs = zip(tensor_operands(self.args, self.kwargs), tensor_operands(args, kwargs), strict=True)
        if all(narrow.dtype == wide.dtype for narrow, wide in pairs):
            return None
        try:
            expected = results_of(self.op, args, kwargs)
        except (RuntimeError, TypeError) as error:
            _LOGGER.info("%s cannot be run in double precision: %s", self.op, error)
            return None
        return _Trial(self.op, args, kwargs, self.strategy, self.mesh, expected)


def check_strategy(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: BoundRule,
    strategy: Strategy,
    mesh: Mesh,
    *,
    expected: Sequence[Tensor] | None = None,
) -> None:
    """Raise `AssertionError` unless `strategy` gives one device's results (`expected`, if known).

    The rounding of pending addends is allowed too, because addends may be far larger than their sum. A difference of up
    to `_SUSPICIOUS` times the allowed difference passes if it is rounding. The strategy must then agree with the call
    in float64.
    """
    expected = results_of(op, args, kwargs) if expected is None else expected
    trial = _Trial(op, args, kwargs, strategy, mesh, expected)
    found = trial.run(rule)
    try:
        trial.compare(found)
    except AssertionError:
        if not _was_rounding(trial, found):
            raise


def _was_rounding(trial: _Trial, found: _Outcome) -> bool:
    """Whether a difference is small enough for rounding, and the strategy exists and agrees in float64."""
    wide = trial.in_double()
    if wide is None or not trial.is_close(found, slack=_SUSPICIOUS):
        return False
    rule = bound_rule(wide.op, wide.args, wide.kwargs, wide.expected)
    if rule is None or wide.strategy not in enumerate_strategies(rule, wide.mesh):
        return False
    return wide.is_close(wide.run(rule))


def _has_pending_sum(strategy: Strategy) -> bool:
    specs = (*strategy.inputs, *strategy.outputs)
    return any(reduction is Reduction.SUM for spec in specs for _, reduction in spec.partial)


def local_program(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: BoundRule,
    strategy: Strategy,
    mesh: Mesh,
) -> tuple[fx.Graph, list[Tensor]]:
    """The program of one rank for one call, and the global tensors that its placeholders stand for.

    The program returns the flattened results.
    """
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    operands: list[Tensor] = []

    def placeholder(tensor: Tensor) -> fx.Proxy:
        operands.append(tensor)
        return fx.Proxy(graph.placeholder(f"operand_{len(operands)}"), tracer)

    local_args, local_kwargs = pytree.tree_map_only(Tensor, placeholder, (tuple(args), dict(kwargs)))
    result = emit_local(op, local_args, local_kwargs, rule, strategy, mesh, tracer=tracer)
    leaves = pytree.tree_leaves(result, _is_none)
    graph.output(tuple(leaf.node if isinstance(leaf, fx.Proxy) else leaf for leaf in leaves))
    return graph, operands


def _transposed(outputs: Sequence[Any], mesh: Mesh) -> Iterator[list[Any]]:
    """Return, for each flat result, its value on each rank; a rank's value may be a tuple of results."""
    by_rank = [pytree.tree_leaves([value[rank] for value in outputs], _is_none) for rank in range(mesh.size)]
    return (list(values) for values in zip(*by_rank, strict=True))


def _is_none(value: Any) -> bool:
    return value is None


def _pieces(tensor: Tensor, spec: PartitionSpec, mesh: Mesh) -> list[Tensor]:
    """Return each rank's piece of `tensor`, with random addends over the partial axes; copies are one tensor."""
    whole = PartitionSpec(*spec.dims)
    axes = [axis for axis, _ in spec.partial]
    places = list(product(*(range(mesh.axis_size(axis)) for axis in axes)))
    reduction = next((reduction for _, reduction in spec.partial), Reduction.SUM)
    parts = addends(_plain(tensor), reduction, len(places))
    held = {
        place: shard_all(part, whole, mesh, padding=_poison(tensor.dtype))
        for place, part in zip(places, parts, strict=True)
    }
    ranks = enumerate(map(mesh.coordinates, range(mesh.size)))
    return [held[tuple(place[axis] for axis in axes)][rank] for rank, place in ranks]


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def addends(tensor: Tensor, reduction: Reduction, count: int) -> list[Tensor]:
    """Return `count` random tensors that reduce to `tensor`; each differs from the sum at some elements."""
    if count == 1:
        return [tensor]
    return _ADDENDS[reduction](_plain(tensor), count)


def _summands(x: Tensor, count: int) -> list[Tensor]:
    if x.dtype == torch.bool:
        return [x & mask for mask in _owners(x, count)]
    noise = [_noise(x) for _ in range(count - 1)]
    return [*noise, x - sum(noise)]


def _below(x: Tensor, count: int) -> list[Tensor]:
    """Return pieces for a maximum: some rank has each element, and the remaining ranks have less, or padding."""
    if x.dtype == torch.bool:
        return [x & (mask | (torch.rand(x.shape) > 0.5)) for mask in _owners(x, count)]
    lower = (torch.minimum(x, x - _noise(x).abs()) for _ in range(count))  # an integer that wraps round is not below
    return [
        torch.where(mask, x, _or_identity(y, Reduction.MAX)) for mask, y in zip(_owners(x, count), lower, strict=True)
    ]


def _above(x: Tensor, count: int) -> list[Tensor]:
    if x.dtype == torch.bool:
        return [x | ~(mask | (torch.rand(x.shape) > 0.5)) for mask in _owners(x, count)]
    upper = (torch.maximum(x, x + _noise(x).abs()) for _ in range(count))
    return [
        torch.where(mask, x, _or_identity(y, Reduction.MIN)) for mask, y in zip(_owners(x, count), upper, strict=True)
    ]


def _or_identity(x: Tensor, reduction: Reduction) -> Tensor:
    return torch.where(torch.rand(x.shape, device=x.device) < 0.2, identity_of(reduction, x.dtype), x).to(x.dtype)


def _factors(x: Tensor, count: int) -> list[Tensor]:
    """Return random factors of `x`: 1 or -1 for integers, else also 2 or -2, which neither round nor overflow."""
    if x.dtype in (torch.bool, torch.uint8):
        return [torch.where(mask, x, torch.ones_like(x)) for mask in _owners(x, count)]
    factors = [torch.randint(0, 2, x.shape, device=x.device).mul(2).sub(1).to(x.dtype) for _ in range(count - 1)]
    if _is_number(x):
        factors = [factor * (1 + torch.randint(0, 2, x.shape, device=x.device)).to(x.dtype) for factor in factors]
        return [*factors, x / math.prod(factors)]
    return [*factors, x * math.prod(factors)]


_ADDENDS = {
    Reduction.SUM: _summands,
    Reduction.MAX: _below,
    Reduction.MIN: _above,
    Reduction.PRODUCT: _factors,
}


def _noise(x: Tensor) -> Tensor:
    """Return random numbers of the size of `x`, with integers if `x` has integers, so that equal numbers occur."""
    if _is_number(x):
        noise = torch.randn_like(x) * _size(x)
        return (2 * noise).round() if not x.is_complex() and bool((x == x.round()).all()) else noise
    return torch.randint(0, 2 if x.dtype in (torch.bool, torch.uint8) else 5, x.shape, device=x.device).to(x.dtype)


def _size(x: Tensor) -> float:
    """Return the largest finite absolute value of `x`, but at least 1 and at most 100."""
    return min(max(_largest(x), 1.0), 100.0)


def _largest(x: Tensor) -> float:
    """Return the largest finite absolute value, or 0."""
    if not _is_number(x):
        return 0.0
    wide = x if x.is_complex() else x.double()  # eight-bit floats cannot say what is finite
    return float(wide.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0


def _owners(x: Tensor, count: int) -> list[Tensor]:
    """Return masks that are true at each element for one of `count` owners."""
    owner = torch.randint(0, count, x.shape, device=x.device)
    return [owner == index for index in range(count)]


def _plain(x: Tensor) -> Tensor:
    """Return the values of `x` without gradient and lazy views; a plain `x` is returned itself."""
    return (x.detach() if x.requires_grad else x).resolve_conj().resolve_neg()


def _doubled(leaf: Any) -> Any:
    """Return a tensor or type of floats in double precision, and other values unchanged."""
    if isinstance(leaf, Tensor) and _is_number(leaf):
        return leaf.to(_DOUBLE[leaf.is_complex()])
    if isinstance(leaf, torch.dtype) and (leaf.is_floating_point or leaf.is_complex):
        return _DOUBLE[leaf.is_complex]
    return leaf


_DOUBLE = {False: torch.float64, True: torch.complex128}
"""Double types, for real and complex numbers."""


def _is_number(x: Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def _tolerance(x: Tensor) -> float:
    if not _is_number(x):
        return 0.0
    return _TOLERANCES.get(x.dtype, 1e-4)


def _epsilon(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps if _is_number(x) else 0.0


_ROUNDINGS = 16
"""How often addends may be rounded on their way through one operator and a sum over the ranks."""

_SUSPICIOUS = 16.0
"""A difference of up to this multiple of the allowed difference is checked again in float64."""

_TOLERANCES = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float16: 1e-2,
    torch.complex32: 1e-2,
    torch.bfloat16: 1e-1,
}
