"""Computations on a split output outside the model have the values and gradients of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from autoshard.runtime.split_output import SplitOutput
from tests.runtime.processes import report, run_checks

CLASSES = 12
WEIGHTS = torch.rand(CLASSES, generator=torch.Generator().manual_seed(5)) + 0.5
LAYOUTS: dict[str, Placement] = {"rows": Shard(0), "positions": Shard(1), "classes": Shard(2), "whole": Replicate()}

Computation = Callable[[Tensor, Tensor], Tensor]
"""A function from logits [rows, 4, CLASSES] and targets [rows, 4], of which -100 are ignored, to a scalar."""


def flat(z: Tensor, y: Tensor, *args: Any, **options: Any) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), *args, **options)


def likely(z: Tensor) -> Tensor:
    """Return targets that are probabilities, for each row and position of the logits."""
    return torch.arange(z.shape[0] * 4.0 * CLASSES).view(-1, CLASSES).sin().softmax(-1)


def hot(y: Tensor) -> Tensor:
    return F.one_hot(y.clamp(min=0), CLASSES).float()


LOSSES: dict[str, Computation] = {
    "ignored targets": flat,
    "another ignored index": lambda z, y: flat(z, y.clamp(min=0), ignore_index=3),
    "every target ignored": lambda z, y: flat(z, torch.full_like(y, -100)),
    "weights": lambda z, y: flat(z, y, weight=WEIGHTS),
    "label smoothing": lambda z, y: flat(z, y, label_smoothing=0.1),
    "a module, classes in the middle": lambda z, y: nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)(
        z.transpose(1, 2), y
    ),
    "positional": lambda z, y: flat(z, y, WEIGHTS, None, -100, None, "mean", 0.1),
    "summed": lambda z, y: flat(z, y, WEIGHTS, reduction="sum", label_smoothing=0.1),
    "not reduced": lambda z, y: flat(z, y, WEIGHTS, reduction="none").square().mean(),
    "probabilities": lambda z, y: F.cross_entropy(z.flatten(0, 1), likely(z), WEIGHTS, label_smoothing=0.2),
    "one sample": lambda z, y: F.cross_entropy(z[2, 1], y[2, 1].clamp(min=0), WEIGHTS),
    "targets of its own": lambda z, y: flat(z, z.argmax(-1), WEIGHTS),
    "shifted": lambda z, y: flat(z[:, :-1], y[:, 1:]),
    "masked rows": lambda z, y: F.cross_entropy(z[y >= 3], y[y >= 3]),
    "beside a penalty": lambda z, y: flat(z, y) + 1e-2 * z.logsumexp(-1).square().mean(),
    "sample by sample": lambda z, y: torch.stack(
        [F.cross_entropy(a, b.clamp(min=0)) for a, b in zip(z, y, strict=True)]
    ).sum(),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(-1).flatten(0, 1), y.flatten(), weight=WEIGHTS),
    "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, hot(y), weight=WEIGHTS, pos_weight=WEIGHTS * 2),
    "margins": lambda z, y: F.multi_margin_loss(z.flatten(0, 1), y.clamp(min=0).flatten(), weight=WEIGHTS),
    "ctc": lambda z, y: F.ctc_loss(
        z.log_softmax(-1).transpose(0, 1),
        torch.ones(len(y), 2, dtype=torch.long),
        torch.full((len(y),), 4),
        torch.full((len(y),), 2),
    ),
    "kl": lambda z, y: F.kl_div(z.log_softmax(-1), torch.full((CLASSES,), 1 / CLASSES), reduction="batchmean"),
    "contrastive": lambda z, y: F.cross_entropy(z[:, 0] @ z[:, 1].T, torch.arange(len(y))),
    "dice": lambda z, y: (2 * (z.sigmoid() * hot(y)).sum() + 1) / (z.sigmoid().sum() + (y >= 0).sum() + 1),
}
REDUCTIONS: dict[str, Computation] = {
    "a masked selection": lambda z, y: z.masked_select((y >= 3).unsqueeze(-1)).mean(),
    "a selection by its own mask": lambda z, y: z[z > 0].mean(),
    "rows of a list": lambda z, y: z[[0, 2]].square().mean(),
    "rows of a tensor": lambda z, y: z[torch.tensor([1, 1, 0])].square().mean(),
    "a masked mean": lambda z, y: (z * (y >= 3).unsqueeze(-1)).sum() / (y >= 3).sum(),
    "a masked mean of its own": lambda z, y: (z * (z > 0)).sum() / (z > 0).sum().clamp(min=1),
    "variance": lambda z, y: z.var() + z.std(0).sum(),
    "variance and mean": lambda z, y: torch.var_mean(z, 0)[0].sum(),
    "median": lambda z, y: z.median() + z.nanmean() + z.quantile(0.3),
    "largest of ties": lambda z, y: z.clamp(max=0.5).amax() + z.clamp(max=0.5).max(),
    "largest by dim": lambda z, y: z.max(0).values.square().sum() + z.amax((0, 1)).sum(),
    "product": lambda z, y: z.prod(0).mean(),
    "pieces": lambda z, y: z.unbind(0)[1].mean() + z.split(3)[0].square().mean() + z.chunk(2)[1].mean(),
    "a sum and an integer": lambda z, y: ((z.sum(0) + (y >= 0).sum(0).unsqueeze(-1) + 1) ** 2).mean(),
    "a number less a sum": lambda z, y: 1 - z.sum() + 2 ** z.mean() - torch.tensor(2.0),
    "sums of sums": lambda z, y: (z.sum(0) - z.mean(0)).abs().sum() / z.exp().sum(),
    "less its mean": lambda z, y: ((z - z.mean()) / (z.square().mean() + 1e-3).sqrt()).tanh().sum(),
    "less its rows' mean": lambda z, y: (z - z.mean(0, keepdim=True)).square().mean(),
    "a gradient": lambda z, y: torch.autograd.grad(z.pow(3).sum(), z, create_graph=True)[0].square().mean(),
    "a branch": lambda z, y: z.mean() if z.sum() > 0 else -z.mean(),
    "the value of a gradient": lambda z, y: (
        z.mean() * torch.autograd.grad(z.square().mean(), z, create_graph=True)[0].abs().sum().item()
    ),
}
COMPUTATIONS = {**LOSSES, **REDUCTIONS}


def logits_and_targets(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    y = torch.randint(0, CLASSES, (rows, 4), generator=generator)
    y[0], y[1, :2] = -100, -100
    return torch.randn(rows, 4, CLASSES, generator=generator), y


class _Check:
    """A check of one computation under every layout; processes pickle it by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> None:
        for layout, rows in (*((name, 8) for name in LAYOUTS), ("rows", 7)):
            self._compare(LAYOUTS[layout], *logits_and_targets(rows), where=f"{layout}, {rows} rows")

    def _compare(self, placement: Placement, z: Tensor, y: Tensor, where: str) -> None:
        mesh, compute = init_device_mesh("cpu", (2,)), COMPUTATIONS[self.name]
        alone, split = z.clone().requires_grad_(), distribute_tensor(z, mesh, [placement]).requires_grad_()
        copied = split * 1.0
        assert isinstance(copied, DTensor)
        losses = [compute(alone * 1.0, y), compute(SplitOutput.of(copied), y)]
        for loss in losses:
            loss.backward()
        expected, found = (loss.item() for loss in losses)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True), where
        assert isinstance(split.grad, DTensor)
        torch.testing.assert_close(
            split.grad.full_tensor(), alone.grad, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda text: where + text
        )


def check_what_is_trained_outside() -> None:
    """A plain parameter that multiplies a split output gets a plain gradient, equal to one device."""
    z, _ = logits_and_targets(8)
    mesh = init_device_mesh("cpu", (2,))
    for shape in ((), (CLASSES,)):
        trained = [torch.full(shape, 2.0, requires_grad=True) for _ in range(2)]
        split = SplitOutput.of(distribute_tensor(z, mesh, [Shard(0)]))
        for output, own in zip((z, split), trained, strict=True):
            (output * own).square().mean().backward()
        assert type(trained[1].grad) is Tensor
        torch.testing.assert_close(trained[1].grad, trained[0].grad)


def check_two_meshes() -> None:
    """Split outputs on two different mesh objects can be combined, with the values of one device."""
    z, _ = logits_and_targets(8)
    student = SplitOutput.of(distribute_tensor(z, init_device_mesh("cpu", (2,)), [Shard(0)]))
    teacher = SplitOutput.of(distribute_tensor(z, init_device_mesh("cpu", (2,), mesh_dim_names=("a",)), [Shard(1)]))
    assert (student * teacher).mean().item() == pytest.approx(z.square().mean().item())
    assert F.mse_loss(student, teacher).item() == 0


def check_half_precision() -> None:
    """The mean cross entropy of 30,000 float16 rows is right, although their sum exceeds float16."""
    z, y = torch.zeros(30_000, CLASSES, dtype=torch.float16), torch.zeros(30_000, dtype=torch.long)
    split = SplitOutput.of(distribute_tensor(z, init_device_mesh("cpu", (2,)), [Shard(0)]))
    found = F.cross_entropy(split, y)
    assert found.dtype == torch.float16
    assert found.item() == pytest.approx(math.log(CLASSES), rel=1e-3)


CHECKS: dict[str, Callable[[], None]] = {
    **{name: _Check(name) for name in COMPUTATIONS},
    **{
        check.__name__.removeprefix("check_"): check
        for check in (check_what_is_trained_outside, check_two_meshes, check_half_precision)
    },
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_checks(CHECKS, ranks=2)


@pytest.mark.parametrize("name", CHECKS)
def test_as_on_one_device(outcomes: dict[str, str], name: str) -> None:
    """The check passes on two Gloo ranks."""
    report(outcomes, name)
