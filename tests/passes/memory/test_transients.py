"""Bytes of float32 that reshards need for a moment."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from passes.memory.transients import Moved, Transients

LINE = Transients(Mesh({"x": 2}))
SQUARE = Transients(Mesh({"x": 2, "y": 2}))
WHOLE = P()


def fake(*shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape)


def test_what_lies_strided_is_copied_before_it_is_sent() -> None:
    """A transposed value [6, 8] of 192 bytes, gathered along its rows: unless it is contiguous, as a copy is."""
    value = fake(8, 6).t()
    assert LINE.of_reshard(Moved(value, P("x"), WHOLE), freed=False) == 96 + 192
    assert LINE.of_reshard(Moved(value, P("x"), WHOLE, as_traced=False), freed=False) == 192


def test_an_operand_that_goes_leaves_room() -> None:
    """Columns are put in order in a copy, when what was gathered lies on no dim's outside: twice the whole."""
    moved = Moved(fake(8, 6), P(None, "x"), WHOLE)
    assert LINE.of_reshard(moved, freed=False) == 2 * 192
    assert LINE.of_reshard(moved, freed=True) == 2 * 192 - 96


def test_padding_stays_with_the_rows_that_are_cut_from_it() -> None:
    """Two ranks have 2 each of 3 rows; the whole is the front of a storage of 4. A copy of columns has no padding."""
    assert LINE.bytes_of_copy(Moved(fake(3, 6), P("x"), WHOLE)) == 4 * 6 * 4
    assert LINE.bytes_of_copy(Moved(fake(6, 3), P(None, "x"), WHOLE)) == 6 * 3 * 4


def test_a_later_step_starts_from_the_storage_that_an_earlier_one_made() -> None:
    """2 rows of each rank become 3 in a storage of 4, and these become 6."""
    moved = Moved(fake(6, 6), P(("x", "y")), WHOLE)
    assert SQUARE.of_reshard(moved, freed=False) == (4 + 6) * 6 * 4


def test_no_step_needs_nothing() -> None:
    """And makes nothing: the value stays as it is."""
    moved = Moved(fake(4, 4), P("x"), P("x"))
    assert LINE.of_reshard(moved, freed=False) == 0
    assert LINE.bytes_of_copy(moved) == 2 * 4 * 4
