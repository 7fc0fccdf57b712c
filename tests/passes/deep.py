"""Deep models for tests of plans without inner blocks."""

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
    """x + down(act(up(norm(x)))) * table."""

    def __init__(self, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.activation = activation()

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(self.norm(x)))) * table


class Deep(nn.Module):
    """Blocks that all read one table."""

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
    """The loss has a part from each block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(WIDTH, device=x.device).cos()
        parts = []
        for block in self.blocks:
            x = block(x, table)
            parts.append(x.mean())
        return self.last(x).square().mean() + torch.stack(parts).sum()


def alike(depth: int) -> Deep:
    """Blocks of one kind."""
    return Deep([nn.GELU] * depth)


def in_turn(depth: int) -> Deep:
    """Three blocks of one kind, then two kinds in turn."""
    return Deep([nn.Tanh] * 3 + [nn.GELU, nn.SiLU] * depth)


def summed(depth: int) -> Summed:
    """A model whose blocks each add to the loss."""
    return Summed([nn.GELU] * depth)


def batch() -> tuple[torch.Tensor]:
    """Example inputs."""
    return (torch.zeros(8, 4, WIDTH),)


def step(model: nn.Module, update: Update | None = None) -> Program:
    """The program of a step; of forward and backward without an update."""
    return tracing.trace(model, batch(), {}, update=update)


def adamw(model: nn.Module, limit: float | None = None) -> Update | None:
    """Describe AdamW's update, with gradients clipped to `limit`."""
    return update_of(named_optimizer("adamw", model.parameters()), model, limit, strict=True)


def short_step(model: nn.Module, update: Update | None = None, margin: int = 1) -> Program:
    """The same without inner blocks."""
    short = tracing.leave_out_blocks(model, margin, least=1)
    assert short is not None
    return replace(step(short.model, update), repeats=short.repeats)
