"""Long lists of repeated blocks are traced without their inner blocks, and the remaining blocks keep their names."""

from __future__ import annotations

import pytest
from torch import nn

from autoshard.errors import TraceError
from autoshard.ir.repeat import Repeat
from autoshard.tracing import leave_out_blocks, without


class _Stack(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for width in widths)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([1] * 10, [Repeat("layers", 1, 1, 8)]),
        ([2] + [1] * 8 + [2], [Repeat("layers", 1, 2, 7)]),
        ([1, 2] * 8, [Repeat("layers", 2, 2, 12)]),
        ([3] * 3 + [1, 2] * 8, [Repeat("layers", 2, 5, 15)]),
        ([1] * 9 + [2] * 9, [Repeat("layers", 1, 1, 7), Repeat("layers", 1, 10, 16)]),
    ],
)
def test_runs_are_found(widths: list[int], expected: list[Repeat]) -> None:
    """The found runs of repeated blocks have the shortest period and the longest extent."""
    short = leave_out_blocks(_Stack(widths), margin=1)
    assert short is not None
    assert list(short.repeats) == expected


def test_short_lists_stay() -> None:
    """A list of too few blocks, or of blocks that do not repeat, is not shortened."""
    assert leave_out_blocks(_Stack([1] * 7), margin=1) is None
    assert leave_out_blocks(_Stack([1, 2, 3, 4, 5, 6, 7, 8, 9]), margin=1) is None


def test_what_stays_keeps_its_names_and_its_parameters() -> None:
    """The remaining blocks keep names and parameters, can be indexed as in the whole list, and the
    model is unchanged."""
    model = _Stack([1] * 10)
    short = leave_out_blocks(model, margin=1)
    assert short is not None
    layers = short.model.layers
    assert isinstance(layers, nn.ModuleList)
    assert [name for name, _ in layers.named_children()] == ["0", "1", "8", "9"]
    assert layers[2] is layers[-2] is model.layers[8]
    assert list(layers[1:3]) == [model.layers[1], model.layers[8]]
    assert len(model.layers) == 10


def test_blocks_that_are_trained_are_not_like_frozen_ones() -> None:
    """Trained blocks and frozen blocks are separate runs, because their programs differ."""
    model = _Stack([1] * 12)
    for layer in model.layers[:6]:
        layer.requires_grad_(requires_grad=False)
    short = leave_out_blocks(model, margin=1, least=1)
    assert short is not None
    assert short.repeats == (Repeat("layers", 1, 1, 4), Repeat("layers", 1, 7, 10))


def test_a_list_that_is_not_there_is_refused() -> None:
    """Leaving blocks out of a list that the model does not have is refused."""
    with pytest.raises(TraceError, match="no list of blocks 'layers' as long"):
        without(_Stack([1] * 4), [Repeat("layers", 1, 1, 8)])
