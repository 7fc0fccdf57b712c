"""Steps of several micro-batches add gradients up where they lie, and train like one device."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard import Mesh, P, Plan
from autoshard.runtime.train_step import TrainStep
from passes.memory.lowered_memory import peak_bytes
from tests.benchmarks.live_memory import peak_bytes_of
from tests.end_to_end.training import whole
from tests.runtime.processes import report, run_checks

LINE = Mesh({"data": 2})
SHARDED = {"*weight": P("data"), "*:*weight": P("data"), "input:*": P("data")}
ROWS, LENGTH, WORDS, PARTS = 16, 32, 64, 4


def llama() -> nn.Module:
    """One layer, a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=WORDS, use_cache=False))


def batch(seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}


@cache
def plan() -> Plan:
    """Of a fully sharded step on a part of the batch."""
    model, part = llama(), {name: value[: ROWS // PARTS] for name, value in batch(0).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    return autoshard.plan(model, LINE, example_inputs=part, optimizer=optimizer, constraints=SHARDED, precision=None)


def compiled(micro_batches: int = PARTS) -> TrainStep:
    """A step of AdamW under that plan, or one like it where parts have another size."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    options: dict[str, Any] = {"plan": plan()} if micro_batches == PARTS else {"constraints": SHARDED}
    step = autoshard.compile(model, LINE, optimizer=optimizer, micro_batches=micro_batches, **options)
    assert isinstance(step, TrainStep)
    return step


def check_trains_alike(micro_batches: int) -> None:
    """Two steps beside one device: losses, then parameters."""
    alone = llama()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-4)
    step = compiled(micro_batches)
    for number in range(2):
        optimizer.zero_grad()
        expected = alone(**batch(number)).loss
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(**batch(number)), expected.detach(), rtol=1e-5, atol=1e-6)
    held = dict(step.sharded.named_parameters())
    for name, value in alone.named_parameters():
        torch.testing.assert_close(whole(held[name].detach()), value.detach(), rtol=1e-3, atol=1e-4)
    autoshard.verify(step)


@pytest.mark.parametrize("micro_batches", [2, PARTS])
def test_steps_train_like_one_device(micro_batches: int) -> None:
    """Simulated ranks."""
    check_trains_alike(micro_batches)


class Calls(TorchDispatchMode):
    """Counts the calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls_of(step: TrainStep) -> Counter[str]:
    """What a step calls, once it has begun."""
    step(**batch(0))
    with Calls() as calls:
        step(**batch(1))
    return calls.counts


def check_adds_in_place() -> None:
    """All gradients of a micro-batch in one call; no sum is a new tensor."""
    step = compiled()
    found = calls_of(step)
    program = step.sharded.program
    assert program is not None
    phases = (program.phased.forward, program.phased.backward)
    once = sum(node.target is torch.ops.aten.add.Tensor for phase in phases for node in phase.graph.nodes)
    assert found["aten._foreach_add_.List"] == PARTS - 1
    assert found["aten.add.Tensor"] == PARTS * once


def check_memory() -> None:
    """The peak of a step is that of its program, with one set of sums beside gradients."""
    step = compiled()
    step(**batch(0))
    program = step.sharded.program
    assert program is not None
    state = [item for kept in step.optimizer.state.values() for name, item in kept.items() if name != "step"]
    inputs = batch(1)
    found = peak_bytes_of(partial(step, **inputs), [*step.sharded.parameters(), *state, *inputs.values()])
    expected = peak_bytes(program.phased, micro_batches=PARTS)
    assert abs(found / expected - 1) < 0.03, (found, expected)


CHECKS = {
    "trains alike": partial(check_trains_alike, PARTS),
    "in place": check_adds_in_place,
    "memory": check_memory,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_checks(CHECKS, ranks=2)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_processes(outcomes: dict[str, str], name: str) -> None:
    """The check passes on both ranks."""
    report(outcomes, name)
