"""This machine as a cluster to plan for: what `cost_models.calibration` measures, and autoshard's own operators."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import autoshard.kernels  # noqa: F401  (registers the operators)
from cost_models import calibration
from cost_models.calibration import Calibration, OnProgress
from cost_models.kernel_samples import KernelSample

ATTENTIONS = ((1, 2, 64, 64), (4, 4, 128, 64), (16, 4, 128, 64), (2, 4, 512, 64))
ROWS, CLASSES, COLUMNS = (32, 512, 4096), 1024, 768


def calibrate(
    *,
    name: str = "this_machine",
    memory_bytes: int | None = None,
    budget_s: float = 20.0,
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Measure this machine with all ranks of its process group at once, or alone without one.

    `.cluster` of the result is what `autoshard.plan` takes. Arguments: see `cost_models.calibration.calibrate`.
    """
    return calibration.calibrate(
        name=name,
        memory_bytes=memory_bytes,
        budget_s=budget_s,
        kernels=tuple(semantic_samples()),
        on_progress=on_progress,
    )


def semantic_samples() -> Iterator[KernelSample]:
    """Calls of autoshard's own operators, which a CPU runs as many of PyTorch's: [B, H, S, D] of attention, or rows."""
    ours, aten = torch.ops.autoshard, torch.ops.aten
    for shape in ATTENTIONS:
        b, h, s, d = shape
        q, k, v, grad = (torch.randn(shape) for _ in range(4))
        constants = (0.0, True, d**-0.5, 0, [0, 0, 0, 0], [b, h, s, s])
        out, lse = ours.attention(q, k, v, None, None, *constants)
        yield KernelSample.of(ours.attention.default, q, k, v, None, None, *constants)
        backward = ours.attention_backward.default
        yield KernelSample.of(backward, grad, q, k, v, None, out, lse, None, *constants)
    weight = torch.ones(COLUMNS)
    for count in ROWS:
        logits, target, grad = torch.randn(count, CLASSES), torch.randint(0, CLASSES, (count,)), torch.randn(count)
        _, lse = ours.cross_entropy(logits, target, -100, 0.0)
        yield KernelSample.of(ours.cross_entropy.default, logits, target, -100, 0.0)
        yield KernelSample.of(ours.cross_entropy_backward.default, grad, logits, target, lse, -100, 0.0)
        x, wide = torch.randn(count, COLUMNS), torch.randn(count, COLUMNS)
        _, rstd = aten._fused_rms_norm.default(x, [COLUMNS], weight, 1e-6)
        yield KernelSample.of(aten._fused_rms_norm.default, x, [COLUMNS], weight, 1e-6)
        backward = aten._fused_rms_norm_backward.default
        yield KernelSample.of(backward, wide, x, [COLUMNS], rstd, weight, [True, True])
