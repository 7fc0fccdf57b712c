"""Results of a graph that own their memory, so that the caller may overwrite them, as in-place sums do.

A result owns its memory under three conditions. The graph allocated the memory. The result's elements do not overlap.
No other result lies in the same memory. Different parts of one bucket count as different memory; a value and its view
do not.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from autoshard.graphs.aliases import aliased_operands

_SPLIT = torch.ops.aten.split_with_sizes.default
_Part = tuple[fx.Node, int] | None
"""A call of `split_with_sizes` and the index of one of its results. None stands for the whole memory of a value."""


def owned_results(graph: fx.Graph) -> tuple[bool, ...]:
    """Return for each result of `graph` whether the caller may overwrite the result.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> total = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
        >>> total.meta["val"] = torch.ones(2)
        >>> _ = graph.output((x, total))
        >>> owned_results(graph)
        (False, True)
    """
    results: Any = graph.output_node().args[0]
    places = [_places_of(result) for result in results]
    found = defaultdict[tuple[fx.Node, Any], list[_Part]](list)
    for made, part in (place for item in places for place in item):
        found[made].append(part)
    return tuple(
        all(made[0].op == "call_function" and _lie_apart(found[made]) for made, _ in item)
        and _is_dense(result.meta.get("val"))
        for result, item in zip(results, places, strict=True)
    )


def _places_of(value: fx.Node, part: _Part = None) -> set[tuple[tuple[fx.Node, Any], _Part]]:
    """Return the places in memory where `value` may lie, each as `((maker, index), part)`.

    `maker` is the call or placeholder that the memory comes from. `index` is the index among the maker's results, or
    None for its only result. `part` is a part of this memory.
    """
    operands = aliased_operands(value)
    if value.target is operator.getitem:
        (maker,) = operands
        if not aliased_operands(maker):
            return {((maker, value.args[1]), part)}
        part = (maker, int(value.args[1])) if maker.target is _SPLIT else part  # type: ignore[arg-type]
    if not operands:
        return {((value, None), part)}
    return {place for operand in operands for place in _places_of(operand, part)}


def _lie_apart(parts: Iterable[_Part]) -> bool:
    """Whether results with the same memory do not overlap. `parts` has the part of the memory that each result uses.

    A single result overlaps nothing, and neither do different parts of one split.
    """
    parts = list(parts)
    splits = {part[0] if part is not None else None for part in parts}
    return len(parts) == 1 or (len(splits) == 1 and None not in splits and len(set(parts)) == len(parts))


def _is_dense(value: Any) -> bool:
    """Whether `value` is a tensor whose elements all have different addresses. An expanded tensor is not dense."""
    if not isinstance(value, torch.Tensor):
        return False
    span = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= span:
            return False
        span += (size - 1) * stride
    return True
