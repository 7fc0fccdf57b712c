"""Keeps checks of tensor values in a program, so that an error on one device is also an error on a mesh.

`aten._assert_async` and `aten._linalg_check_errors` have no result, so dead code elimination would remove them. Each
check becomes an `autoshard::checked` call, which takes a result of the program and returns it unchanged. A check in the
forward takes the smallest output. A check in the backward, which depends on a tangent, takes the smallest gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors as aot
from torch._library import simple_registry
from torch.fx import node as fx_node

from autoshard.kernels.checks import checked

_aten = torch.ops.aten
_FACTORISATION = _aten._linalg_check_errors.default
_CHECKS = (_aten._assert_async.default, _aten._assert_async.msg, _FACTORISATION)


@contextlib.contextmanager
def keeping_checks() -> Iterator[None]:
    """Within the context, trace the error checks of factorisations as plain calls.

    torch would give each a token that keeps their order.
    """
    effect = simple_registry.singleton.find(_FACTORISATION._name).effect
    before, is_known = effect.effect, _FACTORISATION in fx_node._side_effectful_functions
    effect.register(None)
    fx_node._side_effectful_functions.add(_FACTORISATION)
    try:
        yield
    finally:
        effect.register(before)
        if not is_known:
            fx_node._side_effectful_functions.discard(_FACTORISATION)


def tie_checks(graph: fx.Graph, outputs: int) -> None:
    """Make each check of tensor values an operand of a result, so that it is not dead code. Changes the graph in place.

    The first `outputs` plain results of the graph are the model's outputs. The plain results behind them are tensors
    whose values Python code read, which AOTAutograd's descriptors do not tell apart from outputs.
    """
    output = graph.output_node()
    results, kinds = list(output.args[0]), output.meta["desc"]  # type: ignore[arg-type]
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if isinstance(node.meta.get("desc"), aot.TangentAOTInput) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
        if node.target not in _CHECKS:
            continue
        fitting = [
            (result.meta["val"].numel(), index)
            for index, (result, kind) in enumerate(zip(results, kinds, strict=True))
            if isinstance(result, fx.Node) and _goes_with(kind, outputs, is_backward=node in behind)
        ]
        if fitting:
            index = min(fitting)[1]
            with graph.inserting_before(output):
                results[index] = _tied(graph, results[index], node)
    output.args = (results,)


def _goes_with(kind: Any, outputs: int, *, is_backward: bool) -> bool:
    if is_backward:
        return isinstance(kind, aot.GradAOTOutput)
    return isinstance(kind, aot.PlainAOTOutput) and kind.idx < outputs


def _tied(graph: fx.Graph, result: fx.Node, check: fx.Node) -> fx.Node:
    status, *rest = check.args
    message = str(rest[0]) if rest else "Expected Tensor with single nonzero value, but got zero"
    tied = graph.call_function(checked, (result, status, message, check.kwargs.get("is_matrix")))
    tied.meta = {**check.meta, "val": result.meta["val"]}
    return tied
