"""Train a model for a few steps, and compare two trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.weights.local_part import LocalPart

RELATIVE, FLOOR = 1e-5, 1e-6


@dataclass(frozen=True, slots=True)
class Training:
    """Losses of each step, gradients of the first step, and parameters after the last, all as whole tensors."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def train(
    model: nn.Module, inputs: Mapping[str, Any], steps: int = 3, *, lr: float = 1e-2, eps: float = 1e-4
) -> Training:
    """Train by AdamW in plain PyTorch; the model returns its loss alone or under "loss".

    The default eps is 1e-4, not torch's 1e-8. If a true gradient is zero, such as a key bias in attention, AdamW
    divides rounding noise by its own size. Another order of summation would then move the parameter by up to lr.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=eps)
    losses, gradients = [], {}
    for step in range(steps):
        found = model(**inputs)
        loss = found if isinstance(found, torch.Tensor) else found["loss"]
        loss.backward()
        if step == 0:
            gradients = {name: whole(item.grad) for name, item in model.named_parameters() if item.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return Training(losses, gradients, {name: whole(item) for name, item in model.named_parameters()})


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *args: Any,
    limit: float | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Take a step as scripts for one device do, and return its loss.

    The model returns its loss alone or under "loss"; with `loss_fn` the last argument is the target. Gradients are
    clipped to `limit`.
    """
    found = model(*args, **kwargs) if loss_fn is None else loss_fn(model(*args[:-1], **kwargs), args[-1])
    loss = found if isinstance(found, torch.Tensor) else found["loss"]
    loss.backward()
    if limit is not None:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_trains_alike(
    step: Any,
    plain: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Any, ...] | Mapping[str, Any]],
    *,
    loss: tuple[float, float] = (1e-5, 1e-6),
    parameters: tuple[float, float] = (1e-5, 2e-6),
) -> None:
    """Check that the losses of a compiled step and its final parameters equal one device.

    Tolerances are pairs, relative and absolute.
    """
    for batch in batches:
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        expected = plain_step(plain, optimizer, *args, **kwargs)
        torch.testing.assert_close(whole(step(*args, **kwargs)), expected, rtol=loss[0], atol=loss[1])
    held, (rtol, atol) = dict(step.sharded.named_parameters()), parameters
    for name, value in plain.named_parameters():
        torch.testing.assert_close(whole(held[name]), value.detach(), rtol=rtol, atol=atol, msg=f"{name} differs")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, detached and copied."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def assert_equal(found: Training, expected: Training) -> None:
    """Check that losses, gradients and parameters agree, as `assert_close` does."""
    for step, (loss, reference) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert_close(loss, reference, f"loss of step {step}")
    for kind in ("gradients", "parameters"):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        assert mine.keys() == theirs.keys()
        for name, reference in theirs.items():
            assert_close(mine[name], reference, f"{kind} {name}")


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check that each element differs by at most 1e-5 of its reference, or by 1e-6 if that is more."""
    difference = (found - expected).abs()
    excess = difference - (RELATIVE * expected.abs()).clamp(min=FLOOR)
    count = int((excess > 0).sum())
    assert count == 0, f"{what}: {count} elements are off, the worst by {difference.max().item():.3g}"


def index_of(part: LocalPart) -> tuple[slice, ...]:
    """Return the position of a rank's part in its whole tensor, as slices."""
    return tuple(slice(first, first + size) for first, size in zip(part.offset, part.tensor.shape, strict=True))
