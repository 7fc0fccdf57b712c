"""The verifier accepts the lowered program of any legal plan, and refuses every harmful mutation."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.errors import VerificationError
from autoshard.ir.boundary import shard_all
from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import OutputKind, Program
from autoshard.ir.spec import P, PartitionSpec
from autoshard.rules import infer, registry
from autoshard.testing.plans import plans
from autoshard.testing.programs import programs
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program, prepare
from passes.memory.liveness import find_lifetimes
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.strategies.enumerate_strategies import EnumerateStrategies
from passes.strategies.price import Prices
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_program import verify_program
from tests.passes.blocks import h100s
from tests.passes.mutations import (
    MUTATIONS,
    Mutation,
    changes_numbers,
    copy_of,
    move_collective_to_other_axis,
    swap_results,
    tried,
)

MESH = Mesh({"data": 2, "model": 2})
SEEDS = 60 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 3
"""Number of mutations of each kind on each layout."""
VOCABULARY, WIDTH, BATCH, LENGTH = 16, 8, 4, 4


class Layer(nn.Module):
    """Attention with dropout and a perceptron, each behind a norm, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.view(BATCH, LENGTH, 2, WIDTH // 2).transpose(1, 2) for part in self.qkv(self.first(h)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        h = h + self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return h + F.dropout(self.down(F.gelu(self.up(self.second(h)))), 0.1)


class SmallGPT(nn.Module):
    """A language model of one layer with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layer, self.norm = Layer(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens) + self.position(torch.arange(LENGTH))
        logits = self.head(self.norm(self.layer(h)))
        return F.cross_entropy(logits.view(-1, VOCABULARY), target.view(-1))


LAYOUTS: dict[str, dict[str, PartitionSpec] | int] = {
    "fully sharded": {"*.weight": P(("data", "model")), "*bias": P("data"), "input:*": P(("data", "model"))},
    "tensor parallel": {
        "*.up.weight": P("model"), "*.down.weight": P(None, "model"), "embed.weight": P("model"), "input:*": P(),
        "*.qkv.weight": P("model"), "*.out.weight": P(None, "model"),
    },
    "mixed": {
        "embed.weight": P("model", "data"), "*.up.weight": P("model", "data"), "*.down.weight": P("data", "model"),
        "input:*": P("data"),
    },
    "drawn 2": 2, "drawn 3": 3,
}  # fmt: skip
"""Constraints on a plan, or the seed of a legal random plan."""


@cache
def traced() -> Program:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    return trace(SmallGPT(), (tokens, tokens.flip(0)), {})


@cache
def prepared() -> Program:
    return prepare(traced())


@cache
def phased(layout: str) -> PhasedProgram:
    """The phases of the small GPT under a layout."""
    wanted = LAYOUTS[layout]
    if isinstance(wanted, int):
        plan = drawn_plan(Random(wanted))
    else:
        options = PlanOptions(constraints=wanted, with_baselines=False, time_budget_s=5)
        plan = plan_program(traced(), MESH, h100s(MESH), options)
    return lower_program(traced(), plan, h100s(MESH))


@cache
def unfolded_problem() -> PlanningProblem:
    """The planning problem with a variable of its own for every site."""
    space = EnumerateStrategies(MESH)(prepared())
    alone = {name: name for name in space.sites}
    return build_problem(space, Prices(h100s(MESH), MESH), find_lifetimes(space, 0.0), alone)


def drawn_plan(random: Random) -> Plan:
    """Return a plan with a random strategy for one node in three, and matching strategies elsewhere."""
    planning = unfolded_problem()
    costs = [cost.copy() for cost in planning.assignment.costs]
    edges, edges_before = defaultdict(list), Counter()
    for edge in planning.assignment.edges:
        edges[min(edge.tail, edge.head)].append(edge)
        edges_before[max(edge.tail, edge.head)] += 1
    choice = []
    for variable, cost in enumerate(costs):
        is_free = not edges_before[variable] or random.random() < 1 / 3
        options = np.flatnonzero(np.isfinite(cost) if is_free else cost == cost.min())
        choice.append(random.choice(options.tolist()))
        for edge in edges[variable]:
            if edge.tail == variable:
                costs[edge.head] = costs[edge.head] + edge.cost[choice[-1], :]
            else:
                costs[edge.tail] = costs[edge.tail] + edge.cost[:, choice[-1]]
    return lowered_plan(planning, choice, 0.0, None, h100s(MESH), PlanOptions()).plan


def inputs_of(program: LoweredProgram) -> list[Sequence[torch.Tensor]]:
    """Random values for all placeholders, each as a list of pieces by rank."""
    numbers = torch.Generator().manual_seed(5)

    def draw(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=numbers, dtype=dtype)
        return torch.randint(0, VOCABULARY, shape, generator=numbers).to(dtype)

    return [shard_all(draw(slot.shape, slot.dtype), slot.spec, program.mesh) for slot in program.inputs]


def differs(program: LoweredProgram, mutated: fx.GraphModule) -> bool:
    """Whether a mutation changes the program's results on drawn inputs."""
    return changes_numbers(program, mutated, inputs_of(program), rtol=1e-4, atol=1e-6, equal_nan=True)


def is_refused(program: Program, mutated: LoweredProgram) -> bool:
    try:
        verify_program(program, mutated)
    except VerificationError:
        return True
    return False


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lowered_programs_are_proven(layout: str) -> None:
    """Every node of a lowered program is proven without assumptions, and its phases are accepted."""
    lowered = phased(layout).lowered
    report = verify_program(prepared(), lowered)
    verify_phases(phased(layout))
    assert report.nodes == len(lowered.graph_module.graph.nodes) - 1
    assert report.assumptions == ()
    assert "aten.mm.default" in report.rules


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutations_that_change_numbers_are_refused(mutation: Mutation) -> None:
    """On every layout, a mutation of any kind is refused if it changes a number."""
    seen: Counter[str] = Counter()
    for layout in LAYOUTS:
        lowered = phased(layout).lowered
        for seed in range(SEEDS):
            module = copy_of(lowered.graph_module)
            what = tried(mutation, module.graph, Random(f"{layout} {seed}"), MESH)
            if what is None:
                continue
            refused = is_refused(prepared(), dataclasses.replace(lowered, graph_module=module))
            if refused and (seed > 0 or not layout.startswith("drawn")):
                seen["refused"] += 1
                continue
            changes = differs(lowered, module)
            assert refused or not changes, f"{layout}, seed {seed}: {what}"
            seen["refused and changing" if changes else "refused, harmless" if refused else "accepted, harmless"] += 1
    assert sum(seen.values()) >= 6, seen
    if mutation.__name__ != "remove_wait":
        assert seen["refused and changing"], seen


@settings(max_examples=6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_any_plan_of_any_program_is_proven_and_its_mutations_are_not(data: st.DataObject) -> None:
    """Drawn programs under drawn plans are accepted, and mutations that change their numbers are refused."""
    drawn = data.draw(programs(max_blocks=2))
    mesh = data.draw(st.sampled_from([MESH, Mesh({"data": 2}), Mesh({"data": 1, "model": 2})]))
    program = trace(drawn.model, drawn.inputs)
    plan = data.draw(plans(program, mesh))
    both = lower_program(program, plan)
    known = prepare(program)
    verify_program(known, both.lowered)
    verify_phases(both)
    for _ in range(12):
        module = copy_of(both.lowered.graph_module)
        mutation = data.draw(st.sampled_from(MUTATIONS))
        what = tried(mutation, module.graph, Random(data.draw(st.integers(0, 10**6))), mesh)
        if what is None or is_refused(known, dataclasses.replace(both.lowered, graph_module=module)):
            continue
        assert not differs(both.lowered, module), what


# Messages.


def mutated(layout: str, mutation: Mutation, seed: int = 0) -> LoweredProgram:
    """A layout's lowered program after one mutation."""
    lowered = phased(layout).lowered
    module = copy_of(lowered.graph_module)
    assert mutation(module.graph, Random(seed), MESH)
    return dataclasses.replace(lowered, graph_module=module)


def test_a_message_names_the_node_what_it_reads_and_the_users_line() -> None:
    """A collective over a wrong axis is refused, and the error has an operand's spec and the line in the model."""
    with pytest.raises(VerificationError) as caught:
        verify_program(prepared(), mutated("drawn 3", move_collective_to_other_axis, seed=3))
    message = str(caught.value)
    assert "is part of no proof" in message
    assert "under P(" in message
    assert "test_verify_program.py:" in message


def test_a_wrong_result_is_named_with_what_is_promised_and_derived() -> None:
    """Two exchanged gradients are refused, and the error has the promised value and spec and the derived value."""
    with pytest.raises(VerificationError, match=r"is promised as .* under P.*was derived to hold"):
        verify_program(prepared(), mutated("fully sharded", swap_results))


def test_a_gradient_must_lie_like_its_parameter() -> None:
    """A gradient's slot with another spec than its parameter's is refused."""
    lowered = phased("fully sharded").lowered
    first = next(slot for slot in lowered.outputs if slot.slot.kind == OutputKind.GRADIENT and len(slot.shape) == 2)
    changed = dataclasses.replace(first, spec=P(None, "data"))
    outputs = tuple(changed if slot is first else slot for slot in lowered.outputs)
    with pytest.raises(VerificationError, match="but its owner lies as"):
        verify_program(prepared(), dataclasses.replace(lowered, outputs=outputs))


def test_slots_are_those_of_the_traced_program() -> None:
    """Inputs in another order than the trace's slots are refused."""
    lowered = phased("mixed").lowered
    with pytest.raises(VerificationError, match="inputs for the slots"):
        verify_program(prepared(), dataclasses.replace(lowered, inputs=lowered.inputs[::-1]))


def test_another_constant_is_refused() -> None:
    """A lowered program in which a constant of the trace has another value is refused."""
    program = trace(AddsConstant(), (torch.ones(4, 4),), {})
    lowered = lower_program(program, plan_program(program, MESH, h100s(MESH), PlanOptions())).lowered
    verify_program(prepare(program), lowered)
    module = copy_of(lowered.graph_module)
    name = next(str(node.target) for node in module.graph.nodes if node.op == "get_attr")
    setattr(module, name, getattr(module, name) + 1)
    with pytest.raises(VerificationError, match="is part of no proof"):
        verify_program(prepare(program), dataclasses.replace(lowered, graph_module=module))


class AddsConstant(nn.Module):
    """A model that adds a tensor written in the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0])


@torch.library.custom_op("autoshard_test_verify::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Twice the operand."""
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_inferred_rules_are_named_as_assumptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof that rests on a rule inferred from samples names the rule as an assumption."""
    for table, name in ((registry, "_rules"), (registry, "_inferred"), (infer, "_cases")):
        monkeypatch.setattr(table, name, dict(getattr(table, name)))
    infer.infer_rule(doubled, (torch.randn(4, 6),))
    model = nn.Module()
    model.forward = doubled  # type: ignore[method-assign]
    program = trace(model, (torch.randn(8, 6),))
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(constraints={"input:0": P("data")}))
    report = verify_program(prepare(program), lower_program(program, plan).lowered)
    assumption, users = report.assumptions
    assert (
        "doubled.default is a user's operator. It is assumed to compute its stated result from its arguments alone ("
        in users
    )
    assert "doubled.default has a sharding rule that was found by running it" in assumption
    assert "a b -> a b" in assumption


def test_users_operators_and_rules_are_named_as_assumptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's rule is assumed to be sound, and is named with its module."""
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))

    @registry.sharding_rule(doubled)
    def rule(x: torch.Tensor) -> str:
        return "a b -> a b"

    model = nn.Module()
    model.forward = doubled  # type: ignore[method-assign]
    program = trace(model, (torch.randn(8, 6),))
    lowered = lower_program(program, plan_program(program, MESH, h100s(MESH), PlanOptions())).lowered
    report = verify_program(prepare(program), lowered)
    (assumption,) = report.assumptions
    assert f"and the sharding rule that {__name__} wrote for it to be sound" in assumption
    assert f"assumed: {assumption}" in str(report)


def test_a_report_says_what_was_proven_and_what_it_rests_on() -> None:
    """A report lists results by kind, collectives by axis and rules by operator, and says that no more is assumed."""
    text = str(verify_program(prepared(), phased("mixed").lowered))
    assert "Mesh(data=2, model=2) hold" in text
    assert "proven: 1 output, 16 gradient, as they are promised" in text
    assert "all_gather_into_tensor over data" in text
    assert "aten.mm.default" in text
    assert text.endswith("assumed: nothing besides")


def test_operators_without_a_rule_are_named_as_assumptions() -> None:
    """A report lists an operator without a rule, which runs whole on every rank, as an assumption."""
    program = trace(Unruled(), (torch.rand(4, 4),), {})
    lowered = lower_program(program, plan_program(program, MESH, h100s(MESH), PlanOptions())).lowered
    report = verify_program(prepare(program), lowered)
    assert any("has no sharding rule" in item for item in report.assumptions)
    assert "assumed" in str(report)


class Unruled(nn.Module):
    """A model with an operator without a rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(0, 1, 4).mul(x).sum()
