"""Uses of micro-batches with independent samples, although operators know the batch size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers


class Net(nn.Module):
    """Layers with a loss of features and targets."""

    def __init__(self, layers: Callable[[], nn.Module], loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.loss = layers(), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layers(x), x, y)


def trained(
    layers: Callable[[], nn.Module], loss: Callable[[Tensor, Tensor, Tensor], Tensor], *shape: int
) -> Callable[[Compile], Numbers]:
    """A script of two steps in four micro-batches of two samples."""

    def script(compile: Compile) -> Numbers:
        model = Net(layers, loss)
        x, y = torch.randn(8, *shape), torch.tensor([0, 0, 1, 2, 0, 3, 4, 1])
        step = compile(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=4)
        return numbers(*(step(x, y) for _ in range(2)))

    return script


def blocks() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.InstanceNorm2d(4, affine=True)
    )


def frozen() -> nn.Module:
    """Train behind a backbone whose batch norm reads its running statistics, as in fine-tuning of detectors."""
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4).eval(), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def last_of(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The value at the last position of each sequence."""
    return z[torch.arange(len(y), device=z.device), y].square().mean()


def masked(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mask targets only if the batch has padding, as scripts do to save work."""
    if (y == 0).any():
        return (z.square().sum(-1) * (y != 0)).sum() / (y != 0).sum()
    return z.square().sum(-1).mean()


def policy(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a policy: the log-probability of each sample's action, times its advantage."""
    return -(z.log_softmax(-1)[torch.arange(z.shape[0]), y] * x[:, 0]).mean()


def held_back(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A margin: the target's logit is lowered before cross-entropy."""
    return F.cross_entropy(z.index_put((torch.arange(len(y)), y), -x.new_full((1,), 0.5), accumulate=True), y)


USES = (
    Use("group and instance norm", trained(blocks, lambda z, x, y: (z - x).square().mean(), 4, 3, 3)),
    Use("frozen statistics", trained(frozen, lambda z, x, y: F.cross_entropy(z, y), 4, 4, 4)),
    Use("the last of each sequence", trained(lambda: nn.Linear(3, 3), last_of, 5, 3)),
    Use("a mask where there is padding", trained(linear, masked, 6)),
    Use("a mask where there is padding, on two ranks", trained(linear, masked, 6), processes=True),
    Use("logits of actions", trained(linear, policy, 6)),
    Use("logits of actions, on two ranks", trained(linear, policy, 6), processes=True),
    Use("a margin of the target", trained(linear, held_back, 6)),
    Use(
        "the sample before",
        trained(linear, lambda z, x, y: (z[torch.arange(len(y)) - 1] - z).square().mean(), 6),
        refused="place of a sample",
    ),
)
