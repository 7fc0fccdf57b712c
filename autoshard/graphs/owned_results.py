"""Results of a graph that own their memory, so that the caller may overwrite the results.

A result may be added to in place if the graph allocated its memory, its elements do not overlap, and no other result
lies there. Two results may be parts of one bucket, but not a value and its view.
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
"""A split and the index of its result, or None for all of a value's memory."""


def owned_results(graph: fx.Graph) -> tuple[bool, ...]:
    """Whether each result of a graph may be written over.

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
    """The calls and inputs in whose memory a value may lie, with the result index and the part."""
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
    """Whether results in one memory are different parts of one split, or there is only one result."""
    parts = list(parts)
    splits = {part[0] if part is not None else None for part in parts}
    return len(parts) == 1 or (len(splits) == 1 and None not in splits and len(set(parts)) == len(parts))


def _is_dense(value: Any) -> bool:
    """Whether the elements of a tensor lie apart in memory: an expanded one's do not."""
    if not isinstance(value, torch.Tensor):
        return False
    span = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= span:
            return False
        span += (size - 1) * stride
    return True
