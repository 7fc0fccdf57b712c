"""Which collectives may write over their operand."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autoshard.ir.collectives import ALL_REDUCE, reduces_in_place

aten = torch.ops.aten


@pytest.mark.parametrize("is_read_again", [False, True])
def test_a_packed_buffer_is_reduced_in_place_unless_another_call_reads_it(is_read_again: bool) -> None:
    """An all-reduce writes over a packed buffer, unless another call reads the buffer."""
    graph = fx.Graph()
    packed = graph.call_function(aten.cat.default, ([graph.placeholder("x"), graph.placeholder("y")],))
    reduced = graph.call_function(ALL_REDUCE, (packed, "sum", "data"))
    graph.output((reduced, graph.call_function(aten.neg.default, (packed,))) if is_read_again else (reduced,))
    assert reduces_in_place(reduced) is not is_read_again


def test_what_a_caller_gave_is_not_written_over() -> None:
    """An all-reduce does not write over an input of the program, nor over a view of an input."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    for operand in (given, graph.call_function(aten.view.default, (given, [-1]))):
        assert not reduces_in_place(graph.call_function(ALL_REDUCE, (operand, "sum", "data")))
