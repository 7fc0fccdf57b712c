"""Rules of resampling, `im2col`, `pixel_shuffle`, `grid_sampler` and affine grids.

Ranks may split batch and channels. Each rank needs whole spatial dims of its operand. Every backward is linear in the
gradient. Interpolation is also linear in its operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.rules.dims import BLOCKED, all_blocked, moves, named, names
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Dims, Fill, Rule
from autoshard.rules.registry import sharding_rule, tensor_operands

aten = torch.ops.aten

_LINEAR = ((0,),)


def _planes(x: torch.Tensor, space: int) -> Dims:
    """Return the dims of `x`. The last `space` dims cannot be split."""
    return (*named(x.dim() - space), *all_blocked(space))


def _resample(space: int) -> Callable[..., Rule]:
    """Return the rule function of an operator whose tensor operands and result all end in `space` unsplittable dims."""

    def rule(*args: Any, **kwargs: Any) -> Rule:
        operands = tensor_operands(args, kwargs)
        dims = tuple(_planes(operand, space) for operand in operands)
        is_exact = all(x.is_floating_point() for x in operands)  # integers are rounded
        return Rule((dims, dims[:1]), linear=_LINEAR if is_exact else ())

    return rule


_RESAMPLERS = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    3: "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}  # fmt: skip


def _resample_backward(space: int) -> Callable[..., Rule]:
    def rule(grad: torch.Tensor, *args: Any, **kwargs: Any) -> Rule:
        dims = _planes(grad, space)
        return Rule(((dims,), (dims,)), linear=_LINEAR, local=_local_resample_backward, padding={})

    return rule


def _local_resample_backward(context: LocalContext, grad: Any, output_size: Any, input_size: Any, *rest: Any) -> Any:
    """Emit the backward with the rank's local shape as `input_size`, because this shape includes batch and channels."""
    return context.default(grad, output_size, context.output_shape(), *rest)


for _space, _names in _RESAMPLERS.items():
    for _name in _names.split():
        sharding_rule(getattr(aten, _name).default, getattr(aten, _name).vec)(_resample(_space))
        sharding_rule(getattr(aten, f"{_name}_backward").default)(_resample_backward(_space))


@sharding_rule(aten.im2col.default)
def im2col(x: torch.Tensor, *_: Any) -> Rule:
    """Return a rule in which a dim of the result is channels (major) times window elements (minor).

    Channels may be split.
    """
    batch = named(x.dim() - 3, "n")
    result = (*batch, ("c", "_"), BLOCKED)
    return Rule((((*batch, ("c",), BLOCKED, BLOCKED),), (result,)), linear=_LINEAR)


@sharding_rule(aten.col2im.default)
def col2im(x: torch.Tensor, *_: Any) -> Rule:
    batch = named(x.dim() - 2, "n")
    result = (*batch, ("c",), BLOCKED, BLOCKED)
    return Rule((((*batch, ("c", "_"), BLOCKED),), (result,)), linear=_LINEAR)


@sharding_rule(aten.pixel_shuffle.default)
def pixel_shuffle(x: torch.Tensor, upscale_factor: int) -> Rule:
    wide, tall = _shuffled(x)
    return moves(wide, tall, sizes=_pixels(upscale_factor), blocked=("p", "q"))


@sharding_rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(x: torch.Tensor, downscale_factor: int) -> Rule:
    wide, tall = _shuffled(x)
    return moves(tall, wide, sizes=_pixels(downscale_factor), blocked=("p", "q"))


def _shuffled(x: torch.Tensor) -> tuple[Dims, Dims]:
    batch = named(x.dim() - 3, "n")
    return (*batch, ("c", "p", "q"), ("h",), ("w",)), (*batch, ("c",), ("h", "p"), ("w", "q"))


def _pixels(factor: int) -> dict[str, int]:
    return {"p": factor, "q": factor}


@sharding_rule(aten.affine_grid_generator.default)
def affine_grid(theta: torch.Tensor, size: Sequence[int], *_: Any) -> Rule:
    """Return a rule that may split the batch. `size` is the shape [N, C, ...] of the images."""
    result = (("n",), *all_blocked(len(size) - 1))
    return Rule((((("n",), BLOCKED, BLOCKED),), (result,)), linear=_LINEAR, local=_local_affine_grid, padding={})


def _local_affine_grid(context: LocalContext, theta: Any, size: Sequence[int], *rest: Any) -> Any:
    """Emit the grid of the rank's images, because `size` includes the batch."""
    return context.default(theta, [context.output_shape()[0], *size[1:]], *rest)


def _grid_dims(space: int) -> tuple[Dims, Dims, Dims]:
    """Return the dims of operand, grid and result of a grid sampler with `space` spatial dims.

    All dims of the grid but the last may be split.
    """
    blocked = all_blocked(space)
    places = named(space, "p")
    return (("n",), ("c",), *blocked), (("n",), *places, BLOCKED), (("n",), ("c",), *places)


def _within_planes(space: int) -> dict[str, Fill]:
    """Return `Rule.padding` of a grid sampler: padding of the grid is filled with 0, a valid position.

    At a position of NaN, ATen's kernels would read outside the operand.
    """
    return dict.fromkeys(("n", *names(named(space, "p"))), 0)


def _grid_sampler(space: int) -> Callable[..., Rule]:
    def rule(x: torch.Tensor, grid: torch.Tensor, *_: Any) -> Rule:
        x_dims, grid_dims, result = _grid_dims(space)
        return Rule(((x_dims, grid_dims), (result,)), linear=_LINEAR, padding=_within_planes(space))

    return rule


def _grid_sampler_backward(space: int) -> Callable[..., Rule]:
    """Return the rule function of the backward of a grid sampler with `space` spatial dims.

    The operand's gradient is a sum over grid positions, and the grid's gradient is a sum over channels.
    """

    def rule(grad: torch.Tensor, x: torch.Tensor, grid: torch.Tensor, *args: Any) -> Rule:
        x_dims, grid_dims, result = _grid_dims(space)
        output_mask: Sequence[bool] = args[-1]
        results = (*((x_dims,) if output_mask[0] else ()), grid_dims)
        reduce = dict.fromkeys(("c", *(f"p{dim}" for dim in range(space))), "sum")
        sides, padding = ((result, x_dims, grid_dims), results), _within_planes(space)
        return Rule(sides, reduce=reduce, linear=_LINEAR, padding=padding)

    return rule


sharding_rule(aten.grid_sampler_2d.default)(_grid_sampler(2))
sharding_rule(aten.grid_sampler_3d.default)(_grid_sampler(3))
sharding_rule(aten.grid_sampler_2d_backward.default)(_grid_sampler_backward(2))
sharding_rule(aten.grid_sampler_3d_backward.default)(_grid_sampler_backward(3))
