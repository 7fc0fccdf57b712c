"""Steps of micro-batches train on the loss of the whole batch, or raise an error that names the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from tests.end_to_end.training import assert_trains_alike
from tests.models import build, words
from tests.runtime.processes import on_processes

CLASSES, WIDTH, ROWS, PARTS = 5, 8, 8, 4
MESH = autoshard.Mesh({"data": 2})
Loss = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A layer whose logits, with features and targets, go to a given loss."""

    weights: Tensor

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(WIDTH, CLASSES), nn.BatchNorm1d(WIDTH)
        self.register_buffer("weights", torch.rand(CLASSES) + 0.5)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, self.layer(x), x, y)


def inputs(ignored: bool = True) -> tuple[Tensor, Tensor]:
    """Return features and targets; if `ignored`, the micro-batches have unequal counts of targets above zero."""
    torch.manual_seed(1)
    y = torch.tensor([0, 0, 1, 2, 0, 3, 4, 1]) if ignored else torch.tensor([1, 2, 1, 2, 4, 3, 4, 1])
    return torch.randn(ROWS, WIDTH), y


def penalty(model: Model) -> Tensor:
    """Return a penalty on the parameters, which does not depend on the batch."""
    return 0.1 * model.layer.weight.square().sum()


COUNTED: dict[str, Loss] = {
    "ignored": lambda m, z, x, y: F.cross_entropy(z, y, ignore_index=0),
    "smooth": lambda m, z, x, y: F.cross_entropy(z, y, ignore_index=0, label_smoothing=0.1),
    "classes": lambda m, z, x, y: F.cross_entropy(z, y, weight=m.weights),
    "masked": lambda m, z, x, y: (z.square().sum(-1) * (y > 0)).sum() / (y > 0).sum(),
    "masked means": lambda m, z, x, y: (z.square().sum(-1) * (y > 0)).mean() / (y > 0).float().mean(),
    "clamped": lambda m, z, x, y: (z.square().sum(-1) * (y > 0)).sum() / (y > 0).sum().clamp(min=3),
    "one more": lambda m, z, x, y: (z.square().sum(-1) * (y > 0)).sum() / ((y > 0).sum() + 1),
    "sum and mean": lambda m, z, x, y: z.square().sum() / ((y > 0).sum() + (y > 0).float().mean() + 1),
    "a quotient": lambda m, z, x, y: z.square().sum() / (y.sum() / ((y > 0).sum() + 1) + 1),
    "the largest": lambda m, z, x, y: z.square().sum() / (x.abs().sum(0).clone() + 1).max(0).values,
    "counted penalty": lambda m, z, x, y: F.cross_entropy(z, y, ignore_index=0) + penalty(m),
    "halved": lambda m, z, x, y: 0.5 * F.cross_entropy(z, y, ignore_index=0) * 3,
}
PLAIN: dict[str, Loss] = {
    "sum": lambda m, z, x, y: z.square().sum(),
    "summed entropy": lambda m, z, x, y: F.cross_entropy(z, y, reduction="sum"),
    "summed over a number": lambda m, z, x, y: F.cross_entropy(z, y, reduction="sum") / 7.0,
    "mean": lambda m, z, x, y: z.square().mean(),
    "mean by hand": lambda m, z, x, y: (z.square().sum(-1) / len(x)).sum(),
    "squared error": lambda m, z, x, y: F.mse_loss(z, torch.ones_like(z)),
    "summed error": lambda m, z, x, y: F.mse_loss(z, torch.ones_like(z), reduction="sum"),
    "by the rows": lambda m, z, x, y: z.square().sum() / x.shape[0],
    "two terms": lambda m, z, x, y: F.cross_entropy(z, y) + 0.1 * F.mse_loss(z, torch.zeros_like(z)),
    "penalty": lambda m, z, x, y: z.square().mean() + penalty(m),
    "bce": lambda m, z, x, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, CLASSES).float()),
    "penalty by the rows": lambda m, z, x, y: penalty(m) * len(x),
    "terms in a list": lambda m, z, x, y: sum([z.square().sum(), z.abs().sum()]),
    "means in a list": lambda m, z, x, y: sum([F.cross_entropy(z, y), z.square().mean()]) - 0.0,
    "sum of a sum": lambda m, z, x, y: z.square().sum() + z.abs().sum(0).sum() * 0.5,
}


def frozen(m: Model, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return a loss of a batch norm with fixed statistics, in a model in training."""
    return m.layer(F.batch_norm(x, m.norm.running_mean, m.norm.running_var, m.norm.weight, m.norm.bias)).square().mean()


def put(m: Model, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return a loss in which one logit of each sample is overwritten."""
    return z.index_put((torch.arange(len(x)), y), x[:, 0]).square().sum()


OWN_SAMPLES: dict[str, Loss] = {
    "logits of targets": lambda m, z, x, y: z[torch.arange(len(x)), y].sum(),
    "two columns": lambda m, z, x, y: z[torch.arange(len(x))[:, None], torch.tensor([0, 2])].square().mean(),
    "places of columns": lambda m, z, x, y: z.T[y, torch.arange(len(x))].sum(),
    "all samples": lambda m, z, x, y: z[torch.arange(0, len(x), 1)].square().sum(),
    "places apart": lambda m, z, x, y: z.view(-1, 1, CLASSES)[torch.arange(len(x)), :, y].square().sum(),
    "pairs of places": lambda m, z, x, y: z.view(-1)[torch.arange(z.numel()).view(-1, CLASSES)].square().mean(),
    "a mask of keys": lambda m, z, x, y: (
        z.square()[torch.arange(len(x))[:, None, None], torch.arange(CLASSES)]
        * (x > 0)[torch.arange(len(x))[:, None, None], torch.arange(CLASSES)]
    ).sum(),
    "written over": put,
    "a margin": lambda m, z, x, y: F.cross_entropy(
        z.index_put((torch.arange(len(y)), y), -x.new_full((1,), 0.5), accumulate=True), y
    ),
    "group norm": lambda m, z, x, y: F.group_norm(m.layer(x) * x[:, :1] + z, 1).tanh().mean(),
    "group norm of images": lambda m, z, x, y: (
        F.group_norm(z[:, :4].view(-1, 4, 1, 1).expand(-1, 4, 2, 2) + x.view(-1, 4, 2, 1), 2).tanh().sum()
    ),
    "instance norm": lambda m, z, x, y: F.instance_norm(z[:, :4].view(-1, 2, 2) * x[:, :4].view(-1, 2, 2)).tanh().sum(),
    "frozen batch norm": frozen,
    "sums of classes": lambda m, z, x, y: (z.new_zeros(CLASSES, CLASSES).index_add(0, y, z) * m.weights).sum(),
    "bags of columns": lambda m, z, x, y: (
        F.embedding_bag(
            (x[:, :3] > 0).long() + y[:, None].clamp(max=3), m.layer.weight.T[:CLASSES], mode="mean", padding_idx=1
        )
        .tanh()
        .mean()
    ),
    "an affine grid": lambda m, z, x, y: (
        F.affine_grid(torch.cat([z, x[:, :1]], 1).view(-1, 2, 3), [len(x), 1, 3, 2], align_corners=False).tanh().sum()
    ),
    "new tensors": lambda m, z, x, y: (z * z.new_ones(len(x), 1) + x.new_full((1,), 0.5)).square().sum(),
    "rows of times": lambda m, z, x, y: F.cross_entropy(
        m.layer(F.layer_norm(x.view(-1, 1, WIDTH).expand(-1, 2, -1).transpose(0, 1), (WIDTH,))).reshape(-1, CLASSES),
        y[:, None].expand(-1, 2).T.reshape(-1),
        ignore_index=0,
    ),
    "columns first": lambda m, z, x, y: (z.T.reshape(-1, 1) * z.new_ones(1, 3)).tanh().mean(),
    "products behind columns": lambda m, z, x, y: (
        (F.linear(x.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4), m.layer.weight[:, :4]).view(2, -1, 5).tanh().sum(0))
        .square()
        .mean()
    ),
}
"""Losses that treat each sample alone, but index the batch by position or use its size."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, eps=0.1),  # takes its own step
}


def compare(model: nn.Module, batches: list[Any], make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Check that steps of micro-batches have the losses and parameters of one device with whole batches."""
    alone = copy.deepcopy(model)
    step = autoshard.compile(model, MESH, optimizer=make(model.parameters()), micro_batches=PARTS)
    assert_trains_alike(step, alone, make(alone.parameters()), batches, parameters=(1e-4, 1e-5))


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [*PLAIN, *COUNTED, *OWN_SAMPLES])
def test_the_loss_is_that_of_the_whole_batch(name: str) -> None:
    """Training on micro-batches equals one device with the whole batch, for sums, means and quotients by counts."""
    batch = inputs(ignored=name in COUNTED)
    compare(Model({**PLAIN, **COUNTED, **OWN_SAMPLES}[name]), [batch, batch], OPTIMIZERS["sgd"])


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_other_optimizers_train_alike(optimizer: str) -> None:
    """A traced and an untraced optimizer train on micro-batches as one device on whole batches."""
    compare(Model(COUNTED["ignored"]), [inputs()] * 3, OPTIMIZERS[optimizer])


def normed(m: Model, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return a loss behind a batch norm in training."""
    return m.layer(m.norm(x)).square().mean()


def branching(reads: Callable[[Tensor], Any]) -> Loss:
    """Return a loss that doubles if a condition of the whole batch's targets holds."""
    return lambda m, z, x, y: z.square().mean() * (2 if reads(y) else 1)


BRANCHES: dict[str, Loss] = {
    "all": branching(lambda y: (y > 0).all()),
    "not all": branching(lambda y: not (y > 0).all()),
    "any": branching(lambda y: (y == 4).any()),
    "counted": branching(lambda y: (y > 0).sum() == len(y)),
    "a count": branching(lambda y: (y > 0).sum() > 1),
    "the largest": branching(lambda y: y.max() > 3),
    "both": branching(lambda y: (y == 3).any() and (y == 0).any()),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BRANCHES)
def test_a_part_branches_as_the_batch_does(name: str) -> None:
    """If micro-batches would branch differently, all run the branch that the whole batch takes on one device."""
    compare(Model(BRANCHES[name]), [inputs(), inputs()], OPTIMIZERS["sgd"])


test_parts_branch_alike_on_two_processes = on_processes(
    {"any": partial(test_a_part_branches_as_the_batch_does, "any")}, ranks=2
)


UNLIKE: dict[str, Loss] = {
    "each part has one of the targets": branching(lambda y: (y == 4).any() and (y == 2).any()),
    "parts that are alike": branching(lambda y: (y > 0).sum() > 4),
    "a deviation": branching(lambda y: y.float().std() > 0.9),
    "the first sample": branching(lambda y: y[0] > 0),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_branch_that_no_part_takes_is_refused(name: str) -> None:
    """If no micro-batch is known to branch as the whole batch does, the step raises."""
    model = Model(UNLIKE[name])
    step = autoshard.compile(model, MESH, optimizer=OPTIMIZERS["sgd"](model.parameters()), micro_batches=PARTS)
    with pytest.raises(autoshard.NotAvailableError, match="no part of this batch is known to take the branches"):
        step(*inputs())


def writing(change: Callable[[Model, Tensor, Tensor], Any]) -> Loss:
    """Return a loss of a model that changes its buffer."""
    return lambda m, z, x, y: (change(m, x, y), z.square().mean())[1]


WRITES: dict[str, Loss] = {
    "sums": writing(lambda m, x, y: m.weights.add_(F.one_hot(y, CLASSES).sum(0))),
    "sums by index": writing(lambda m, x, y: m.weights.index_add_(0, y, x[:, 0])),
    "numbers of rows": writing(lambda m, x, y: m.weights.add_(len(x))),
    "values without samples": writing(lambda m, x, y: m.weights.copy_(m.layer.bias.detach())),
}


@pytest.mark.parametrize("name", WRITES)
def test_sums_over_samples_are_written_to_buffers(name: str) -> None:
    """After a step of micro-batches, a buffer to which `forward` adds a sum equals one device's."""
    model = Model(WRITES[name])
    alone = copy.deepcopy(model)
    alone(*inputs())
    autoshard.compile(model, MESH, optimizer=OPTIMIZERS["sgd"](model.parameters()), micro_batches=PARTS)(*inputs())
    torch.testing.assert_close(model.weights, alone.weights)


REFUSED: dict[str, tuple[Loss, str]] = {
    "running statistics": (
        lambda m, z, x, y: (
            F.instance_norm(
                x.view(-1, WIDTH, 1).expand(-1, -1, 2) * z[:, :1, None], m.norm.running_mean, m.norm.running_var
            )
            .square()
            .mean()
        ),
        "writes buffer 'norm.running_mean' from the samples",
    ),
    "a moving average": (
        writing(lambda m, x, y: m.weights.mul_(0.9).add_(x.mean(0)[:CLASSES], alpha=0.1)),
        "writes buffer 'weights' from the samples",
    ),
    "batch norm": (normed, r"batch_norm.*mixes samples|batch_norm.*computed over the whole batch"),
    "contrastive": (
        lambda m, z, x, y: F.cross_entropy(z @ z.T, torch.arange(len(x))),
        "mixes samples|place of a sample",
    ),
    "deviation": (lambda m, z, x, y: z.var(0).sum(), "var"),
    "root": (lambda m, z, x, y: z.square().sum().sqrt(), "sqrt.*not linear in a sum over the batch"),
    "trained count": (lambda m, z, x, y: z.sum() / z.square().sum(), "div.*more than inputs"),
    "two weights": (lambda m, z, x, y: z.sum() + z.mean(), "adds a sum over the batch to a mean"),
    "summed penalty": (lambda m, z, x, y: z.square().sum() + penalty(m), "count once for each part"),
    "penalty over rows": (lambda m, z, x, y: (z.square().sum() + penalty(m)) / len(x), "div.*not linear in a sum"),
    "penalty over a count": (lambda m, z, x, y: (z.square().sum() + 1) / y.sum(), "div.*a term independent"),
    "a count of rows": (lambda m, z, x, y: z.sum() / ((y.sum() + 1) * len(x)), "div.*depends on the size of the batch"),
    "counts of columns": (lambda m, z, x, y: (z.sum() / x.abs().sum(0)).mean(), "div.*several values"),
    "frequencies of ids": (
        lambda m, z, x, y: F.embedding(y, m.layer.weight, scale_grad_by_freq=True).square().mean(),
        "embedding.*how often ids occur",
    ),
    "a bias added to a sum": (lambda m, z, x, y: torch.addmv(m.layer.bias, z.T, x[:, 0]).sum(), "count once for each"),
    "rows added to a table": (
        lambda m, z, x, y: m.weights[:, None].expand(-1, CLASSES).index_add(0, y, z).sum(),
        "count once for each",
    ),
    "triangle": (lambda m, z, x, y: z.tril().sum(), "tril.*place of a sample"),
    "halves of rows": (lambda m, z, x, y: z.view(2, -1, CLASSES).sum(1).mean(), "view.*mixes samples"),
    "largest": (lambda m, z, x, y: z.max(), "max"),
    "places turned round": (lambda m, z, x, y: z[torch.arange(len(x)).flip(0), y].sum(), "place of a sample"),
    "the next sample": (lambda m, z, x, y: z[(torch.arange(len(x)) + 1) % len(x), y].sum(), "size of the batch|place"),
    "places as numbers": (lambda m, z, x, y: (z[:, 0] * torch.arange(len(x))).sum(), "place of a sample"),
    "places as classes": (lambda m, z, x, y: z[:, torch.arange(len(x)) % CLASSES].sum(), "place of a sample"),
    "every second sample": (lambda m, z, x, y: z[torch.arange(0, len(x), 2)].sum(), "place of a sample"),
    "half of the samples": (lambda m, z, x, y: z[torch.arange(len(x) // 2)].sum(), "place of a sample"),
    "places of other targets": (
        lambda m, z, x, y: (z[torch.arange(len(x))[:, None], y] * x[:, :1]).sum(),
        "place of a sample",
    ),
    "first": (lambda m, z, x, y: z[0].sum(), "mixes samples|place"),
    "softmax of merged rows": (
        lambda m, z, x, y: z.T.reshape(-1).softmax(0).square().sum(),
        "softmax.*mixes|softmax.*whole",
    ),
    "running sum of merged rows": (lambda m, z, x, y: z.T.reshape(-1).cumsum(0).square().sum(), "cumsum.*mixes"),
    "rows in two orders": (lambda m, z, x, y: (z.T.reshape(-1) * z.reshape(-1)).sum(), "mul.*mixes samples"),
    "merged and split otherwise": (lambda m, z, x, y: z.T.reshape(2, -1).tanh().sum(1).square().mean(), "view.*mixes"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_made_of_parts_is_refused_by_name(name: str) -> None:
    """A loss that micro-batches cannot compute raises before any update, and the error names the operator.

    `test_weigh_loss` has all of these losses.
    """
    loss, says = REFUSED[name]
    model = Model(loss)
    before = copy.deepcopy(model.state_dict())
    step = autoshard.compile(model, MESH, optimizer=OPTIMIZERS["sgd"](model.parameters()), micro_batches=PARTS)
    with pytest.raises(autoshard.NotAvailableError, match=says) as raised:
        step(*inputs(ignored=False))
    assert "leave micro_batches out" in str(raised.value)
    assert all(torch.equal(before[key], value) for key, value in step.sharded.state_dict().items())


def test_terms_that_weigh_a_batch_differently_are_refused() -> None:
    """A mean over counted targets plus a plain mean trains if counts are equal, and raises otherwise."""
    model = Model(lambda m, z, x, y: F.cross_entropy(z, y, ignore_index=0) + z.square().mean())
    compare(copy.deepcopy(model), [inputs(ignored=False)], OPTIMIZERS["sgd"])
    step = autoshard.compile(model, MESH, optimizer=OPTIMIZERS["sgd"](model.parameters()), micro_batches=PARTS)
    with pytest.raises(autoshard.NotAvailableError, match=r"weigh the parts of this batch differently.*0\.25"):
        step(*inputs())


def test_a_report_says_how_the_loss_was_weighed() -> None:
    """The report of `verify` says that the loss is divided by a count, and names the line of the model."""
    model = Model(COUNTED["ignored"])
    step = autoshard.compile(model, MESH, optimizer=OPTIMIZERS["sgd"](model.parameters()), micro_batches=PARTS)
    step(*inputs())
    (said,) = (item for item in autoshard.verify(step).assumptions if "micro-batches" in item)
    assert "divided by a count" in said
    assert "test_micro_batches.py" in said


class Encoder(nn.Module):
    """A `nn.TransformerEncoder` with samples first if `is_cut`, and with times first otherwise."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=is_cut)
        self.layers, self.is_cut = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), is_cut

    def forward(self, x: Tensor) -> Tensor:
        if self.is_cut:
            return self.layers(x).mean(1).tanh().mean()
        return self.layers(x.transpose(0, 1)).mean(0).tanh().mean()


@pytest.mark.parametrize("is_cut", [True, False])
def test_attention_of_torch_trains_on_micro_batches(is_cut: bool) -> None:
    """`nn.TransformerEncoder` trains on micro-batches as on one device, with samples or times first."""
    compare(Encoder(is_cut=is_cut), [(torch.randn(ROWS, 3, WIDTH),)], OPTIMIZERS["sgd"])


def test_a_causal_model_of_transformers_trains_like_one_device() -> None:
    """A Llama with some ignored labels trains on micro-batches of one sequence as on one device."""
    model, batch = build("llama", layers=1, width=16, inner=32, heads=2, words=32), words(PARTS, 8, 32)
    batch["labels"][0, :5] = -100
    compare(model, [batch], OPTIMIZERS["sgd"])


@dataclass
class Batch:
    """Features and targets."""

    x: Tensor
    y: Tensor


class OfBatch(Model):
    """A `Model` whose only argument is a `Batch`."""

    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        return super().forward(batch.x, batch.y)


def test_dataclasses_are_split() -> None:
    """A dataclass of tensors is split into micro-batches, and the first loss equals one device."""
    model = OfBatch(lambda model, logits, x, y: F.cross_entropy(logits, y))
    batch = Batch(*inputs(ignored=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autoshard.compile(model, MESH, optimizer=optimizer, micro_batches=PARTS)
    expected = model(batch).detach()
    torch.testing.assert_close(step(batch), expected)
