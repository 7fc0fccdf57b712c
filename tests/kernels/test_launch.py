"""Launching: tiles, views of rows, and refusal of unsupported operands."""

from __future__ import annotations

import pytest
import torch
import triton

from autoshard.errors import KernelError
from autoshard.kernels.launch import MAX_COLUMNS, as_rows, launch, refuse_columns, row_tile


def _nothing() -> None:
    """A kernel without arguments."""


def test_cpu_tensors_without_the_interpreter_are_refused() -> None:
    """On a CPU, the launch of a kernel that is not interpreted is refused."""
    kernel = triton.JITFunction(_nothing)
    with pytest.raises(KernelError, match=r"_nothing needs tensors on a GPU; found device='cpu'"):
        launch(kernel, lambda _: (1,), torch.device("cpu"), num_warps=4)


@pytest.mark.parametrize("columns", [1, 3, 200, 1024, 5000, MAX_COLUMNS])
def test_a_tile_covers_its_row(columns: int) -> None:
    """A tile holds the whole row in a power of two, and several rows where they are short."""
    tile = row_tile(columns)
    assert columns <= tile.columns < 2 * columns
    assert tile.rows == (16 if columns <= 128 else max(1, 2048 // tile.columns))
    assert tile.num_warps in (4, 8, 16)


def test_rows_are_a_view_where_they_can_be() -> None:
    """Rows with gaps between them are viewed without a copy, and a transposed tensor is copied."""
    x = torch.arange(60.0).view(3, 4, 5)
    assert as_rows(x[..., 1:], 4).data_ptr() == x[..., 1:].data_ptr()
    assert torch.equal(as_rows(x.transpose(1, 2), 4), x.transpose(1, 2).reshape(15, 4))


@pytest.mark.parametrize("columns", [0, MAX_COLUMNS + 1])
def test_rows_that_do_not_fit_are_refused(columns: int) -> None:
    """A row of no element, and a row longer than a program holds, are refused with a reason."""
    assert refuse_columns(columns) == f"a row has {columns} elements; the kernel holds whole rows of 1 to 16384."
