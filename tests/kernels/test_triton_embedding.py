"""The embedding kernels against torch's in float64, and their forms over a split vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import KernelError
from autoshard.kernels.triton_embedding import (
    FUSED,
    embedding,
    embedding_backward,
    split_embedding,
    split_embedding_backward,
)
from tests.kernels.fused import DEVICE, assert_results, draw, dtypes, wide

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
BACKWARD, FORWARD = FUSED
aten = torch.ops.aten
shapes = st.lists(st.integers(0, 7), min_size=1, max_size=2)
tables = st.tuples(st.integers(1, 9), st.integers(1, 37))


@settings(max_examples=15)
@given(shapes, tables, dtypes, st.integers(-1, 8), st.booleans())
def test_equals_torch(
    shape: list[int], table: tuple[int, int], dtype: torch.dtype, padding: int, by_frequency: bool
) -> None:
    """Rows are torch's bit for bit; the gradient is its float64 one, rows without tokens and of padding being 0."""
    rows, columns = table
    weight, indices = draw(rows, columns, dtype=dtype), torch.randint(rows, shape, device=DEVICE)
    padding = min(padding, rows - 1)
    assert torch.equal(embedding(weight, indices.int(), padding), weight[indices])
    grad = draw(*shape, columns, dtype=dtype)
    counts = by_frequency and indices.numel() > 0  # torch's own kernel fails on CUDA where it counts nothing
    expected = aten.embedding_dense_backward(wide(grad), indices, rows, padding, counts)
    actual = embedding_backward(grad, indices, rows, padding, by_frequency)
    assert_results(actual, (expected,), dtype, scale=max(1, indices.numel()) ** 0.5)


@settings(max_examples=15)
@given(shapes, tables, dtypes, st.integers(0, 12), st.integers(0, 9), st.integers(-1, 20))
def test_part_of_a_vocabulary(
    shape: list[int], table: tuple[int, int], dtype: torch.dtype, first: int, size: int, padding: int
) -> None:
    """Rows of other ranks give 0 and take nothing; the gradient has as many rows as the rank holds."""
    rows, columns = table
    size = min(size, rows)
    weight, indices = draw(rows, columns, dtype=dtype), torch.randint(22, shape, device=DEVICE)
    part = {"indices": indices, "first": first, "size": size}
    expected = FORWARD.forms[0].results(weight, {"weight": wide(weight), **part})
    assert_results(split_embedding(weight, **part), expected, dtype)
    grad = draw(*shape, columns, dtype=dtype)
    form = BACKWARD.forms[0 if padding >= 0 else 1]
    expected = form.results(weight, {"grad_output": wide(grad), **part, "padding_idx": padding})
    actual = split_embedding_backward(grad, **part, **{"padding_idx": padding, **form.constants(weight)})
    assert_results(actual, expected, dtype, scale=max(1, indices.numel()) ** 0.5)


def test_strided_rows_in_several_blocks() -> None:
    """A table and gradients with gaps, rows longer than a block, many tokens of one index."""
    weight, indices = draw(5, 1300)[:, 100:1200], torch.tensor([4, 1, 1, 1, 1, 1, 1, 0], device=DEVICE)
    assert torch.equal(embedding(weight, indices), weight[indices])
    grad = draw(1100, 8).t()
    expected = aten.embedding_dense_backward(wide(grad), indices, 5, -1, False)
    assert_results(embedding_backward(grad, indices, 5, -1, False), (expected,), torch.float32)


def test_sums_do_not_depend_on_the_run() -> None:
    """The gradient is the same bit for bit every time, and the same as with the tokens of one row alone."""
    grad, indices = draw(40, 3), torch.randint(2, (40,), device=DEVICE)
    both = embedding_backward(grad, indices, 2, -1, False)
    assert torch.equal(both, embedding_backward(grad, indices, 2, -1, False))
    alone = embedding_backward(grad[indices == 1], indices[indices == 1], 2, -1, False)
    assert torch.equal(both[1], alone[1])


def test_an_index_that_no_row_has_gives_nan() -> None:
    """Nothing is read behind a table, and nothing is silently made up."""
    found = embedding(draw(3, 2), torch.tensor([2, 3, -1], device=DEVICE)).isnan().all(1)
    assert found.tolist() == [False, True, True]


def test_what_does_not_fit_is_refused() -> None:
    """Gradients of other tokens, more rows than there are, and indices of another type are refused with the reason."""
    indices = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(KernelError, match="do not fit"):
        embedding_backward(draw(2, 4), indices, 3, -1, False)
    with pytest.raises(KernelError, match="size=4 is more than the 3 rows"):
        split_embedding(draw(3, 2), indices, 0, 4)
    with pytest.raises(KernelError, match=r"indices in int64 or int32; found torch\.int16"):
        embedding(draw(3, 2), indices.short())
