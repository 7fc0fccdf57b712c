"""Views, cuts and joins have one device's results under every strategy; `common_factors` factors two shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.rules.views import common_factors
from tests.rules.recording import check_call, check_database, check_splits, tensor

aten = torch.ops.aten


@st.composite
def shape_pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw two shapes with equally many elements, whose dims are products of the same primes."""
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3, 5]), max_size=5))
    shapes = []
    for order in (primes, draw(st.permutations(primes)) if draw(st.booleans()) else primes):
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
        shapes.append([math.prod(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)])
    return shapes[0], shapes[1]


@given(shape_pairs())
def test_common_factors_multiply_to_the_dims(pair: tuple[list[int], list[int]]) -> None:
    """Each dim of both shapes is the product of its factors, and shared factors have the same order in both."""
    source, result, sizes = common_factors(*pair)
    for dims, shape in zip((source, result), pair, strict=True):
        assert [math.prod(sizes[factor] for factor in dim) for dim in dims] == list(shape)
    shared = [[f for dim in dims for f in dim if not f.startswith("rest")] for dims in (source, result)]
    assert shared[0] == shared[1]


@given(shape_pairs())
def test_view(pair: tuple[list[int], list[int]]) -> None:
    """Under every strategy, a view between two drawn shapes has one device's result."""
    check_call(aten.view.default, tensor(*pair[0]), pair[1])


def test_view_of_a_strided_piece() -> None:
    """Under every strategy, a view equals one device's, although the strides of a piece may forbid a view."""
    check_splits(aten.view.default, tensor(4, 4, 4), [16, 4])
    check_splits(aten.view.default, tensor(4, 8).t().contiguous().t(), [2, 2, 8])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.expand.default, (tensor(4, 1, 4), [8, 4, 4, 4])),
        (aten.expand.default, (tensor(1, 4), [4, -1])),
        (aten.repeat.default, (tensor(4, 2), [4, 2, 1])),
        (aten.squeeze.default, (tensor(4, 1, 2),)),
        (aten.squeeze.dim, (tensor(2, 1, 4), 0)),
        (aten.squeeze.dims, (tensor(2, 1, 4, 1), [1, -1])),
        (aten.unsqueeze.default, (tensor(4, 2), -1)),
        (aten.transpose.int, (tensor(2, 4, 8), -1, 0)),
        (aten.permute.default, (tensor(2, 4, 8), [2, 0, -2])),
        (aten.slice.Tensor, (tensor(8, 4), 0, 2, 6)),
        (aten.slice.Tensor, (tensor(8, 4), 1)),
        (aten.slice_backward.default, (tensor(4, 4), [8, 4], 0, 2, 6, 1)),
        (aten.slice_backward.default, (tensor(8, 4), [8, 4], 0, 0, 2**63 - 1, 1)),
        (aten.select.int, (tensor(4, 8), -1, 3)),
        (aten.select_backward.default, (tensor(4), [4, 8], 1, 3)),
        (aten.split.Tensor, (tensor(6, 4), 4)),
        (aten.split.Tensor, (tensor(0, 4), 2)),
        (aten.split_with_sizes.default, (tensor(4, 6), [4, 2], 1)),
        (aten.unbind.int, (tensor(4, 3), -1)),
        (aten.cat.default, ([tensor(4, 2), tensor(4, 4), tensor(0)], 1)),
        (aten.stack.default, ([tensor(4, 2), tensor(4, 2)], -1)),
        (aten.constant_pad_nd.default, (tensor(4, 4), [1, 2])),
        (aten.constant_pad_nd.default, (tensor(4, 4), [1, 2], 3.0)),
        (aten.flip.default, (tensor(4, 4), [1])),
        (aten.roll.default, (tensor(4, 4), [1], [0])),
        (aten.unfold.default, (tensor(4, 6), 1, 3, 2)),
        (aten.unfold_backward.default, (tensor(4, 2, 3), [4, 6], 1, 3, 2)),
        (aten.tril.default, (tensor(4, 8, 4), 1)),
        (aten.triu.default, (tensor(8, 4), -2)),
        (aten.view_as_real.default, (torch.complex(tensor(4, 2), tensor(4, 2)),)),
        (aten.view_as_complex.default, (tensor(4, 2),)),
        (aten.as_strided.default, (tensor(4, 8), [4, 2, 4], [8, 4, 1], 0)),
        (aten.as_strided_copy.default, (tensor(4, 8), [4, 2, 4], [8, 4, 1], 0)),
    ],
    ids=str,
)
def test_moves(op: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
    """Under every strategy, operators that move elements have one device's results."""
    check_splits(op, *args)


def test_complex_numbers() -> None:
    """Under every strategy, padded complex values, and complex values joined with real ones, equal one device's."""
    x = torch.complex(tensor(4, 6), tensor(4, 6))
    check_splits(aten.constant_pad_nd.default, x, [1, 0], 1.0)
    check_splits(aten.cat.default, [x, tensor(4, 6)], 1)


# fmt: off
_SAMPLED = [
    "cat", "chunk", "diagonal", "expand", "flip", "movedim", "narrow", "nn.functional.pad", "permute", "repeat",
    "reshape", "roll", "select", "select_scatter", "slice_scatter", "split", "squeeze", "stack", "t", "tile",
    "transpose", "tril", "triu", "unbind", "unflatten", "unfold", "unsqueeze",
]
# fmt: on


def test_on_the_samples_of_pytorch() -> None:
    """On PyTorch's samples of views, cuts and joins, every strategy has one device's results, forward and backward."""
    tally = check_database(_SAMPLED)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.strategies > 500
