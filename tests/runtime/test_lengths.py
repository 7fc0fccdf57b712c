"""Calls of many lengths: padded to few, with the results of the calls as they are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard import Mesh, TraceError
from autoshard.runtime.lengths import padded_length

WORDS, WIDTH = 12, 8


class Tagger(nn.Module):
    """A causal model that gives a loss, which leaves out targets of -100, and what it predicts."""

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
    """A model whose loss is a mean over all places."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(tokens, targets)["scores"].square().mean()}


PADDING = {"tokens": 0, "targets": -100}


def batch(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randint(0, WORDS, (2, 4, length), generator=torch.Generator().manual_seed(seed))
    return made[0], made[1]


def test_lengths_are_few_and_at_most_half_more() -> None:
    """Between 8 and 4,096 there are 19 lengths, each at least as long as asked for."""
    found = {length: padded_length(length) for length in range(8, 4097)}
    assert len(set(found.values())) == 19
    assert all(length <= padded <= 1.5 * length for length, padded in found.items())


def test_many_lengths_share_programs_and_equal_one_device() -> None:
    """Loss, predictions and gradients of eight lengths are those of one device, with two programs of training."""
    model = Tagger()
    plain = copy.deepcopy(model)
    sharded = autoshard.compile(model, Mesh({"data": 2}), dynamic_lengths=PADDING)
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
    """The loss of targets that are all left out is NaN, padded or not; what is finite beside it is compared."""
    model = Tagger()
    sharded = autoshard.compile(model, Mesh({"data": 2}), dynamic_lengths=PADDING)
    tokens, targets = batch(10)
    found = sharded(tokens, torch.full_like(targets, -100))
    assert found["loss"].isnan()
    torch.testing.assert_close(found["scores"], model(tokens, targets)["scores"])


def test_a_training_step_pads() -> None:
    """Three steps of SGD on three lengths give the parameters of one device."""
    model = Tagger()
    plain = copy.deepcopy(model)
    step = autoshard.compile(
        model, Mesh({"data": 2}), optimizer=torch.optim.SGD(model.parameters(), 0.5), dynamic_lengths=PADDING
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


def test_a_model_that_looks_at_padding_is_refused() -> None:
    """The first call that pads says by how much padding changes a result."""
    sharded = autoshard.compile(Mean(), Mesh({"data": 2}), dynamic_lengths=PADDING)
    sharded(*batch(12))
    with pytest.raises(TraceError, match=r"dynamic_lengths: padding changes result 0 of the model by up to"):
        sharded(*batch(11))


def test_statistics_of_the_batch_are_refused() -> None:
    """Padding would count in a running mean."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    sharded = autoshard.compile(Normed(), Mesh({"data": 2}), dynamic_lengths={"x": 0})
    with pytest.raises(TraceError, match=r"the model updates buffer 'norm\.running_mean' in training"):
        sharded(torch.randn(4, 5, 3))


def test_results_that_grow_otherwise_are_refused() -> None:
    """A result twice as long as the inputs is not cut back to a guess."""

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x], 1)

    sharded = autoshard.compile(Doubled(), Mesh({"data": 2}), dynamic_lengths={"input:0": 0})
    with pytest.raises(TraceError, match=r"result 0 of the model has shape=\(4, 10\).*does not grow as they do"):
        sharded(torch.randn(4, 5))


def test_arguments_that_do_not_share_a_length_are_refused() -> None:
    """The error says which lengths were found."""
    sharded = autoshard.compile(Tagger(), Mesh({"data": 2}), dynamic_lengths=PADDING)
    with pytest.raises(TraceError, match=r"lengths of this call are {'tokens': 9, 'targets': 7}"):
        sharded(batch(9)[0], batch(7)[1])
    with pytest.raises(TraceError, match=r"pads dim 1 of 'tokens', a tensor of two dims or more; found shape=\(4,\)"):
        sharded(batch(9)[0][:, 0], batch(9)[1])
