"""Collectives that may write over their operand."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autoshard.ir.collectives import ALL_REDUCE, reduces_in_place

aten = torch.ops.aten


@pytest.mark.parametrize("is_read_again", [False, True])
def test_a_packed_buffer_is_reduced_in_place_unless_another_call_reads_it(is_read_again: bool) -> None:
    """A reader of the operand would find the sum."""
    graph = fx.Graph()
    packed = graph.call_function(aten.cat.default, ([graph.placeholder("x"), graph.placeholder("y")],))
    reduced = graph.call_function(ALL_REDUCE, (packed, "sum", "data"))
    graph.output((reduced, graph.call_function(aten.neg.default, (packed,))) if is_read_again else (reduced,))
    assert reduces_in_place(reduced) is not is_read_again


def test_what_a_caller_gave_is_not_written_over() -> None:
    """A collective writes neither over the caller's tensors nor over results that may be views of them."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    for operand in (given, graph.call_function(aten.view.default, (given, [-1]))):
        assert not reduces_in_place(graph.call_function(ALL_REDUCE, (operand, "sum", "data")))
