"""Resampling, padding and unfolding of images have one device's results under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from autoshard.ir.mesh import Mesh
from tests.rules.recording import check_recorded


def _resize(mode: str, dims: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.interpolate(x, scale_factor=2.0, mode=mode) if x.dim() == dims + 2 else x


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_padding_of_grids(mode: str, padding: str) -> None:
    """On four ranks, samples of five images at grids of seven rows equal one device's under every strategy."""
    x, grid = (torch.randn(5, *shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4, 4), (3, 7, 2)))
    check_recorded(lambda: F.grid_sample(x, grid, mode, padding, align_corners=False), meshes=(Mesh({"a": 4}),))


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("function", "space"),
    [
        (_resize("nearest", 1), 1),
        (_resize("nearest", 2), 2),
        (_resize("bilinear", 2), 2),
        (_resize("bicubic", 2), 2),
        (_resize("trilinear", 3), 3),
        (lambda x: F.unfold(x, 2), 2),
        (lambda x: F.fold(F.unfold(x, 2), (4, 4), 2), 2),
        (lambda x: F.pixel_shuffle(x, 2), 2),
        (lambda x: F.pixel_unshuffle(x, 2), 2),
        (lambda x: F.pad(x, (1, 1, 0, 2), mode="reflect"), 2),
        (lambda x: F.pad(x, (1, 1), mode="replicate"), 1),
        (lambda x: F.grid_sample(x, torch.rand(2, 4, 2, 2, dtype=torch.float64), align_corners=False), 2),
    ],
)
def test_planes(function: Callable[[torch.Tensor], torch.Tensor], space: int) -> None:
    """Under every strategy, the results and gradients of an image operator equal one device's."""
    x = torch.randn(2, 8, *[4] * space, dtype=torch.float64, requires_grad=True)
    assert check_recorded(lambda: function(x))


@pytest.mark.parametrize("size", [[5, 3, 4, 2], [5, 1, 2, 3, 4]])
def test_affine_grids(size: list[int]) -> None:
    """On four ranks, affine grids of five images and their gradients equal one device's under every strategy."""
    theta = torch.randn(5, len(size) - 2, len(size) - 1, dtype=torch.float64, requires_grad=True)
    function = partial(F.affine_grid, theta, size, align_corners=False)
    assert "aten.affine_grid_generator.default" in check_recorded(function, meshes=(Mesh({"a": 4}),))
