"""Deep models are shortened to a few blocks of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard.tracing import shorten


class Block(nn.Module):
    """A residual layer that knows its position."""

    def __init__(self, size: int, index: int, window: int = 0) -> None:
        super().__init__()
        self.layer_index, self.window = index, window
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Deep(nn.Module):
    """A model of blocks in sequence."""

    def __init__(self, blocks: Sequence[nn.Module | None]) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(blocks)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body.layers:  # type: ignore[union-attr]
            x = layer(x)
        return x


def test_two_of_each_kind_stay() -> None:
    """If nine blocks differ only in their position, the short model has two, and the model itself keeps all nine."""
    model = Deep([Block(4, index) for index in range(9)])
    short = shorten(model)
    (found,) = short.lists
    assert (found.path, found.kinds, found.kept) == ("body.layers", (0,) * 9, (0, 1))
    assert len(list(short.model.parameters())) == 4
    assert len(list(model.parameters())) == 18


def test_kinds_differ_by_attributes_and_shapes() -> None:
    """Blocks with alternating windows are two kinds, of which two each stay in order."""
    model = Deep([Block(4, index, window=7 * (index % 2)) for index in range(6)])
    (found,) = shorten(model).lists
    assert (found.kinds, found.kept) == ((0, 1, 0, 1, 0, 1), (0, 1, 2, 3))


def test_one_block_is_no_list() -> None:
    """A list of one block is not shortened, but a list inside its block is. A list without parameters is ignored."""
    model = nn.Module()
    model.stages = nn.ModuleList([Deep([Block(4, index) for index in range(5)])])
    model.drops = nn.ModuleList([nn.Dropout(), nn.Dropout()])
    (found,) = shorten(model).lists
    assert (found.path, found.kept) == ("stages.0.body.layers", (0, 1))


def test_an_attribute_that_happens_to_equal_the_position_of_one_block_still_counts() -> None:
    """A window that equals one block's position is no position, so the blocks are of one kind."""
    model = Deep([Block(4, index, window=2) for index in range(5)])
    assert shorten(model).lists[0].kinds == (0,) * 5


def test_the_short_model_shares_parameters_and_computes() -> None:
    """The short model computes with the first two of the model's own blocks."""
    model = Deep([Block(4, index) for index in range(5)])
    x = torch.randn(2, 4)
    layers = model.body.layers
    assert isinstance(layers, nn.ModuleList)
    assert torch.equal(shorten(model).model(x), layers[1](layers[0](x)))


def test_none_keeps_everything() -> None:
    """With `kept=None` the model is returned itself, with all its blocks as kept."""
    model = Deep([Block(4, index) for index in range(5)])
    short = shorten(model, kept=None)
    assert short.model is model
    assert short.lists[0].kept == tuple(range(5))


def test_places_without_a_block_are_alike() -> None:
    """None in a list of blocks is a kind, two of which stay at the positions of the short list."""
    blocks = [None if index in (0, 4) else Block(4, index) for index in range(9)]
    short = shorten(Deep(blocks))
    (found,) = short.lists
    assert (found.kinds, found.kept) == ((0, 1, 1, 1, 0, 1, 1, 1, 1), (0, 1, 2, 4))
    body: Any = short.model.body
    assert [layer is None for layer in body.layers] == [True, False, False, True]
