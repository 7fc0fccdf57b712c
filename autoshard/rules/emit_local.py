"""Emits the local form of one call: the calls that each rank runs in its place under a strategy.

If the rule has no rewrite, or if no factor is split, the call itself is emitted. Otherwise the rule's rewrite emits
calls, with a `LocalContext` for the piece of the running rank. Before the call, padding of operands is filled if the
rule needs it (`BoundRule.padding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx.proxy import Proxy, TracerBase
from torch.utils import _pytree as pytree

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import Strategy
from autoshard.rules.local import LocalContext, call_itself
from autoshard.rules.notation import BoundRule


def emit_local(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: BoundRule | None,
    strategy: Strategy | None,
    mesh: Mesh,
    *,
    tracer: TracerBase,
) -> Any:
    """Emit the local form of one call into the graph of `tracer`, and return the call's result.

    Args:
        args, kwargs: the arguments of the traced call, with a local value, a `fx.Proxy` of `tracer`, in place of each
            tensor.
        rule: the call's rule, or None to emit the call itself.
        strategy: one of `enumerate_strategies(rule, mesh)`, or None to emit the call itself.

    Returns:
        A proxy. For an operator with several results it is a proxy of the tuple, or a tuple of proxies. `result[i]`
        works on both.
    """
    if rule is None or strategy is None or not strategy.splits(mesh):
        return call_itself(target, args, kwargs, tracer)
    context = LocalContext(target, rule, strategy.splits(mesh), mesh, tracer)
    args, kwargs = _fill_padding(context, args, kwargs)
    if rule.local is None:
        return call_itself(target, args, kwargs, tracer)
    return rule.local(context, *args, **kwargs)


def fills(rule: BoundRule, splits: Mapping[str, Sequence[str]], mesh: Mesh) -> dict[int, dict[str, Any]]:
    """Return the values to write into padding of operands, by operand index, then by factor.

    `splits` maps each split factor to its axes. Only factors that are split unevenly have padding.
    """
    found: dict[int, dict[str, Any]] = {}
    for factor, axes in splits.items():
        if rule.sizes[factor] % mesh.shards(axes) == 0:
            continue
        for operand, fill in enumerate(rule.padding[factor]):
            if fill is not None:
                found.setdefault(operand, {})[factor] = fill
    return found


def _fill_padding(
    context: LocalContext, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    wanted = fills(context.rule, context.splits, context.mesh)
    if not wanted:
        return args, kwargs
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Proxy)]
    assert len(places) == len(context.rule.inputs), f"{context.target}: operands are the proxies among its arguments"
    for operand, factors in wanted.items():
        for factor, number in factors.items():
            leaves[places[operand]] = context.fill(leaves[places[operand]], operand, factor, number)
    return pytree.tree_unflatten(leaves, structure)
