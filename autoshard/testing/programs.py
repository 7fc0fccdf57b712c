"""Hypothesis strategy for models: small `nn.Module`s with example inputs, drawn as source code.

A failing example that Hypothesis prints can be pasted into a file and run. A drawn model has one hidden value `h` of
shape [batch, length, width]. Its blocks (`autoshard.testing.blocks`) are a few lines each, which map `h` to a new `h`.
All values are float32 (tokens: int64) and of order one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn

from autoshard.testing.blocks import (
    BLOCKS,
    Draw,
    SourceWriter,
    batch_norm,
    random_numbers,
    reduction,
    running_mean,
    scale_and_shift,
)
from autoshard.testing.source import run_code
from autoshard.testing.whole_step import WholeStep

_VOCABULARY = 16


@dataclass(frozen=True, slots=True)
class DrawnProgram:
    """A generated model with example inputs, from `programs()`. It prints as its source code.

    Args:
        model: the module; equal sources have equal parameters.
        inputs: positional example inputs; for a training step, the whole batch with all its micro-batches.
        source: Python code that defines `model`, `inputs` and, for a training step, `whole_step`.
        whole_step: the training step. None, the default, if the program is only a call of the model.
    """

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    source: str
    whole_step: WholeStep | None = None

    def __repr__(self) -> str:
        return f"\n{self.source}"


def programs(
    *, max_blocks: int = 4, uneven: bool | None = None, whole_steps: bool | None = False, draws: bool = False
) -> st.SearchStrategy[DrawnProgram]:
    """Generate small models: an embedding or features, blocks of operators, and perhaps a loss.

    Args:
        max_blocks: largest number of blocks (`autoshard.testing.blocks`) between input and loss.
        uneven: whether batch, length and width are not multiples of four; None: rarely.
        whole_steps: whether programs are training steps, with a loss, a traced optimizer, clipping and micro-batches;
            None: some are.
        draws: whether models may use random numbers, such as dropout. `check_plan` gives one device the same numbers.

    Example:
        >>> from hypothesis import find
        >>> find(programs(max_blocks=0), lambda program: True).source.splitlines()[0]
        'import torch'
    """
    return st.composite(_draw_program)(max_blocks, uneven, whole_steps, draws)


def run_source(source: str) -> DrawnProgram:
    """Run Python code that defines `model` and `inputs`, and return the program that they form.

    The global random state is restored afterwards.

    Example:
        >>> run_source("import torch\\nmodel = torch.nn.Identity()\\ninputs = (torch.ones(2),)").inputs
        (tensor([1., 1.]),)
    """
    scope = run_code(source)
    return DrawnProgram(scope["model"], tuple(scope["inputs"]), source, scope.get("whole_step"))


def _draw_program(
    draw: Draw, max_blocks: int, uneven: bool | None, whole_steps: bool | None, draws: bool
) -> DrawnProgram:
    is_step = draw(st.booleans()) if whole_steps is None else whole_steps
    parts = draw(st.sampled_from((1, 2))) if is_step else 1
    writer = _start(draw, uneven, parts)
    draw(st.sampled_from(_ENTRIES))(draw, writer)
    if is_step:
        scale_and_shift(draw, writer)  # parameters to train
    for _ in range(draw(st.integers(0, max_blocks))):
        draw(st.sampled_from(_blocks(parts, draws=draws)))(draw, writer)
    draw(st.sampled_from(_LOSSES if is_step else (*_LOSSES, _exit_hidden)))(draw, writer)
    return run_source(writer.source(draw(st.integers(0, 3)), _draw_step(draw, parts) if is_step else ()))


def _blocks(parts: int, *, draws: bool) -> Sequence[_Step]:
    """Return the blocks to draw from.

    For several micro-batches (`parts` > 1), blocks that combine samples are left out.
    """
    if parts > 1:
        return [block for block in BLOCKS if block not in (batch_norm, reduction, running_mean)]
    return (*BLOCKS, random_numbers) if draws else BLOCKS


_OPTIMIZERS = (
    "torch.optim.SGD, lr=0.05",
    "torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01",
    "torch.optim.Adam, lr=0.01, eps=0.01",
    "torch.optim.AdamW, lr=0.01, eps=0.01",
    "torch.optim.AdamW, lr=0.01, eps=0.01, amsgrad=True",
)
"""Optimizers to draw from, as source code.

Adam's epsilon is large. With a small epsilon, Adam divides noise by its own size if a gradient is almost zero.
"""


def _draw_step(draw: Draw, parts: int) -> list[str]:
    optimizer, limit = draw(st.sampled_from(_OPTIMIZERS)), draw(st.sampled_from((None, 0.5)))
    return [
        "",
        "from functools import partial",
        "from autoshard.testing import WholeStep",
        "",
        f"whole_step = WholeStep(partial({optimizer}), max_grad_norm={limit}, micro_batches={parts})",
    ]


def _start(draw: Draw, uneven: bool | None, parts: int) -> SourceWriter:
    if uneven is None:
        uneven = draw(st.integers(0, 7)) == 7
    batch = draw(st.sampled_from((3, 6) if uneven else (4, 8)))
    length = draw(st.sampled_from((5, 6) if uneven else (4, 8)))
    width = draw(st.sampled_from((6, 12) if uneven else (8, 16)))
    return SourceWriter(batch=batch, length=length, width=width, rows=batch * parts)


def _enter_features(draw: Draw, writer: SourceWriter) -> None:
    h = writer.input("x", f"torch.randn({writer.rows}, {writer.length}, {writer.width})")
    writer.line(f"h = {h}")


def _enter_tokens(draw: Draw, writer: SourceWriter) -> None:
    tokens = writer.input("tokens", f"torch.randint(0, {_VOCABULARY}, ({writer.rows}, {writer.length}))")
    writer.attribute("embed", f"nn.Embedding({_VOCABULARY}, {writer.width})")
    writer.embedding_width = writer.width
    writer.line(f"h = self.embed({tokens})")
    if draw(st.booleans()):
        writer.attribute("position", f"nn.Embedding({writer.length}, {writer.width})")
        writer.line(f"h = h + self.position(torch.arange({writer.length}))")


def _exit_mean(draw: Draw, writer: SourceWriter) -> None:
    writer.line(draw(st.sampled_from(("return h.mean()", "return (h * h).mean()", "return h.sum() * 0.1"))))


def _exit_squared_error(draw: Draw, writer: SourceWriter) -> None:
    target = writer.input("target", f"torch.randn({writer.rows}, {writer.length}, {writer.width})")
    writer.line(f"return F.mse_loss(h, {target})")


def _exit_cross_entropy(draw: Draw, writer: SourceWriter) -> None:
    """Add a head over a vocabulary and return its cross-entropy. The head may share the embedding's weight."""
    target = writer.input("target", f"torch.randint(0, {_VOCABULARY}, ({writer.rows}, {writer.length}))")
    writer.attribute("head", f"nn.Linear({writer.width}, {_VOCABULARY}, bias=False)")
    if writer.embedding_width == writer.width and draw(st.booleans()):
        writer.statement("self.head.weight = self.embed.weight")
    if draw(st.booleans()):
        writer.line(f"{target} = torch.where({target} == 0, -100, {target})")
    options = draw(st.sampled_from(("", ", reduction='sum'", ", label_smoothing=0.1")))
    writer.line("logits = self.head(h)")
    writer.line(f"loss = F.cross_entropy(logits.view(-1, {_VOCABULARY}), {target}.view(-1){options})")
    writer.line(draw(st.sampled_from(("return loss", "return loss, logits", "return {'loss': loss}"))))


def _exit_hidden(draw: Draw, writer: SourceWriter) -> None:
    writer.line("return h")


_Step = Callable[[Draw, SourceWriter], None]
_ENTRIES: tuple[_Step, ...] = (_enter_features, _enter_tokens)
_LOSSES: tuple[_Step, ...] = (_exit_mean, _exit_squared_error, _exit_cross_entropy)
