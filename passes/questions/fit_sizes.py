"""Fit the sizes of a model's values as exact polynomials in the sizes of its inputs.

1. Trace the model on a grid of input sizes. At each point of the grid, note its operators (labels) and the dims of its
   values (numbers).
2. The operators must be equal at every point. Interpolate each number over the rationals, with degree one in each
   input size. If a polynomial then fails step 3, use degree two.
3. Check each polynomial at a point outside the grid. The point has odd sizes, which reveal rounding, if the model runs
   with these sizes.

A polynomial holds outside the grid as long as the model behaves in the same way. An attention window longer than every
observed sequence goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from autoshard.errors import FormulaError, TraceError
from cost_models.formulas import Point, Size, grid, interpolate, size_symbol, value_at

InputDims = Mapping[str, int | Mapping[str, int]]
"""Symbol → the dim whose size it stands for, e.g. {"batch": 0} for dim 0 of every input.

If inputs differ in this dim, the value is a dict from the input's name to its dim, e.g. {"batch": {"input:0": 0}}.
"""

_MAX_DEGREE = 2


class DoesNotRunError(FormulaError):
    """The model does not run with some input sizes. A formula need not hold for these sizes."""


@dataclass(frozen=True, slots=True)
class InputSize:
    """An input size that is a symbol in formulas, e.g. the batch.

    Args:
        places: pairs (index of a tensor among the leaves of all arguments, dim of the tensor). These dims have this
            size.
        value: the size in the example inputs.
        step: the model is observed at multiples of this size.
    """

    name: str
    places: tuple[tuple[int, int], ...]
    value: int
    step: int = 1

    @property
    def trials(self) -> tuple[int, ...]:
        """Four sizes at which to observe the model. The first size is the size in the example inputs."""
        value = self.value
        if value >= 8 * self.step and value % (4 * self.step) == 0:
            return (value, value // 2, 3 * value // 4, value // 4)
        return (value, 2 * value, 3 * value, 4 * value)

    @property
    def odd(self) -> int:
        """A multiple of `step` that shares no other factor with the example's size."""
        return self.value - self.step if self.value >= 4 * self.step else 2 * self.value + self.step


@dataclass(frozen=True, slots=True)
class Observation:
    """The model as traced at one point of the grid: a label of each operator, and the numbers to fit.

    `owners` names, for messages, the operator or value to which each number belongs.
    """

    labels: tuple[str, ...]
    numbers: tuple[int, ...]
    owners: tuple[str, ...]


def check_dims(dims: object) -> None:
    """Raise `FormulaError` unless `dims`, an argument of a formula, is None or has the type `InputDims`."""
    if dims is not None and not isinstance(dims, Mapping):
        raise FormulaError(f"dims={dims!r} is a {type(dims).__name__}; pass a dict of symbols to dims, {{'batch': 0}}.")
    for name, given in (dims or {}).items():
        each = given.values() if isinstance(given, Mapping) else (given,)
        if not isinstance(name, str) or any(type(dim) is not int for dim in each):
            raise FormulaError(
                f"dims={{{name!r}: {given!r}}} must map the name of a symbol to a whole number, {{'batch': 0}}, or to "
                "a dict of inputs to whole numbers, {'height': {'input:0': 2}}."
            )


def input_sizes(args: Sequence[Any], kwargs: Mapping[str, Any], dims: InputDims | None) -> tuple[InputSize, ...]:
    """Return the input sizes that are symbols in formulas.

    Args:
        args, kwargs: the example inputs.
        dims: the dims of each symbol. By default, `batch` is the first dim of every input. `sequence` is the second dim
            if some input looks like sequences: integers with at least two dims, or a tensor with three dims. The
            symbol belongs to all inputs whose second dim is as long as the second dim of the first such input.

    Raises:
        FormulaError: no input has one of the dims.
    """
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    if dims is None:
        first = next((leaf for leaf in tensors.values() if _is_sequence(leaf)), None)
        sizes = [_named("batch", 0, tensors)] if any(leaf.ndim for leaf in tensors.values()) else []
        if first is not None:
            like = {index: leaf for index, leaf in tensors.items() if leaf.ndim > 1 and leaf.shape[1] == first.shape[1]}
            sizes.append(_named("sequence", 1, like))
        return tuple(sizes)
    return tuple(_named(name, dim, tensors) for name, dim in dims.items())


def _is_sequence(leaf: torch.Tensor) -> bool:
    return leaf.ndim == 3 or (leaf.ndim >= 2 and not leaf.dtype.is_floating_point)


def _named(name: str, dim: int | Mapping[str, int], tensors: Mapping[int, torch.Tensor]) -> InputSize:
    wanted = {f"input:{index}": dim for index in tensors} if isinstance(dim, int) else dim
    places = [(index, wanted[f"input:{index}"]) for index in tensors if f"input:{index}" in wanted]
    there = [(index, place) for index, place in places if 0 <= place < tensors[index].ndim]
    unknown = [] if isinstance(dim, int) else [item for item in dim if item not in {f"input:{i}" for i in tensors}]
    if not there or unknown or (not isinstance(dim, int) and len(there) < len(dim)):
        shapes = ", ".join(f"input:{index} {list(leaf.shape)}" for index, leaf in tensors.items())
        raise FormulaError(f"dims={{{name!r}: {dim!r}}} is no dim of the inputs, which are {shapes or 'no tensors'}.")
    value = int(tensors[there[0][0]].shape[there[0][1]])
    alike = tuple((index, place) for index, place in there if tensors[index].shape[place] == value)
    return InputSize(name, alike, value)


def resize(args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Sequence[InputSize], point: Point) -> tuple[Any, Any]:
    """Return the example inputs (args, kwargs) with the input sizes of `point`, one number for each of `sizes`.

    Tensors are made longer by a repetition of their content, and shorter by a cut.
    """
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for size, wanted in zip(sizes, point, strict=True):
        for index, dim in size.places:
            leaf = leaves[index]
            if leaf.shape[dim] != wanted:
                repeated = torch.arange(wanted, device=leaf.device) % leaf.shape[dim]
                leaves[index] = leaf.detach().index_select(dim, repeated)
    resized, named = pytree.tree_unflatten(leaves, tree)
    return resized, named


def fit_numbers(sizes: Sequence[InputSize], observe: Callable[[Point], Observation]) -> tuple[Size, ...]:
    """Fit each number that `observe` returns as a polynomial in `sizes`; return the polynomials in the same order.

    Args:
        observe: takes a point, which has one value for each of `sizes`, and returns the observation of the model there.

    Raises:
        FormulaError: the model runs other operators at other sizes, or a number is no polynomial of degree two.
    """
    seen: dict[Point, Observation] = {}
    base = tuple(size.value for size in sizes)

    def look(point: Point) -> Observation:
        if point not in seen:
            seen[point] = observe(point)
            _check_same(sizes, base, look(base), point, seen[point])
        return seen[point]

    def checked(degree: int) -> list[Point]:
        """Return one point outside of the grid, to check polynomials of this degree.

        It has odd sizes if the model runs with these, and otherwise `trials` that the grid does not use.
        """
        odd = tuple(size.odd for size in sizes)
        try:
            look(odd)
        except DoesNotRunError:
            return [tuple(size.trials[degree + 1] for size in sizes)]
        return [odd]

    symbols = [size_symbol(size.name) for size in sizes]
    wrong = ""
    for degree in range(1, _MAX_DEGREE + 1):
        axes = [size.trials[: degree + 1] for size in sizes]
        points = grid(axes)
        look(base)
        checks = checked(degree) if sizes else []
        columns = list(zip(*(look(point).numbers for point in (*points, *checks)), strict=True))
        known: dict[tuple[int, ...], Size] = {}
        for column in columns:
            if column not in known:
                known[column] = interpolate(symbols, axes, dict(zip(points, column, strict=False)))
        failing = next((c for c in known if not _agrees(known[c], symbols, checks, c[len(points) :])), None)
        if failing is None:
            return tuple(known[column] for column in columns)
        wrong = look(base).owners[columns.index(failing)]
    names = tuple(size.name for size in sizes)
    raise FormulaError(
        f"The size of {wrong} is no polynomial of degree {_MAX_DEGREE} in {', '.join(names)}. It is rounded, or "
        "reaches a constant limit, so no formula covers these sizes. Hold some fixed: "
        f"formula(..., fixed={names!r})."
    )


def _agrees(fitted: Size, symbols: Sequence[sympy.Symbol], checks: Sequence[Point], values: Sequence[int]) -> bool:
    return all(
        value_at(fitted, dict(zip(symbols, point, strict=True))) == value
        for point, value in zip(checks, values, strict=True)
    )


def _check_same(sizes: Sequence[InputSize], base: Point, first: Observation, point: Point, second: Observation) -> None:
    if first.labels == second.labels and len(first.numbers) == len(second.numbers):
        return
    pairs = zip(first.labels, second.labels, strict=False)
    other = next((f"{two} in place of {one}" for one, two in pairs if one != two), "more or fewer operators")
    changed = [f"{size.name}={now}" for size, was, now in zip(sizes, base, point, strict=True) if was != now]
    names = tuple(size.name for size, was, now in zip(sizes, base, point, strict=True) if was != now)
    raise FormulaError(
        f"The model runs {other} for {', '.join(changed)}, so its cost there does not follow from one graph. Give "
        f"example inputs of sizes from which on it stays the same (at least 2), or hold them fixed: "
        f"formula(..., fixed={names!r})."
    )


def cannot_resize(sizes: Sequence[InputSize], point: Point, error: TraceError) -> FormulaError:
    """Return the error to raise if the model raised `error` at the input sizes of `point`."""
    shown = ", ".join(f"{size.name}={now}" for size, now in zip(sizes, point, strict=True))
    names = tuple(size.name for size in sizes)
    return DoesNotRunError(
        f"The model does not run with {shown}, so there is no formula in these sizes. {error} Name the dims of the "
        f"inputs that may change (formula(..., dims={{'batch': 0}})), or hold some fixed: "
        f"formula(..., fixed={names!r})."
    )
