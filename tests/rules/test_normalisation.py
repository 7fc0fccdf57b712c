"""Normalisations split rows, groups and the normalised dims, with one device's results and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import Carry, enumerate_strategies
from autoshard.rules.registry import bound_rule
from autoshard.testing.strategies import meshes
from tests.rules.recording import MESHES, check_call, check_recorded, check_splits
from tests.rules.run_strategy import check_strategy, results_of

aten = torch.ops.aten


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@given(rows=st.lists(st.sampled_from([1, 2, 4]), max_size=2), width=st.sampled_from([2, 4]), affine=st.booleans())
def test_layer_norm(rows: list[int], width: int, affine: bool) -> None:
    """Under every strategy, layer norms and their gradients equal one device's, with and without weights."""
    weight, bias = (_leaf(width), _leaf(width)) if affine else (None, None)
    tried = check_recorded(lambda: F.layer_norm(_leaf(*rows, width), (width,), weight, bias), meshes=MESHES[:3])
    assert {"aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"} <= tried


def test_some_gradients_of_a_layer_norm() -> None:
    """Under every strategy, a layer norm's backward equals one device's if only some gradients are asked for."""
    x, weight, bias = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    _, mean, rstd = aten.native_layer_norm(x, [8], weight, bias, 1e-5)
    for mask in ([True, True, False], [False, True, True], [True, False, False]):
        check_splits(aten.native_layer_norm_backward.default, x, x, [8], mean, rstd, weight, bias, mask)


def test_rms_norm() -> None:
    """Under every strategy, the fused RMS norm and its gradients equal one device's."""
    x, weight = torch.randn(4, 2, 8), torch.randn(8)
    check_splits(aten._fused_rms_norm.default, x, [8], weight, 1e-5)
    _, rstd = aten._fused_rms_norm(x, [8], weight, 1e-5)
    check_splits(aten._fused_rms_norm_backward.default, torch.randn_like(x), x, [8], rstd, weight, [True, True])


@given(
    rows=st.lists(st.integers(1, 4), max_size=2),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    mesh=meshes(max_axes=2, max_ranks=6),
    has=st.sampled_from([(False, False), (True, False), (True, True)]),
    centred=st.booleans(),
)
def test_normalised_dims_are_split(
    rows: list[int], widths: list[int], mesh: Mesh, has: tuple[bool, bool], centred: bool
) -> None:
    """Under every strategy, layer and RMS norms of drawn sizes, and their gradients, equal one device's."""
    x, grad = (torch.randn(*rows, *widths, dtype=torch.float64) for _ in range(2))
    weight, bias = (torch.randn(widths, dtype=torch.float64) if is_there else None for is_there in has)
    if centred:
        check_call(aten.native_layer_norm.default, x, widths, weight, bias, 1e-3, meshes=[mesh])
        _, *statistics = aten.native_layer_norm(x, widths, weight, bias, 1e-3)
        args = (grad, x, widths, *statistics, weight, bias, [True, *has])
        check_call(aten.native_layer_norm_backward.default, *args, meshes=[mesh])
        return
    check_call(aten._fused_rms_norm.default, x, widths, weight, None, meshes=[mesh])
    rstd = aten._fused_rms_norm(x, widths, weight, None)[1]
    args = (grad, x, widths, rstd, weight, [True, weight is not None])
    check_call(aten._fused_rms_norm_backward.default, *args, meshes=[mesh])


def _check_splits_only(op: Any, *args: Any) -> None:
    """Check that splitting strategies without partial values have one device's results.

    Random addends of partial values would be rounded away.
    """
    mesh, results = Mesh({"a": 2, "b": 2}), results_of(op, args, {})
    rule = bound_rule(op, args, {}, results)
    assert rule is not None
    tried = [s for s in enumerate_strategies(rule, mesh) if any(s.splits(mesh)) and not any(map(_is_carry, s.choices))]
    assert len(tried) >= 3
    for strategy in tried:
        check_strategy(op, args, {}, rule, strategy, mesh, expected=results)


def _is_carry(choice: Any) -> bool:
    return isinstance(choice, Carry)


def test_normalised_dims_of_narrow_types() -> None:
    """In bfloat16, norms and gradients under splitting strategies have one device's values and dtypes."""
    x, narrow, weight = torch.randn(4, 7).bfloat16(), torch.randn(7).bfloat16(), torch.randn(7)
    for affine in (narrow, weight):
        _check_splits_only(aten.native_layer_norm.default, x, [7], affine, affine, 1e-3)
        _, mean, rstd = aten.native_layer_norm(x, [7], affine, affine, 1e-3)
        args = (x, x, [7], mean, rstd, affine, affine)
        _check_splits_only(aten.native_layer_norm_backward.default, *args, [True, True, True])
    _check_splits_only(aten._fused_rms_norm.default, x, [7], narrow, 1e-3)
    planes, narrow = torch.randn(2, 4, 6).bfloat16(), narrow[:4]
    _check_splits_only(aten.native_group_norm.default, planes, narrow, narrow, 2, 4, 6, 2, 1e-3)


def test_ranks_that_split_rows_talk() -> None:
    """The rule says that a layer norm communicates if its normalised dim is split, and not if its rows are."""
    x = torch.randn(4, 8)
    rule = bound_rule(aten.native_layer_norm.default, (x, [8], None, None, 1e-3), {}, [x, x[:, :1], x[:, :1]])
    assert rule is not None
    assert rule.may_communicate("n0")
    assert not rule.may_communicate("r0")


@pytest.mark.parametrize("shape", [(2, 8, 6), (2, 4, 4, 2), (1, 2, 2, 4, 2)])
@pytest.mark.parametrize("affine", [False, True])
def test_group_norm_of_pieces_of_planes(shape: tuple[int, ...], affine: bool) -> None:
    """Under every strategy, group norms of one to three spatial dims, and their gradients, equal one device's."""
    x, grad = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    n, c, *space = shape
    weight, bias = (torch.randn(c, dtype=torch.float64) if affine else None for _ in range(2))
    sizes = (n, c, math.prod(space), 2)
    check_splits(aten.native_group_norm.default, x, weight, bias, *sizes, 1e-3)
    _, *statistics = aten.native_group_norm(x, weight, bias, *sizes, 1e-3)
    args = (grad, x, *statistics, weight, *sizes, [True, affine, affine])
    check_splits(aten.native_group_norm_backward.default, *args)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("affine", [False, True])
def test_group_norm(groups: int, affine: bool) -> None:
    """Under every strategy, group norms of one to eight groups, and their gradients, equal one device's."""
    weight, bias = (_leaf(8), _leaf(8)) if affine else (None, None)
    tried = check_recorded(lambda: F.group_norm(_leaf(4, 8, 3), groups, weight, bias))
    assert "aten.native_group_norm_backward.default" in tried


@pytest.mark.parametrize(
    "norm",
    [lambda x: F.instance_norm(x), lambda x: F.local_response_norm(x, 2), lambda x: F.normalize(x, dim=1)],
)
def test_others_are_composed(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Under every strategy, the calls of other normalisations have one device's results, forward and backward."""
    check_recorded(lambda: norm(_leaf(4, 8, 4)))
