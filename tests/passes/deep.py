"""Deep models of like blocks, and their programs with and without the inner blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from autoshard import tracing
from autoshard.ir.program import Program
from autoshard.ir.update import Update
from autoshard.runtime.optimizer_state import named_optimizer
from autoshard.runtime.traced_optimizer import update_of

WIDTH = 16


class Block(nn.Module):
    """A block that returns `x + down(activation(up(norm(x)))) * table`."""

    def __init__(self, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.activation = activation()

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(self.norm(x)))) * table


class Deep(nn.Module):
    """A model whose blocks all read one table of cosines."""

    def __init__(self, kinds: Sequence[type[nn.Module]]) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, kinds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(WIDTH, device=x.device).cos()
        x = x + self.first
        for block in self.blocks:
            x = block(x, table)
        return self.last(x).square().mean()


class Summed(Deep):
    """A `Deep` model whose loss also has the mean of each block's result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(WIDTH, device=x.device).cos()
        parts = []
        for block in self.blocks:
            x = block(x, table)
            parts.append(x.mean())
        return self.last(x).square().mean() + torch.stack(parts).sum()


def alike(depth: int) -> Deep:
    """A model of `depth` equal GELU blocks."""
    return Deep([nn.GELU] * depth)


def in_turn(depth: int) -> Deep:
    """A model of three Tanh blocks, followed by `depth` pairs of a GELU and a SiLU block."""
    return Deep([nn.Tanh] * 3 + [nn.GELU, nn.SiLU] * depth)


def summed(depth: int) -> Summed:
    """A `Summed` model of `depth` GELU blocks."""
    return Summed([nn.GELU] * depth)


def batch() -> tuple[torch.Tensor]:
    """The example input, zeros of shape [8, 4, WIDTH], as a tuple."""
    return (torch.zeros(8, 4, WIDTH),)


def step(model: nn.Module, update: Update | None = None) -> Program:
    """The traced program of forward and backward, and of `update` if given."""
    return tracing.trace(model, batch(), {}, update=update)


def adamw(model: nn.Module, limit: float | None = None) -> Update | None:
    """Describe AdamW's update of a model, with gradients clipped to the norm `limit` if given."""
    return update_of(named_optimizer("adamw", model.parameters()), model, limit, strict=True)


def short_step(model: nn.Module, update: Update | None = None, margin: int = 1) -> Program:
    """The program of `step` for the model without inner blocks; `margin` more blocks stay at each end of a run."""
    short = tracing.leave_out_blocks(model, margin, least=1)
    assert short is not None
    return replace(step(short.model, update), repeats=short.repeats)
