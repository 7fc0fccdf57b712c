"""Results under uneven splits do not depend on padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autoshard.rules  # noqa: F401  (registers the rules)
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from autoshard.rules.enumeration import Strategy, enumerate_strategies
from autoshard.rules.notation import BoundRule
from autoshard.rules.registry import bound_rule
from autoshard.testing.strategies import meshes
from tests.rules.recording import tensor
from tests.rules.run_strategy import check_strategy, results_of

aten = torch.ops.aten
ours = torch.ops.autoshard


def _rule(op: Any, args: tuple[Any, ...]) -> BoundRule:
    rule = bound_rule(op, args, {}, results_of(op, args, {}))
    assert rule is not None
    return rule


def _uneven(rule: BoundRule, mesh: Mesh) -> list[Strategy]:
    """The strategies that split some factor unevenly."""
    return [
        strategy
        for strategy in enumerate_strategies(rule, mesh)
        if any(rule.sizes[factor] % mesh.shards(axes) for factor, axes in strategy.splits(mesh).items())
    ]


def _attention(b: int, h: int, s: int) -> tuple[Any, ...]:
    q, k, v = (torch.randn(b, h, s, 4, dtype=torch.float64) for _ in range(3))
    return q, k, v, None, None, 0.0, True, 0.5, 0, [0, 0, 0, 0], [b, h, s, s]


def _call(name: str, m: int, k: int, n: int) -> tuple[Any, tuple[Any, ...]]:
    """A call of the operator `name` with dims of these sizes."""
    rows = torch.randint(0, m, (k, n))
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "mm": (aten.mm.default, (tensor(m, k), tensor(k, n))),
        "bmm": (aten.bmm.default, (tensor(m, k, n), tensor(m, n, k))),
        "addmm": (aten.addmm.default, (tensor(n), tensor(m, k), tensor(k, n))),
        "sum": (aten.sum.dim_IntList, (tensor(m, k, n), [0, 2])),
        "mean": (aten.mean.dim, (tensor(m, k, n), [0, 1])),
        "amax": (aten.amax.default, (tensor(m, k) - 9, [0])),
        "amin": (aten.amin.default, (tensor(m, k) + 9, [1])),
        "prod": (aten.prod.dim_int, (tensor(m, 3), 0)),
        "all": (aten.all.dim, (tensor(m, k) > -4, 0)),
        "any": (aten.any.dim, (tensor(m, k) > 3, 0)),
        "norm": (aten.linalg_vector_norm.default, (tensor(m, k), 2, [0])),
        "softmax": (aten._softmax.default, (tensor(m, k), 1, False)),
        "layer norm": (aten.native_layer_norm.default, (tensor(m, k), [k], tensor(k), tensor(k), 1e-5)),
        "embedding": (aten.embedding.default, (tensor(m, 4), rows)),
        "embedding backward": (aten.embedding_dense_backward.default, (tensor(k, n, 4), rows, m, -1, False)),
        "gather": (aten.gather.default, (tensor(m, k), 0, torch.randint(0, m, (n, k)))),
        "index": (aten.index.Tensor, (tensor(m, k), [rows])),
        "index add": (aten.index_add.default, (tensor(m, k), 0, torch.randint(0, m, (n,)), tensor(n, k))),
        "cross entropy": (ours.cross_entropy.default, (tensor(m, k), torch.randint(0, k, (m,)), -100, 0.0)),
        "integer division": (aten.remainder.Tensor, (torch.randint(0, 9, (m, k)), torch.randint(1, 9, (m, k)))),
        "attention": (ours.attention.default, _attention(m, k, n)),
        "binary cross entropy": (aten.binary_cross_entropy.default, (torch.rand(m, k), torch.rand(m, k), None, 1)),
        "triangle": (aten.tril.default, (tensor(m, k), 1)),
        "range": (aten.arange.start_step, (3, 3 + 2 * m, 2)),
    }  # fmt: skip
    return calls[name]


NAMES = (
    "mm", "bmm", "addmm", "sum", "mean", "amax", "amin", "prod", "all", "any", "norm", "softmax", "layer norm",
    "embedding", "embedding backward", "gather", "index", "index add", "cross entropy", "integer division", "attention",
    "binary cross entropy", "triangle", "range",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_padding_changes_nothing(name: str, data: st.DataObject) -> None:
    """Every uneven strategy with poisoned padding gives one device's results, on drawn sizes and meshes."""
    sizes = data.draw(st.tuples(*[st.integers(1, 11)] * 3))
    mesh = data.draw(meshes(max_axes=2, max_ranks=6))
    torch.manual_seed(0)
    op, args = _call(name, *sizes)
    rule = _rule(op, args)
    for strategy in _uneven(rule, mesh):
        check_strategy(op, args, {}, rule, strategy, mesh)


@pytest.mark.parametrize("name", NAMES)
def test_uneven_dims_are_split(name: str) -> None:
    """A dim of seven is split although no mesh divides seven, also by nested axes."""
    op, args = _call(name, 7, 7, 7)
    for mesh in (Mesh({"a": 4}), Mesh({"a": 2, "b": 2}), Mesh({"a": 2, "b": 3})):
        assert _uneven(_rule(op, args), mesh)


def test_a_rank_without_elements_is_refused() -> None:
    """Three elements are not split over four ranks, because one rank would have none."""
    assert not _uneven(_rule(aten.neg.default, (tensor(3),)), Mesh({"a": 4}))


def test_a_factor_within_a_dim_is_only_split_evenly() -> None:
    """Seven heads within a dim of 14 are not split over four ranks, because no spec says where their padding lies."""
    heads = (tensor(2, 14), [2, 7, 2])
    assert not _uneven(_rule(aten.view.default, heads), Mesh({"a": 4}))


def test_padding_is_filled_only_where_it_matters() -> None:
    """Only padding that results depend on is filled, with 0 in a contracted dim and -inf in the dim of a maximum."""
    product = _rule(aten.mm.default, (tensor(7, 7), tensor(7, 7))).padding
    assert product == {"m": (None, None), "k": (0, 0), "n": (None, None)}
    maximum = _rule(aten.amax.default, (tensor(7, 7), [1])).padding
    assert maximum == {"d0": (None,), "d1": (float("-inf"),)}
    rows = torch.zeros(7, dtype=torch.int64)
    assert _rule(aten.embedding.default, (tensor(7, 7), rows)).padding["i0"] == (None, 0)


def test_sums_of_padding_other_than_zero_are_not_carried() -> None:
    """An uneven strategy of a maximum has no operand as a pending sum, because each addend would add its padding."""
    rule = _rule(aten.amax.default, (tensor(7, 7), [1]))
    for strategy in _uneven(rule, Mesh({"a": 2, "b": 2})):
        assert all(reduction != "sum" for spec in strategy.inputs for _, reduction in spec.partial)


def test_contracted_factors_give_sums() -> None:
    """An uneven split of the contracted dim gives a pending sum, as an even split does."""
    found = {s.inputs: s.outputs for s in _uneven(_rule(aten.mm.default, (tensor(8, 7), tensor(7, 8))), Mesh({"a": 2}))}
    assert found == {(P(None, "a"), P("a")): (P(partial={"a": "sum"}),)}
