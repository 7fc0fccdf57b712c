"""Methods of the user's model, called through the compiled model, give the results of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.generation.configuration_utils import GenerationConfig

import autoshard
from autoshard import Mesh, P
from tests.end_to_end.training import assert_close, whole
from tests.models import build
from tests.runtime.processes import on_processes

PAIR = Mesh({"data": 2})


class Coder(nn.Module):
    """A model whose methods use weights in layers, directly, as `.data` and in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
        self.scale = nn.Parameter(torch.linspace(1, 2, 6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.encode(tokens).square().mean()

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.table(tokens)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.recurrent(h)[0]
        return self.inner(h) * self.scale

    def score(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.encode(tokens) @ self.inner.get_parameter("0.weight") @ self.table.weight.t()

    def reset(self, value: float) -> None:
        with torch.no_grad():
            self.scale.fill_(value)
            self.inner.get_parameter("0.weight").data.mul_(2)
        nn.init.ones_(self.table.weight)

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def fail(self) -> None:
        raise KeyError("on purpose")


SPLIT = {
    "table.weight": P("data"), "inner.0.weight": P(None, "data"), "scale": P("data"), "recurrent.*": P("data"),
    "attention.*": P("data"),
}  # fmt: skip


def tokens() -> torch.Tensor:
    return torch.arange(12).view(2, 6) % 10


def pair() -> tuple[Coder, Any]:
    sharded = autoshard.compile(Coder(), PAIR, constraints=SPLIT)
    sharded(tokens())
    return Coder(), sharded


def check_values_and_gradients() -> None:
    """Results and gradients of methods equal one device, and parameters stay DTensors on processes."""
    plain, sharded = pair()
    for name in ("encode", "score"):
        expected = getattr(plain, name)(tokens())
        found = getattr(sharded, name)(tokens())
        assert type(found) is torch.Tensor
        assert_close(found.detach(), expected.detach(), name)
        for result in (expected, found):
            result.square().mean().backward()
    for name, parameter in plain.named_parameters():
        mine = sharded.get_parameter(name)
        assert parameter.grad is not None
        assert_close(whole(mine.grad), parameter.grad, name)
        assert isinstance(mine, DTensor) == torch.distributed.is_initialized()
    with torch.inference_mode():
        assert_close(sharded.encode(tokens()).clone(), plain.encode(tokens()).clone(), "inference")
    assert sharded.count() == plain.count()


def check_changes_in_place() -> None:
    """After a method changes parameters in place, parameters and loss equal one device."""
    plain, sharded = pair()
    for network in (plain, sharded):
        network.reset(3.0)
    for name, parameter in plain.named_parameters():
        assert_close(whole(sharded.get_parameter(name)), parameter.detach(), name)
    assert_close(sharded(tokens()).detach(), plain(tokens()).detach(), "loss")


def check_submodules() -> None:
    """Within `whole_parameters`, submodules that are called directly give the results of one device."""
    plain, sharded = pair()
    with sharded.whole_parameters():
        found = sharded.inner(torch.ones(2, 8)), sharded.recurrent(torch.ones(2, 3, 8))[0]
    expected = plain.inner(torch.ones(2, 8)), plain.recurrent(torch.ones(2, 3, 8))[0]
    for one, other in zip(found, expected, strict=True):
        assert_close(one.detach(), other.detach(), "result")


def check_errors_leave_parameters_in_place() -> None:
    """After a method raises, the model has the same sharded parameters as before."""
    _, sharded = pair()
    before = dict(sharded.named_parameters())
    with pytest.raises(KeyError, match="on purpose"):
        sharded.fail()
    assert dict(sharded.named_parameters()) == before
    assert sharded.scale is before["scale"]


def check_generate() -> None:
    """`generate` of transformers returns the tokens of one device: greedy, sampled, by beams and without a cache."""
    sizes = {"words": 32, "width": 16, "inner": 24, "layers": 2, "heads": 2, "key_heads": 1, "length": 32}
    model: Any = build("llama", **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=True).eval()
    plain = copy.deepcopy(model)
    sharded: Any = autoshard.compile(model, PAIR, constraints={"*proj.weight": P("data")})
    prompt = torch.arange(3, 11).view(2, 4)
    sharded(input_ids=prompt, use_cache=False)
    ways = ({}, {"use_cache": False}, {"do_sample": True, "temperature": 3.0}, {"num_beams": 2})
    for way in ways:
        options = GenerationConfig(max_new_tokens=6, min_new_tokens=6, pad_token_id=0, **way)
        results = []
        for network in (plain, sharded):
            torch.manual_seed(1)
            results.append(network.generate(prompt, generation_config=options))
        assert torch.equal(*results), (way, results)
    with sharded.whole_parameters():
        hidden = sharded.model(input_ids=prompt).last_hidden_state
    assert_close(hidden.detach(), plain.model(input_ids=prompt).last_hidden_state.detach(), "hidden")


CHECKS = {name.removeprefix("check_"): item for name, item in globals().items() if name.startswith("check_")}


@pytest.mark.parametrize("name", CHECKS)
def test_on_the_simulator(name: str) -> None:
    """The check passes if all ranks are simulated in this process."""
    CHECKS[name]()


test_on_two_processes = on_processes(CHECKS, ranks=2, deadline_s=200, sample=2)
