"""Uses of losses computed outside the model, on outputs that two ranks split."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import P
from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both

BY_ROWS = {"input:*": P("data"), "output:0": P("data")}
Loss = Callable[[Tensor, Tensor], Tensor]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def train(compile: Compile, loss: Loss, *beside: nn.Parameter) -> Numbers:
    """Take two steps of SGD, with ignored targets that give the ranks unequal counts; `beside` is trained too."""
    model = classifier()
    x, y = torch.randn(8, 6), torch.tensor([0, 3, 1, 4, 2, -100, -100, -100])
    compiled = compile(model, example_inputs=(x,), constraints=BY_ROWS)
    optimizer = torch.optim.SGD(itertools.chain(compiled.parameters(), beside), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(loss(compiled(x), y))
        losses[-1].backward()
        optimizer.step()
    return numbers(*losses, *compiled.parameters(), *beside)


def temperature(compile: Compile) -> Numbers:
    """Train a plain parameter that divides the logits, beside the model."""
    scale = nn.Parameter(torch.tensor(2.0))
    return train(compile, lambda z, y: F.cross_entropy(z / scale, y), scale)


def distilled(compile: Compile) -> Numbers:
    """Train on the soft targets of a separately compiled teacher."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    teacher, student = (compile(classifier(), example_inputs=(x,), constraints=BY_ROWS) for _ in range(2))
    with torch.no_grad():
        soft = (teacher(x) / 2).softmax(-1)
    loss = F.kl_div(student(x).log_softmax(-1), soft, reduction="batchmean")
    loss.backward()
    return numbers(loss, *(parameter.grad for parameter in student.parameters()))


def evaluated(compile: Compile) -> Numbers:
    """Return perplexity, accuracy and other figures of the logits, over targets that are not ignored."""
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 3, 1, 4, -100, -100, 2, 2])
    compiled = compile(classifier(), example_inputs=(x,), constraints=BY_ROWS)
    with torch.no_grad():
        logits = compiled(x)
        right = (logits.argmax(-1) == y)[y >= 0].float().mean()
        return numbers(F.cross_entropy(logits, y).exp(), right, logits[y >= 0].std(), logits.max())


def gradient_scaler(compile: Compile) -> Numbers:
    """Scale a loss by a constant, as GradScaler does, and divide the gradients by the constant."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    inputs = torch.randn(8, 8)
    compiled = compile(model, example_inputs=(inputs,))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = compiled(inputs).square().mean()
        (loss * 1024).backward()
        for parameter in compiled.parameters():
            parameter.grad /= 1024
        optimizer.step()
        losses.append(loss)
    return numbers(*losses)


LOSSES: dict[str, Loss] = {
    "ignored targets": F.cross_entropy,
    "classes that weigh differently": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0])),
    "smooth labels": nn.CrossEntropyLoss(label_smoothing=0.1),
    "rows picked by a mask": lambda z, y: F.cross_entropy(z[y >= 0], y[y >= 0]),
    "a focal loss": lambda z, y: (
        (1 - torch.exp(-F.cross_entropy(z, y, reduction="none"))).square().sum() / (y >= 0).sum()
    ),
    "a penalty on the variance": lambda z, y: F.cross_entropy(z, y) + z.var(0).mean(),
}
USES = (
    *(
        Use(f"{name}, outside", lambda compile, loss=loss: train(compile, loss), processes=True)
        for name, loss in LOSSES.items()
    ),
    *on_both("a scaled loss", gradient_scaler),
    Use("a temperature outside", temperature, processes=True),
    Use("a compiled teacher", distilled, processes=True),
    Use("perplexity and accuracy", evaluated, processes=True),
)
