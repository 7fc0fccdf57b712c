"""Look-ups and writes by index have one device's results under every strategy, also with a split indexed dim."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.mesh import Mesh
from autoshard.rules import strategies
from tests.rules.recording import MESH_PAIRS, check_call, check_database, check_recorded, check_splits, tensor

aten = torch.ops.aten


@given(
    rows=st.sampled_from([2, 4, 8]),
    width=st.sampled_from([2, 4]),
    shape=st.lists(st.sampled_from([2, 3, 4]), max_size=2),
    padding=st.sampled_from([-1, 1]),
    by_frequency=st.booleans(),
    pair=MESH_PAIRS,
)
def test_embedding(
    rows: int, width: int, shape: list[int], padding: int, by_frequency: bool, pair: Sequence[Mesh]
) -> None:
    """Under every strategy, look-ups in a table and the table's gradient equal one device's."""
    indices = tensor(*shape, integers=rows)
    check_splits(aten.embedding.default, tensor(rows, width), indices, padding, meshes=pair)
    grad = tensor(*shape, width)
    check_splits(aten.embedding_dense_backward.default, grad, indices, rows, padding, by_frequency, meshes=pair)


def test_a_vocabulary_may_be_split() -> None:
    """A look-up in a table with split rows gives a pending sum."""
    found = strategies(aten.embedding.default, (tensor(8, 4), tensor(2, 4, integers=8)), {}, 4)
    assert any(inputs[0].is_shard(0) and outputs[0].is_partial("sum") for inputs, outputs in found)


_INDEX = tensor(4, 2, integers=4)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.gather.default, (tensor(4, 8), 1, tensor(4, 2, integers=8))),
        (aten.gather.default, (tensor(8, 4), 0, tensor(4, 4, integers=8))),
        (aten.gather.default, (tensor(8, 4), 0, tensor(4, 2, integers=8))),
        (aten.index_select.default, (tensor(4, 8), 1, tensor(2, integers=8))),
        (aten.index_add.default, (tensor(4, 8), 1, tensor(4, integers=8), tensor(4, 4))),
        (aten.index_copy.default, (tensor(4, 8), 1, torch.tensor([5, 2]), tensor(4, 2))),
        (aten.index_copy.default, (tensor(4), 0, torch.tensor(2), tensor())),
        (aten.index_fill.int_Scalar, (tensor(4, 8), 1, torch.tensor([5, 2]), 0)),
        (aten.scatter.src, (tensor(4, 8), 1, torch.tensor([[1, 3]] * 4), tensor(4, 2))),
        (aten.scatter.value, (tensor(4, 8), 1, tensor(4, 2, integers=8), 0)),
        (aten.scatter.value, (tensor(4, 8), 1, tensor(4, 2, integers=8), 1)),
        (aten.scatter_add.default, (tensor(4, 8), 1, tensor(4, 2, integers=8), tensor(4, 2))),
        (aten.scatter_reduce.two, (tensor(4, 8), 1, tensor(4, 2, integers=8), tensor(4, 2), "amax")),
        (aten.index.Tensor, (tensor(4, 4, 8), [None, _INDEX])),
        (aten.index.Tensor, (tensor(4, 4, 8), [_INDEX, tensor(2, integers=4)])),
        (aten.index.Tensor, (tensor(4, 2, 4), [_INDEX, None, _INDEX])),
        (aten.index.Tensor, (tensor(2, 4, 2, 4), [None, _INDEX, None, tensor(1, integers=4)])),
        (aten.index_put.default, (tensor(4, 4, 8), [None, torch.tensor([2, 1])], tensor(4, 2, 8))),
        (aten.index_put.default, (tensor(4, 4, 8), [None, torch.tensor([2, 1])], tensor(8))),
        (aten.index_put.default, (tensor(4, 4, 8), [_INDEX], tensor(4, 2, 4, 8), True)),
        (aten.index_put.default, (tensor(4, 4, 8), [_INDEX, tensor(2, integers=4)], tensor(1, 8), True)),
        (aten.index_put.default, (tensor(4, 2, 4), [_INDEX, None, _INDEX], tensor(2), True)),
        (aten.take.default, (tensor(4, 4), tensor(4, 2, integers=16))),
        (aten._embedding_bag.default, (tensor(8, 4), tensor(6, integers=8), torch.tensor([0, 2, 4]))),
        (aten._embedding_bag.default, (tensor(8, 4), tensor(6, integers=8), torch.tensor([0, 2, 4]), False, 2)),
    ],
    ids=str,
)
def test_indexing(op: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
    """Every strategy of an indexing call gives one device's results."""
    check_splits(op, *args)


def test_bags_of_maxima() -> None:
    """Under every strategy, maxima over bags of embeddings and their gradients equal one device's, for five columns."""
    table = torch.randn(8, 5, requires_grad=True)
    words, bags = tensor(6, integers=8), torch.tensor([0, 2, 4])
    tried = check_recorded(lambda: torch.nn.functional.embedding_bag(words, table, bags, mode="max"))
    assert "aten._embedding_bag_backward.default" in tried


def test_booleans_meet_at_one_place() -> None:
    """Under every strategy, booleans that are accumulated at equal indices give one device's result."""
    index = torch.tensor([1, 1, 2, 1])
    check_splits(aten.index_put.default, torch.zeros(4, 9, dtype=torch.bool), [index], tensor(4, 9) > 0, True)


_ROWS = torch.tensor([True, False, True, True])
_CELLS = torch.tensor([[True, False], [False, True], [True, True], [False, False]])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.index.Tensor, (tensor(4, 8), [_ROWS])),
        (aten.index.Tensor, (tensor(2, 4, 6), [None, _ROWS])),
        (aten.index.Tensor, (tensor(4, 2, 6), [_CELLS])),
        (aten.index.Tensor, (tensor(4, 2, 6), [_ROWS, torch.tensor([1, 0, 1])])),
        (aten.index.Tensor, (tensor(4, 6, 4, 2), [_ROWS, None, torch.tensor([1, 0, 1])])),
        (aten.index_put.default, (tensor(4, 8), [_ROWS], tensor(3, 8))),
        (aten.index_put.default, (tensor(4, 8), [_ROWS], tensor(8))),
        (aten.index_put.default, (tensor(6, 4, 2), [None, _CELLS], tensor(6, 4), True)),
    ],
    ids=str,
)
def test_masks_are_not_split(op: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
    """Under every strategy, reads and writes by a mask equal one device's, and no strategy splits the mask."""
    check_splits(op, *args)
    masked = [tuple(inputs[1:-1] if len(inputs) > 2 else inputs[1:]) for inputs, _ in strategies(op, args, {}, 2)]
    assert not any(placement.is_shard() for inputs in masked for placement in inputs)


def test_additions_need_a_partial_target() -> None:
    """If the index of `index_add` is split, the target must be a pending sum, so that the target counts once."""
    found = strategies(aten.index_add.default, (tensor(4, 8), 1, tensor(4, integers=8), tensor(4, 4)), {}, 2)
    split = [inputs for inputs, _ in found if inputs[1].is_shard(0)]
    assert split
    assert all(inputs[0].is_partial("sum") for inputs in split)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.uint8], ids=str)
def test_additions_to_integers(dtype: torch.dtype) -> None:
    """Under every strategy, additions and reductions at indices equal one device's, for floats and integers."""
    x, source, index = tensor(5, 7).abs().to(dtype), tensor(6, 7).abs().to(dtype), torch.tensor([0, 4, 4, 1, 0, 3])
    check_splits(aten.index_add.default, x, 0, index, source)
    check_splits(aten.index_put.default, x, [index], source, True)
    check_call(aten.put.default, x, index, source[:, 0], True)
    for reduce in ("sum", "mean", "prod", "amax", "amin"):
        check_splits(aten.scatter_reduce.two, x, 0, index.unsqueeze(1).expand(6, 7), source, reduce)


# fmt: off
_SAMPLED = [
    "gather", "index_add", "index_copy", "index_fill", "index_put", "index_select", "nn.functional.embedding",
    "nn.functional.embedding_bag", "scatter", "scatter_add", "scatter_reduce", "take", "take_along_dim",
]
# fmt: on


def test_on_the_samples_of_pytorch() -> None:
    """On PyTorch's samples of indexing, every strategy has one device's results, forward and backward."""
    tally = check_database(_SAMPLED)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.strategies > 100
