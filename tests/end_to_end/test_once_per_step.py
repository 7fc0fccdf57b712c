"""Steps of several micro-batches gather weights once if memory allows, and add gradients up in place."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard import Mesh, P, Plan
from autoshard.graphs.owned_results import owned_results
from autoshard.ir.collectives import ALL_GATHER
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.program import InputKind
from autoshard.runtime.train_step import TrainStep
from passes.memory.lowered_memory import peak_bytes
from tests.benchmarks.live_memory import peak_bytes_of
from tests.end_to_end.training import assert_trains_alike, whole
from tests.models import build, words
from tests.runtime.processes import on_processes

LINE = Mesh({"data": 2})
SHARDED = {"*weight": P("data"), "*:*weight": P("data"), "input:*": P("data")}
ROOMY, SCARCE = 10**10, 1
"""Memory budgets in bytes: one fits all values that a step could keep, the other none of them."""
ROWS, LENGTH, WORDS, PARTS = 16, 32, 64, 4


def llama() -> nn.Module:
    """Return a Llama of one layer."""
    return build("llama", layers=1, width=16, inner=32, heads=2, words=WORDS)


def batch(seed: int) -> dict[str, Tensor]:
    return words(ROWS, LENGTH, WORDS, seed)


@cache
def plan() -> Plan:
    """Return the plan of a fully sharded step on one micro-batch."""
    model, part = llama(), {name: value[: ROWS // PARTS] for name, value in batch(0).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    return autoshard.plan(model, LINE, example_inputs=part, optimizer=optimizer, constraints=SHARDED, precision=None)


def compiled(memory_budget: int = ROOMY) -> TrainStep:
    """Return an AdamW step under `plan()` with another memory budget."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    held = replace(plan(), memory_budget=memory_budget)
    step = autoshard.compile(model, LINE, optimizer=optimizer, micro_batches=PARTS, plan=held)
    assert isinstance(step, TrainStep)
    return step


def check_trains_alike(memory_budget: int = ROOMY) -> None:
    """Check that two steps equal one device, and that weights are gathered once per step only in enough memory."""
    alone = llama()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-4)
    step = compiled(memory_budget)
    assert_trains_alike(step, alone, optimizer, map(batch, range(2)), parameters=(1e-3, 1e-4))
    assert (phased_of(step).hoisted is None) == (memory_budget == SCARCE)
    autoshard.verify(step)


def phased_of(step: TrainStep) -> PhasedProgram:
    """Return the program of a step that has run."""
    program = step.sharded.program
    assert program is not None
    return program.phased


def bits(step: TrainStep) -> list[Tensor]:
    """Run two steps; return their losses and then the parameters."""
    losses = [step(**batch(number)) for number in range(2)]
    return [*losses, *(whole(value.detach()) for value in step.sharded.parameters())]


def test_steps_train_like_one_device() -> None:
    """Two simulated steps that gather weights once per step equal one device."""
    check_trains_alike()


@pytest.mark.slow
def test_the_bits_do_not_depend_on_what_is_held() -> None:
    """Losses and parameters are equal bit by bit, whether gathered weights are kept or not."""
    roomy, scarce = map(bits, (compiled(), compiled(SCARCE)))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(roomy, scarce, strict=True))


class Calls(TorchDispatchMode):
    """A mode that counts the calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls_of(step: TrainStep) -> Counter[str]:
    """Return how often the second step calls each operator."""
    step(**batch(0))
    with Calls() as calls:
        step(**batch(1))
    return calls.counts


def gathers(phase: fx.GraphModule) -> list[fx.Node]:
    """Return the all-gathers of a phase; a bucket counts as one."""
    return phase.graph.find_nodes(op="call_function", target=ALL_GATHER)


def sources(node: fx.Node) -> set[fx.Node]:
    """Return the placeholders that a value depends on."""
    return {node} if node.op == "placeholder" else set().union(*map(sources, node.all_input_nodes))


def gathered_weights(phased: PhasedProgram) -> list[fx.Node]:
    """Return the all-gathers of the forward whose values do not depend on the batch."""
    placeholders = phased.forward.graph.find_nodes(op="placeholder")
    kinds = [phased.lowered.inputs[index].slot.kind for index in phased.forward_inputs]
    of_batch = {node for node, kind in zip(placeholders, kinds, strict=False) if kind is InputKind.INPUT}
    return [node for node in gathers(phased.forward) if not sources(node) & of_batch]


def check_gathers() -> None:
    """Each weight is gathered once per step in enough memory, and once per micro-batch in too little."""
    for budget in (ROOMY, SCARCE):
        step = compiled(budget)
        found = sum(count for name, count in calls_of(step).items() if "all_gather" in name)
        phased = phased_of(step)
        counts = {name: len(gathers(phase)) for name, phase in phased.phases.items()}
        once, often = counts.get("hoisted", 0) + counts["update"], counts["forward"] + counts["backward"]
        assert found == once + PARTS * often
        assert bool(gathered_weights(phased)) == ("hoisted" not in counts) == (budget == SCARCE)


def check_adds_in_place() -> None:
    """The backward adds each gradient in place to its sum over micro-batches."""
    step = compiled()
    calls, phased = calls_of(step), phased_of(step)
    owned = owned_results(phased.backward.graph)[len(phased.backward_outputs) :]
    assert all(owned)
    assert calls["aten.add_.Tensor"] >= (PARTS - 1) * len(owned)
    assert not calls["aten._foreach_add_.List"]


def check_memory() -> None:
    """The measured peak of a step is within 1 % of its program's peak, with and without gathered weights kept."""
    for step in (compiled(), compiled(SCARCE)):
        step(**batch(0))
        state = [item for kept in step.optimizer.state.values() for name, item in kept.items() if name != "step"]
        inputs = batch(1)
        found = peak_bytes_of(partial(step, **inputs), [*step.sharded.parameters(), *state, *inputs.values()])
        given = sum(value.nbytes for value in inputs.values())  # the caller's batch, beside a rank's part of a part
        expected = peak_bytes(phased_of(step), micro_batches=PARTS) + given
        assert abs(found / expected - 1) < 0.01, (found, expected)


CHECKS = {
    "trains alike": check_trains_alike,
    "trains alike in little memory": partial(check_trains_alike, SCARCE),
    "gathers": check_gathers,
    "in place": check_adds_in_place,
    "memory": check_memory,
}

test_on_two_processes = on_processes(CHECKS, ranks=2, slow=["trains alike in little memory", "memory"], sample=2)
