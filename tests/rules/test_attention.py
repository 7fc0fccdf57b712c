"""Attention has one device's results under every strategy, with masks, dropout and causality of the whole call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoshard import P
from autoshard.ir.mesh import Mesh
from autoshard.rules import strategies
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.registry import bound_rule
from tests.rules.recording import MESHES, check_recorded, check_splits
from tests.rules.run_strategy import check_strategy, results_of

ops = torch.ops.autoshard
_MESHES = (*MESHES, Mesh({"a": 4, "b": 2}))


def _attention_args(
    b: int, g: int, h: int, s: int, t: int, *, mask: str | None = None, p: float = 0.0, is_causal: bool = False
) -> tuple[Any, ...]:
    """Arguments of the operator: b batch, g key heads, h query heads, s queries, t keys."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    masks = {
        None: None,
        "bool": torch.rand(s, t) < 0.7,
        "bias": draw(b, 1, s, t),
        "heads": draw(h, 1, t),
    }
    seed = torch.tensor(7) if p else None
    return (
        draw(b, h, s, 4),
        draw(b, g, t, 4),
        draw(b, g, t, 2),
        masks[mask],
        seed,
        p,
        is_causal,
        0.5,
        3,
        [0] * 4,
        [b, h, s, t],
    )


def _backward_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    out, lse = ops.attention(*args)
    q, k, v, mask, seed, *rest = args
    return (torch.randn_like(out), q, k, v, mask, out, lse, seed, *rest)


@pytest.mark.sample(4)
@pytest.mark.parametrize("mask", [None, "bool", "bias", "heads"])
@pytest.mark.parametrize(("p", "is_causal"), [(0.0, False), (0.5, True)])
def test_attention(mask: str | None, p: float, is_causal: bool) -> None:
    """Under every strategy, attention and its gradients equal one device's, with each mask, and causal with dropout."""
    args = _attention_args(4, 2, 4, 4, 4, mask=mask, p=p, is_causal=is_causal)
    check_splits(ops.attention.default, *args)
    check_splits(ops.attention_backward.default, *_backward_args(args))


@settings(max_examples=15)
@given(
    g=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2, 4]),
    s=st.sampled_from([1, 2, 4, 6]),
    pair=st.sampled_from([(_MESHES[0], mesh) for mesh in _MESHES[1:]]),
)
def test_grouped_heads(g: int, group: int, s: int, pair: Sequence[Mesh]) -> None:
    """Under every strategy, attention with several query heads for each key head equals one device's."""
    args = _attention_args(2, g, g * group, s, 4, p=0.25, is_causal=True)
    check_splits(ops.attention.default, *args, meshes=pair)
    check_splits(ops.attention_backward.default, *_backward_args(args), meshes=pair)


@settings(max_examples=30)
@given(
    lengths=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    is_square=st.booleans(),
    mask=st.sampled_from([None, None, "bool", "bias", "heads"]),
    p=st.sampled_from([0.0, 0.0, 0.5]),
    is_causal=st.booleans(),
    mesh=st.sampled_from([*_MESHES, Mesh({"a": 5})]),
)
@example(lengths=(8, 8), is_square=True, mask=None, p=0.0, is_causal=True, mesh=Mesh({"a": 4}))
@example(lengths=(9, 9), is_square=True, mask=None, p=0.0, is_causal=True, mesh=Mesh({"a": 2, "b": 2}))
def test_keys_go_round_a_ring(
    lengths: tuple[int, int], is_square: bool, mask: str | None, p: float, is_causal: bool, mesh: Mesh
) -> None:
    """With split queries and keys of any lengths, attention and its gradients equal one device's.

    If causality is the only mask, and lengths allow the cut, ranks compute on an early and a late block each.
    """
    queries, keys = (lengths[0], lengths[0]) if is_square else lengths
    args = _attention_args(2, 2, 4, queries, keys, mask=mask, p=p, is_causal=is_causal)
    for operator, call in ((ops.attention, args), (ops.attention_backward, _backward_args(args))):
        expected = results_of(operator.default, call, {})
        rule = bound_rule(operator.default, call, {}, expected)
        assert rule is not None
        rings = [found for found in enumerate_strategies(rule, mesh) if "t" in found.splits(mesh)]
        assert rings or min(queries, keys) < max(size for _, size in mesh.axes) + 1
        for strategy in rings:
            check_strategy(operator.default, call, {}, rule, strategy, mesh, expected=expected)


def test_what_a_ring_splits() -> None:
    """Keys are split only together with queries, and a mask by its rows; gradients are split as their operands."""
    args, one = _attention_args(2, 2, 4, 8, 8, mask="bool"), Mesh({"a": 2})
    sequence, rows, whole = P(None, None, "a"), P("a"), P()
    forward = _specs(ops.attention.default, args, one)
    assert ((sequence, sequence, sequence, rows), (sequence, sequence)) in forward
    assert ((sequence, whole, whole, rows), (sequence, sequence)) in forward
    assert not [inputs for inputs, _ in forward if inputs[1] == sequence != inputs[0]]
    backward = _specs(ops.attention_backward.default, _backward_args(args), one)
    assert ((sequence,) * 4 + (rows, sequence, sequence), (sequence,) * 3) in backward


def _specs(operator: Any, args: tuple[Any, ...], mesh: Mesh) -> list[tuple[Any, Any]]:
    rule = bound_rule(operator, args, {}, results_of(operator, args, {}))
    assert rule is not None
    return [(item.inputs, item.outputs) for item in enumerate_strategies(rule, mesh)]


def test_heads_can_be_split() -> None:
    """Attention has a strategy that splits all operands and results on their head dim."""
    args = _attention_args(2, 4, 8, 4, 4)
    found = strategies(ops.attention.default, args, {}, 4)
    assert any(all(placement.is_shard(1) for placement in (*inputs, *outputs)) for inputs, outputs in found)


def test_attention_of_pytorch_on_a_cpu() -> None:
    """Under every strategy, ATen's attention for CPUs and its backward equal one device's."""
    q, k, v = (torch.randn(2, 4, 4, 4, requires_grad=True) for _ in range(3))
    tried = check_recorded(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert "aten._scaled_dot_product_flash_attention_for_cpu_backward.default" in tried
