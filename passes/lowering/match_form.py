"""Finds the groups of calls in a program that have the form of a fused kernel.

A form is one way to write a kernel's computation as calls, with variables for the operands
(`autoshard.kernels.kernel.Form`). It is traced into a small graph, the pattern, which is unified with calls of the
program, from the first result up to the operands. Operators and literals must be equal. A variable matches any operand
or literal, but must match the same operand or literal wherever it occurs. Additions and multiplications match in either
order.

The program is seen as value numbers (`passes.preparation.number_values`). Nodes that compute equal values have one
number. So a repeated view is no obstacle, and the backward may read a value that the forward computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from autoshard.kernels.kernel import Form
from passes.preparation.number_values import LITERAL, OPERAND, Key, Numbering, call_key, mirrored_key

Bindings = Mapping[fx.Node, Key]
"""The operand, a value number or a literal, that each node of a pattern matches."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """The small graph of a traced form.

    Args:
        variables: placeholder of each variable, by name.
        results: node of each of the kernel's results; None for a result that the form does not compute.
        keys: operator and arguments of each call, as `call_key` returns them, with nodes of the pattern as operands.
    """

    variables: Mapping[str, fx.Node]
    results: tuple[fx.Node | None, ...]
    keys: Mapping[fx.Node, Key]

    @property
    def root(self) -> fx.Node:
        """The node of the first result, which every form computes."""
        root = self.results[0]
        assert root is not None, "a form has its first result"
        return root


@dataclass(frozen=True, slots=True)
class Match:
    """A group of calls that has a form.

    Args:
        variables: the operand of each variable, by name: a one-tuple with the operand's value number, or a literal.
        results: value number of each of the kernel's results; None for a result that the form does not compute.
        inner: value numbers of all calls of the group, results included.
    """

    variables: Mapping[str, tuple[int] | object]
    results: tuple[int | None, ...]
    inner: frozenset[int]


def trace_form(form: Form, like: Tensor) -> Pattern:
    """Return the pattern of a form whose first result has the shape, dtype and device of `like`."""
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    proxies = {name: fx.Proxy(graph.placeholder(name), tracer) for name in form.variables}
    results = form.results(like, proxies)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    keys = {node: call_key(node.op, node.target, node.args, node.kwargs, lambda operand: operand) for node in calls}
    variables = {name: proxy.node for name, proxy in proxies.items()}
    return Pattern(variables, tuple(None if item is None else item.node for item in results), keys)


@cache
def root_operator(form: Form, dtype: torch.dtype) -> Any:
    """Return the operator of the call that computes a form's first result, such as `aten.mul.Tensor`.

    The operator depends on the form and on the result's `dtype`, but not on its shape.
    """
    return trace_form(form, torch.empty([2] * (form.dims or 1), dtype=dtype, device="meta")).root.target


def find_matches(
    pattern: Pattern, numbering: Numbering, anchor: int, candidates: Callable[[Any], Iterable[int]]
) -> Iterator[Match]:
    """Yield the matches of a pattern in which the value with the number `anchor` is the pattern's first result.

    `candidates` takes an operator, and returns the value numbers of the operator's calls, in the order to try them. It
    is called for each result of the pattern that the first result is not computed from.
    """
    for bindings in _unify(pattern, numbering, (OPERAND, pattern.root), (OPERAND, anchor), {}):
        for complete in _find_results(pattern, numbering, pattern.results[1:], bindings, candidates):
            yield _match(pattern, complete)


def _find_results(
    pattern: Pattern,
    numbering: Numbering,
    results: Sequence[fx.Node | None],
    bindings: Bindings,
    candidates: Callable[[Any], Iterable[int]],
) -> Iterator[Bindings]:
    if not results:
        yield bindings
        return
    node, *rest = results
    if node is None or node in bindings:
        yield from _find_results(pattern, numbering, rest, bindings, candidates)
        return
    taken = {bindings[result][1] for result in pattern.results if result is not None and result in bindings}
    for number in candidates(node.target):
        if number in taken:
            continue
        for extended in _unify(pattern, numbering, (OPERAND, node), (OPERAND, number), bindings):
            yield from _find_results(pattern, numbering, rest, extended, candidates)


def _unify(pattern: Pattern, numbering: Numbering, wanted: Any, found: Any, bindings: Bindings) -> Iterator[Bindings]:
    """Yield each way to extend `bindings` so that `wanted` equals `found`.

    `wanted` is a part of the pattern, and `found` is a part of the program. Bindings give the program's value of each
    variable and call of the pattern.
    """
    if not isinstance(wanted, tuple) or not isinstance(found, tuple):
        if wanted == found:
            yield bindings
    elif wanted[:1] == (OPERAND,):
        yield from _unify_operand(pattern, numbering, wanted[1], found, bindings)
    elif wanted[:1] == (LITERAL,):
        if wanted == found:
            yield bindings
    elif len(wanted) == len(found):
        yield from _unify_all(pattern, numbering, wanted, found, bindings)


def _unify_operand(
    pattern: Pattern, numbering: Numbering, node: fx.Node, found: Key, bindings: Bindings
) -> Iterator[Bindings]:
    if node in bindings:
        if bindings[node] == found:
            yield bindings
    elif node.op == "placeholder":
        if found[0] in (OPERAND, LITERAL):
            yield {**bindings, node: found}
    elif found[0] == OPERAND:
        key = numbering.key_of(found[1])
        for wanted in _orders(pattern.keys[node]):
            for extended in _unify(pattern, numbering, wanted, key, bindings):
                yield {**extended, node: found}


def _unify_all(
    pattern: Pattern, numbering: Numbering, wanted: Sequence[Any], found: Sequence[Any], bindings: Bindings
) -> Iterator[Bindings]:
    if not wanted:
        yield bindings
        return
    for extended in _unify(pattern, numbering, wanted[0], found[0], bindings):
        yield from _unify_all(pattern, numbering, wanted[1:], found[1:], extended)


def _orders(key: Key) -> Iterator[Key]:
    """Yield a call's key, and for an addition or multiplication also the key with exchanged operands."""
    yield key
    mirrored = mirrored_key(key)
    if mirrored is not None:
        yield mirrored


def _match(pattern: Pattern, bindings: Bindings) -> Match:
    return Match(
        variables={name: _value(bindings[node]) for name, node in pattern.variables.items() if node in bindings},
        results=tuple(None if node is None else bindings[node][1] for node in pattern.results),
        inner=frozenset(key[1] for node, key in bindings.items() if node.op == "call_function"),
    )


def _value(key: Key) -> tuple[int] | object:
    if key[0] == OPERAND:
        return (key[1],)
    _, kind, value = key
    return kind(value) if kind in (float, complex) else value
