"""The counted memory of lowered programs equals the memory that a tracker measures."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, P
from autoshard.runtime.process_groups import taking_from_a_list
from passes.memory.lowered_memory import peak_bytes
from tests.benchmarks.live_memory import peak_bytes_of


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32))


def test_one_rank_uses_what_a_tracker_sees():
    """The counted peak of forward and backward on one rank is within 5 % of the peak that a memory tracker measures."""
    x = torch.randn(512, 64)
    sharded = autoshard.compile(model(), Mesh({"x": 1}), example_inputs=(x,))
    phased = sharded.program.phased
    forward, backward = taking_from_a_list(phased.forward), taking_from_a_list(phased.backward)
    named = dict(sharded.named_parameters())
    inputs = [named.get(slot.slot.name, x).detach() for slot in phased.lowered.inputs]
    tangent = torch.ones(512, 32)

    def step() -> list[torch.Tensor]:
        outputs, *saved = forward([inputs[index] for index in reversed(phased.forward_inputs)])
        values = [tangent, *reversed(saved)]
        saved.clear()
        return [outputs, *backward(values)]

    held = [*named.values(), x, tangent]
    assert peak_bytes(sharded.program.phased) == pytest.approx(peak_bytes_of(step, held), rel=0.05)


def test_splitting_the_batch_halves_activations():
    """Two ranks with half the batch each have about half the peak, apart from parameters and the output."""
    x = torch.randn(2**14, 64)
    peaks = {}
    for size, spec in ((1, P()), (2, P("x"))):
        sharded = autoshard.compile(
            model(),
            Mesh({"x": size}),
            example_inputs=(x,),
            constraints={"input:*": spec, "output:*": spec, "*.weight": P(), "*.bias": P()},
        )
        peaks[size] = peak_bytes(sharded.program.phased)
    weights = sum(parameter.numel() * 4 for parameter in model().parameters())
    whole = x.shape[0] * 32 * 4  # the output, handed out whole
    assert peaks[2] - weights - whole < 0.6 * (peaks[1] - weights - whole)
