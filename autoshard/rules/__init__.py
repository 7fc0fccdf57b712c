"""Sharding rules: for each call of an operator, the dims that ranks may split, and its possible strategies.

A strategy, which has placements of the call's operands and results, follows from the rule. Each module has the rules of
one family of operators. Importing this package registers all rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Placement

from autoshard.errors import OperatorError
from autoshard.ir.mesh import Mesh
from autoshard.ir.text import first_line
from autoshard.rules import (  # noqa: F401  (each registers its rules)
    arrangements,
    attention,
    batch_norm,
    checks,
    convolution,
    creation,
    dequantize,
    experts,
    images,
    indexing,
    linear_algebra,
    losses,
    matmul,
    normalisation,
    optimizers,
    pointwise,
    pooling,
    random_numbers,
    recurrent,
    reductions,
    softmax,
    views,
)
from autoshard.rules.enumeration import enumerate_strategies, replicated
from autoshard.rules.infer import infer_rule
from autoshard.rules.notation import Rule
from autoshard.rules.registry import (
    bound_rule,
    checked_operator,
    evaluate,
    has_rule,
    inferred_operators,
    sharding_rule,
    tensor_operands,
)

__all__ = ["Rule", "has_rule", "infer_rule", "inferred_operators", "sharding_rule", "strategies"]


def strategies(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, axis_size: int
) -> list[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    """Return every strategy that the rules admit for one call on a mesh with one axis of `axis_size` ranks.

    Args:
        op: a `torch.ops` overload, or a custom operator.
        args, kwargs: the arguments of the call. Tensors may be real, fake or on "meta"; operators whose result's shape
            depends on values need real tensors.

    Returns:
        A pair for each strategy: the placements of the tensor operands, and the placements of the tensor results, in
        order. The replicated strategy is first. An operator without a rule has no other strategy.

    Raises:
        OperatorError: `op` is no operator, or raises an error for the call. Or the result's shape depends on values
            that an operand lacks.

    Example:
        >>> import torch
        >>> a, b = torch.empty(4, 6, device="meta"), torch.empty(6, 8, device="meta")
        >>> for operands, results in strategies(torch.ops.aten.mm.default, (a, b), {}, 2):
        ...     print(operands, "->", results)
        (Replicate(), Replicate()) -> (Replicate(),)
        (Shard(dim=0), Replicate()) -> (Shard(dim=0),)
        (Shard(dim=1), Shard(dim=0)) -> (Partial(sum),)
        (Replicate(), Shard(dim=1)) -> (Shard(dim=1),)
        (Partial(sum), Replicate()) -> (Partial(sum),)
        (Replicate(), Partial(sum)) -> (Partial(sum),)
    """
    op, kwargs = checked_operator(op), {} if kwargs is None else kwargs
    mesh = Mesh({"axis": axis_size})
    results = _results(op, args, kwargs)
    rule = bound_rule(op, args, kwargs, results)
    if rule is None:
        found = [replicated(len(tensor_operands(args, kwargs)), len(results), mesh)]
    else:
        found = enumerate_strategies(rule, mesh)
    return [
        (
            tuple(spec.to_placements(mesh)[0] for spec in strategy.inputs),
            tuple(spec.to_placements(mesh)[0] for spec in strategy.outputs),
        )
        for strategy in found
    ]


def _results(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    if not isinstance(args, tuple | list):
        raise OperatorError(f"strategies({op}, ...): args is a {type(args).__name__}; pass a tuple of arguments.")
    if not isinstance(kwargs, Mapping):
        raise OperatorError(f"strategies({op}, ...): kwargs is a {type(kwargs).__name__}; pass a dict, or None.")
    try:
        return evaluate(op, args, kwargs)
    except NotImplementedError as error:
        raise OperatorError(
            f"strategies({op}, ...): the shape of a result depends on the values of an operand, which has none. Pass "
            "real tensors."
        ) from error
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise OperatorError(f"{op} refuses the call: {first_line(error)}") from error
