"""Run a program on real tensors, and compare the results with the eager model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoshard.ir.program import InputKind, OutputKind, Program


def run_program(
    program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, seed: int = 0
) -> dict[tuple[OutputKind, str], Tensor]:
    """All results of a program on the model's state and these inputs, with tangents of ones."""
    leaves = pytree.tree_leaves((args, dict(kwargs or {})))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values, nodes = [], program.nodes_by_name()
    for slot in program.inputs:
        if slot.kind is InputKind.SEED:
            values.append(torch.tensor(seed))
        elif slot.kind is InputKind.TANGENT:
            tangent = nodes[slot.node].meta["val"]
            values.append(torch.ones(tangent.shape, dtype=tangent.dtype))
        elif slot.kind is InputKind.INPUT:
            values.append(leaves[int(slot.name.removeprefix("input:"))])
        else:
            values.append(state[slot.name])
    with torch.no_grad():
        results = program.graph_module(*(value.detach().clone() for value in values))
    return {(slot.kind, slot.name): value for slot, value in zip(program.outputs, results, strict=True)}


def assert_equals_eager(
    program: Program,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    call: Callable[..., Any] | None = None,
) -> None:
    """The program's outputs, gradients and buffer updates equal the eager model's."""
    results = run_program(program, model, args, kwargs)
    value = (call or model)(*args, **dict(kwargs or {}))
    leaves = pytree.tree_leaves(value)
    seeds = {int(s.name.removeprefix("tangent:")) for s in program.inputs_of(InputKind.TANGENT)}
    model.zero_grad()
    torch.autograd.backward([leaves[i] for i in sorted(seeds)], [torch.ones_like(leaves[i]) for i in sorted(seeds)])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = dict(model.named_buffers())
    assert gradients.keys() == {s.name for s in program.outputs_of(OutputKind.GRADIENT)}
    for (kind, name), result in results.items():
        if kind is OutputKind.OUTPUT:
            expected = leaves[int(name.removeprefix("output:"))]
        elif kind is OutputKind.GRADIENT:
            expected = gradients[name]
        elif kind is OutputKind.BUFFER_UPDATE:
            expected = buffers[name]
        else:
            continue
        torch.testing.assert_close(result, expected.detach(), rtol=1e-4, atol=1e-5)


def count_operators(program: Program) -> dict[str, int]:
    """How often each operator occurs, without "aten." and ".default"."""
    counts: dict[str, int] = {}
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            name = node.target._schema.name.replace("aten::", "")
            counts[name] = counts.get(name, 0) + 1
    return counts
