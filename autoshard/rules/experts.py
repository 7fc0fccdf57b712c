"""Rules of `autoshard::experts`. An axis may split a layer of experts in four ways, and axes may mix them.

* Tokens: each rank has all experts. The gradients of the experts are partial sums.
* Experts: each rank has all tokens, and computes the addends of its experts. The results are partial sums.
* Intermediate size: each rank has a part of each expert, as in tensor parallelism of two consecutive products.
* Tokens and experts by the same axis, as in expert parallelism: all-to-alls send tokens to the ranks of their experts
  and back (`autoshard.kernels.exchanged_experts`). No result is a partial sum over the axis.
"""

from __future__ import annotations

from typing import Any

import torch

import autoshard.kernels as kernels
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Rule
from autoshard.rules.registry import sharding_rule

_Tensor = torch.Tensor
aten = torch.ops.aten

# Factors: t tokens, e experts, i intermediate size.
_TOKENS = "t _"
_TOGETHER = (("t", "e"),)


@sharding_rule(kernels.experts)
def experts(
    x: _Tensor, index: _Tensor, weights: _Tensor, gate_up: _Tensor, gate_up_bias: _Tensor | None, down: _Tensor,
    experts: int, activation: str, transposed: bool, interleaved: bool, *_: Any,
) -> Rule:  # fmt: skip
    """Return the rule of a layer of experts.

    The result is linear in the router's weights, and linear in the matrices `down`, but not in both together.
    """
    held = _held(gate_up_bias is not None, transposed, interleaved)
    return Rule(
        f"{_TOKENS}, {_TOKENS}, {_TOKENS}, {', '.join(held)} -> {_TOKENS}",
        reduce={"e": "sum", "i": "sum"}, linear=[(2,), (2 + len(held),)], together=_TOGETHER, local=_local_experts,
        padding={"t": None, "i": 0}, even=("e",),
    )  # fmt: skip


@sharding_rule(kernels.experts_backward)
def experts_backward(
    grad_out: _Tensor, x: _Tensor, index: _Tensor, weights: _Tensor, gate_up: _Tensor, gate_up_bias: _Tensor | None,
    down: _Tensor, experts: int, activation: str, transposed: bool, interleaved: bool, *_: Any,
) -> Rule:  # fmt: skip
    """Return the rule of the backward of a layer of experts.

    Gradients of matrices are sums over tokens. All other gradients are sums over experts and intermediate values.
    """
    held = ", ".join(_held(gate_up_bias is not None, transposed, interleaved))
    return Rule(
        f"{', '.join([_TOKENS] * 4)}, {held} -> {_TOKENS}, {_TOKENS}, {held}",
        reduce={"t": "sum", "e": "sum", "i": "sum"}, linear=[(0,)], together=_TOGETHER, local=_local_backward,
        padding={"t": 0, "i": 0}, even=("e",),
    )  # fmt: skip


def _held(has_bias: bool, transposed: bool, interleaved: bool) -> list[str]:
    """Return the notation of gate_up, of its bias if there is one, and of down, for the layouts of `ExpertWeights`."""
    inner = "i _" if interleaved else "_ i"
    gate_up = f"e _ {inner}" if transposed else f"e {inner} _"
    return [gate_up, *([f"e {inner}"] if has_bias else []), "e i _" if transposed else "e _ i"]


def _local_experts(context: LocalContext, x: Any, index: Any, *rest: Any) -> Any:
    return _call(context, kernels.exchanged_experts, (x,), index, rest)


def _local_backward(context: LocalContext, grad_out: Any, x: Any, index: Any, *rest: Any) -> Any:
    return _call(context, kernels.exchanged_experts_backward, (grad_out, x), index, rest)


def _call(context: LocalContext, exchanged: Any, tokens: tuple[Any, ...], index: Any, rest: tuple[Any, ...]) -> Any:
    """Emit the traced call on a rank's experts, or the operator `exchanged` if one axis splits both tokens and experts.

    `tokens` are the operands before `index`, and `rest` are the arguments after `index`. If experts are split without
    tokens, `index` is counted from the rank's first expert.
    """
    group = context.group("t", "e")
    if group is not None:
        return context.call(exchanged, *tokens, index, *rest, group)
    if context.is_split("e"):
        index = context.call(aten.sub.Tensor, index, context.offset("e"))
    return context.default(*tokens, index, *rest)
