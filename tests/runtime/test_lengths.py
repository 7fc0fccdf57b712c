"""With `dynamic_lengths`, calls of many lengths are padded to few lengths, and results equal one device."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import autoshard
from autoshard import Mesh, TraceError
from autoshard.runtime.lengths import padded_length
from autoshard.runtime.sharded_module import ShardedModule

WORDS, WIDTH = 12, 8


class Tagger(nn.Module):
    """A causal model that returns a loss, which ignores targets of -100, and predictions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        query, key, value = self.mix(self.words(tokens)).chunk(3, -1)
        scores = self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        return {"loss": loss, "scores": scores, "shifted": scores[:, :-1]}


class Mean(Tagger):
    """A model whose loss is a mean over all positions, so that padding changes it."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(tokens, targets)["scores"].square().mean()}


PADDING = {"tokens": 0, "targets": -100}


def batch(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randint(0, WORDS, (2, 4, length), generator=torch.Generator().manual_seed(seed))
    return made[0], made[1]


def test_lengths_are_few_and_at_most_half_more() -> None:
    """Lengths from 8 to 4096 are padded to 19 different lengths, by at most half."""
    found = {length: padded_length(length) for length in range(8, 4097)}
    assert len(set(found.values())) == 19
    assert all(length <= padded <= 1.5 * length for length, padded in found.items())


def test_many_lengths_share_programs_and_equal_one_device() -> None:
    """Outputs and gradients of eight lengths equal one device, with training programs for two padded lengths."""
    model = Tagger()
    plain = copy.deepcopy(model)
    sharded = autoshard.compile(model, Mesh({"data": 2}), options=autoshard.Options(dynamic_lengths=PADDING))
    for length in range(9, 17):
        tokens, targets = batch(length, seed=length)
        expected, found = plain(tokens, targets), sharded(tokens, targets=targets)
        for name, value in expected.items():
            assert found[name].shape == value.shape
            torch.testing.assert_close(found[name], value)
        (expected["loss"] + expected["scores"].square().mean()).backward()
        (found["loss"] + found["scores"].square().mean()).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    training = [program for program in sharded.programs if program.phased.backward_outputs]
    assert len(training) == 4, "two lengths, of the loss alone and of all outputs"


def test_what_is_undefined_on_one_device_is_no_effect_of_padding() -> None:
    """A padded call without any target returns a NaN loss and right predictions, as one device does."""
    model = Tagger()
    sharded = autoshard.compile(model, Mesh({"data": 2}), options=autoshard.Options(dynamic_lengths=PADDING))
    tokens, targets = batch(10)
    found = sharded(tokens, torch.full_like(targets, -100))
    assert found["loss"].isnan()
    torch.testing.assert_close(found["scores"], model(tokens, targets)["scores"])


def test_a_training_step_pads() -> None:
    """Three padded steps of SGD on three lengths give the losses and parameters of one device."""
    model = Tagger()
    plain = copy.deepcopy(model)
    step = autoshard.compile(
        model,
        Mesh({"data": 2}),
        optimizer=torch.optim.SGD(model.parameters(), 0.5),
        options=autoshard.Options(dynamic_lengths=PADDING),
    )
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for length in (10, 11, 12):
        loss = plain(*batch(length))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(*batch(length)), loss.detach())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter)


@pytest.mark.parametrize("kind", [torch.optim.SGD, partial(torch.optim.Adagrad, eps=1e-3)])
def test_micro_batches_are_padded(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """Padded micro-batches with unequal numbers of targets train as the whole batch on one device."""
    model = Tagger()
    plain = copy.deepcopy(model)
    options = autoshard.Options(dynamic_lengths=PADDING)
    optimizer, own = kind(plain.parameters(), 0.1), kind(model.parameters(), 0.1)
    step = autoshard.compile(model, Mesh({"data": 2}), optimizer=own, micro_batches=2, options=options)
    for length in (10, 11):
        tokens, targets = batch(length)
        targets[0, 4:] = -100
        loss = plain(tokens, targets)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(tokens, targets), loss.detach())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter)


def test_an_empty_length_is_refused() -> None:
    """A call of length zero raises."""
    sharded = autoshard.compile(Tagger(), Mesh({"data": 2}), options=autoshard.Options(dynamic_lengths=PADDING))
    with pytest.raises(TraceError, match="no elements"):
        sharded(*batch(0))


def equal_to_one_device(model: nn.Module, padding: dict[str, float], *calls: tuple[torch.Tensor, ...]) -> ShardedModule:
    """Check outputs, gradients and buffers of padded calls against one device; return the compiled model."""
    plain = copy.deepcopy(model)
    sharded = autoshard.compile(model, Mesh({"data": 2}), options=autoshard.Options(dynamic_lengths=padding))
    for call in calls:
        for found, expected in zip(leaves_of(sharded(*call)), leaves_of(plain(*call)), strict=True):
            torch.testing.assert_close(found, expected)
            if expected.requires_grad:
                found.square().sum().backward(retain_graph=True)
                expected.square().sum().backward(retain_graph=True)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)
    return sharded


def leaves_of(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def test_a_model_that_looks_at_padding_runs_at_its_own_lengths(caplog: pytest.LogCaptureFixture) -> None:
    """A model that padding would change runs unpadded, and one warning names the operator and its line."""
    sharded = equal_to_one_device(Mean(), PADDING, *(batch(length) for length in (9, 10, 11, 12)))
    assert len(sharded.programs) == 4
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert re.search(r"own lengths.*aten\.mean\.default at test_lengths\.py:\d+ in forward", warnings[0])


def test_statistics_of_the_batch_are_those_of_the_batch() -> None:
    """Running statistics of a batch norm equal one device, without padding."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    equal_to_one_device(Normed(), {"x": 0}, (torch.randn(4, 5, 3),), (torch.randn(4, 6, 3),))


def test_results_that_grow_otherwise_are_not_cut_to_a_guess() -> None:
    """A result twice as long as the input equals one device."""

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x], 1)

    equal_to_one_device(Doubled(), {"x": 0}, (torch.randn(4, 5),))


class Pooled(nn.Module):
    """A classifier that pools words; padding changes its result only later or only in training."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.words, self.head = how, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4)
        if how == "zero-initialised head":
            nn.init.zeros_(self.head.weight)
        if how == "padding's row begins at zero":
            nn.init.zeros_(self.words.weight[0].data)

    def forward(self, tokens: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        words = self.words(tokens)
        match self.how:
            case "zero-initialised head":
                pooled = words.mean(1)
            case "padding's row begins at zero":
                pooled = words.sum(1)
            case _:
                pooled = words.mean(1) if self.training else words[:, 0]
        return F.cross_entropy(self.head(pooled), label)


@pytest.mark.parametrize("how", ["zero-initialised head", "padding's row begins at zero", "pools in training only"])
def test_padding_that_counts_later_on_does_not_count(how: str) -> None:
    """Training equals one device if padding has an effect only after some steps, or only in training."""
    model = Pooled(how)
    plain = copy.deepcopy(model)
    sharded = autoshard.compile(model, Mesh({"data": 2}), options=autoshard.Options(dynamic_lengths={"tokens": 0}))
    optimizers = [torch.optim.SGD(each.parameters(), 1.0) for each in (model, plain)]
    for step in range(4):
        tokens, label = batch(9 + step % 3, step)[0].clamp(min=1), torch.tensor([0, 1, 2, 3])
        losses = [each(tokens, label) for each in (sharded, plain)]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "keys": lambda scores, mask: scores.masked_fill((mask == 0)[:, None], -torch.inf),
    "keys, chosen": lambda scores, mask: torch.where((mask != 0)[:, None], scores, -torch.inf),
    "keys or later places": lambda scores, mask: scores.masked_fill((mask == 0)[:, None] | later(scores), -torch.inf),
    "keys, then later places": lambda scores, mask: scores.masked_fill((mask == 0)[:, None], -torch.inf).masked_fill(
        later(scores), -torch.inf
    ),
    "rows and keys, far": lambda scores, mask: torch.where(mask[:, None] * mask[..., None] != 0, scores, -1e9),
    "rows and keys": lambda scores, mask: torch.where(mask[:, None] * mask[..., None] != 0, scores, -torch.inf),
    "rows, then keys": lambda scores, mask: scores.masked_fill((mask == 0)[..., None], -torch.inf).masked_fill(
        (mask == 0)[:, None], -torch.inf
    ),
}


def later(scores: torch.Tensor) -> torch.Tensor:
    return torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool).triu(1)


class Masked(Tagger):
    """A tagger with attention by hand, whose scores are masked in one of the ways of `MASKS`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.words(tokens)).chunk(3, -1)
        weights = MASKS[self.how](query @ key.transpose(1, 2), mask).softmax(-1)
        return F.cross_entropy(self.out(weights @ value).flatten(0, 1), targets.flatten())


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", MASKS)
def test_rows_of_padding_whose_scores_are_all_masked_are_not_padded(how: str) -> None:
    """Calls whose masks leave a padded row no key run unpadded; calls with other masks share one padded program.

    A softmax over such a row is NaN, and so would be all gradients.
    """
    calls = [(*batch(length, length), torch.ones(4, length)) for length in (9, 10)]
    sharded = equal_to_one_device(Masked(how), {**PADDING, "mask": 0}, *calls)
    assert len(sharded.programs) == (2 if how in ("rows and keys", "rows, then keys") else 1)


SHAPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "logarithm": lambda x, mask: x.log().masked_fill(mask == 0, 0),
    "root": lambda x, mask: x.abs().sqrt() * mask,
    "power": lambda x, mask: x.abs() ** 0.3 * mask,
    "length": lambda x, mask: torch.hypot(x, x) * mask,
    "quotient": lambda x, mask: torch.where(mask != 0, 1 / x, 0),
    "norm without epsilon": lambda x, mask: torch.where(mask != 0, F.layer_norm(x, (3,), eps=0.0), 0),
    "norm": lambda x, mask: F.layer_norm(x, (3,)) * mask,
    "power of two": lambda x, mask: 2**x * mask,
}


class Shaped(nn.Module):
    """A sum of a function of each element and a mask."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return SHAPES[self.how](x * self.scale, mask).sum()


@pytest.mark.parametrize("how", SHAPES)
def test_padding_without_a_gradient_is_none(how: str) -> None:
    """Models with an infinite derivative at padding run at their own lengths, and equal one device.

    That derivative times a mask of zero is NaN, although the loss is finite.
    """
    calls = [(torch.rand(4, length, 3) + 0.5, torch.ones(4, length, 1)) for length in (9, 10)]
    sharded = equal_to_one_device(Shaped(how), {"x": 0, "mask": 0}, *calls)
    assert len(sharded.programs) == (1 if how in ("norm", "power of two") else 2)


EDGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "view without elements": lambda x, ids: torch.cat([x, x.new_zeros(4, 0, 2).view(4, 0)], 1).sum(),
    "view without elements at short lengths": lambda x, ids: (
        x.sum() + x.new_ones(4, max(len(x[0]) - 10, 0)).view(-1).sum()
    ),
    "maximum of a number": lambda x, ids: x.sum().max(0)[0],
    "index of the largest number": lambda x, ids: x.sum() + x.sum().detach().argmax(-1),
    "logarithm of the sum of one": lambda x, ids: x.sum().logsumexp(0),
    "selection of a number": lambda x, ids: x.sum().index_select(0, ids.new_zeros(1)).sum(),
    "gather of a number": lambda x, ids: x.sum().gather(0, ids.new_zeros(1)).sum(),
    "whole division": lambda x, ids: (x * (7 // ids)).sum(),
    "remainder": lambda x, ids: (x * (7 % (ids * ids.shape[0]))).sum(),
    "division by a number": lambda x, ids: (x * (ids // 3)).sum(),
}
OWN_LENGTH = ("view without elements at short lengths", "whole division", "remainder")


class Edge(nn.Module):
    """A function of fractions and of whole numbers without zeros."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return EDGES[self.how](x * self.scale, ids)


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", EDGES)
def test_numbers_views_without_elements_and_divisions_are_followed(how: str) -> None:
    """Calls that would raise in padding, or cannot be proven, run at their own lengths; all others are padded."""
    calls = [(torch.rand(4, length), torch.full((4, length), 5)) for length in (9, 10)]
    sharded = equal_to_one_device(Edge(how), {"x": 0, "ids": 0}, *calls)
    assert len(sharded.programs) == (2 if how in OWN_LENGTH else 1)


def test_arguments_that_do_not_share_a_length_are_refused() -> None:
    """Arguments with different lengths, or without the padded dim, raise an error that states lengths or shape."""
    sharded = autoshard.compile(Tagger(), Mesh({"data": 2}), options=autoshard.Options(dynamic_lengths=PADDING))
    with pytest.raises(TraceError, match=r"lengths of this call are {'tokens': 9, 'targets': 7}"):
        sharded(batch(9)[0], batch(7)[1])
    with pytest.raises(TraceError, match=r"pads dim 1 of 'tokens', a tensor of two dims or more; found shape=\(4,\)"):
        sharded(batch(9)[0][:, 0], batch(9)[1])
