"""The simulated step holds what the lowered program runs: the same collectives in the same order, and all costs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import nn

from autoshard.ir.lowered import LoweredProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.ir.spec import P
from autoshard.tracing import trace
from cost_models.hardware import Cluster, node_type
from cost_models.streams import Op, Overlap, simulate_streams
from cost_models.timeline import COMPUTE
from passes.driver.plan_and_lower import planning_problem
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.planning.build_assignment import PlanningProblem
from passes.prediction.segment_step import COPIES, repeated_step, segment_step
from passes.prediction.walk_program import adding_up
from tests.passes.blocks import blocks_program, h100s, perceptron_program, problem_of
from tests.passes.deep import adamw, alike, short_step

MESH = Mesh({"data": 2, "model": 2})


class Classifier(nn.Module):
    """A linear layer and cross-entropy, which reduces over split classes inside the call."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x), labels)


@cache
def program_of(name: str) -> Program:
    """One of the traced programs of these tests."""
    if name == "perceptron":
        return perceptron_program()
    if name == "classifier":
        return trace(Classifier(), (torch.randn(8, 16), torch.zeros(8, dtype=torch.int64)))
    return blocks_program(count=4)


def drawn_choice(planning: PlanningProblem, seed: int) -> list[int]:
    """One strategy for every class, at random."""
    draw = Random(seed)
    return [draw.randrange(len(planning.space.sites[group[0]].strategies)) for group in planning.members]


def sent_by(lowered: LoweredProgram) -> list[tuple[str, str]]:
    """(kind, axis) of the collectives of a lowered program in order, each of which must be waited for at once."""
    nodes = list(lowered.graph_module.graph.nodes)
    found = []
    for node, following in pairwise(nodes):
        name = str(node.target)
        if name.startswith("_c10d_functional.") and "wait" not in name:
            assert "wait_tensor" in str(following.target)
            assert following.args == (node,)
            kind = name.split(".")[1].removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")
            found.append((kind, str(node.args[-1])))
    return found


def ops_of(planning: PlanningProblem, choice: list[int]) -> list[Op]:
    """All operations of a choice's step."""
    return [op for segment in segment_step(planning, choice) for op in segment.ops]


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@pytest.mark.parametrize("name", ["perceptron", "classifier", "blocks"])
def test_the_step_sends_what_the_program_sends(name: str, seed: int) -> None:
    """The step of any plan sends every collective, in order; and the program waits for each where it stands."""
    program = program_of(name)
    planning = problem_of(program, MESH)
    choice = drawn_choice(planning, seed)
    cluster = h100s(MESH)
    plan = lowered_plan(planning, choice, 0.0, None, cluster, PlanOptions()).plan
    phased = lower_program(program, plan, cluster)
    ours = [(op.name.split()[0], op.label) for op in ops_of(planning, choice) if op.stream != COMPUTE]
    assert ours == sent_by(phased.lowered)
    assert ours or seed > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["perceptron", "classifier", "blocks"])
def test_the_step_without_overlap_is_the_objective(name: str, seed: int) -> None:
    """The sum of the step's operations is the search's objective."""
    planning = problem_of(program_of(name), MESH)
    choice = drawn_choice(planning, seed)
    times = simulate_streams(segment_step(planning, choice))
    assert times.total_s == pytest.approx(planning.assignment.cost_of(choice), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_alike_blocks_share_their_segments(seed: int) -> None:
    """Shared or each on its own, the step takes as long, overlapped or not; inner blocks are shared."""
    planning = problem_of(program_of("blocks"), MESH)
    choice = drawn_choice(planning, seed)
    shared, apart = segment_step(planning, choice), segment_step(planning, choice, shares=False)
    assert len(shared) == len(apart) == len({id(segment) for segment in apart})
    assert len({id(segment) for segment in shared}) < len(shared)
    for overlap in (None, Overlap(1, 0.0), Overlap(2, 0.2)):
        one, other = simulate_streams(shared, overlap), simulate_streams(apart, overlap)
        assert one.total_s == pytest.approx(other.total_s, rel=1e-9)


def test_segments_are_blocks_and_phases() -> None:
    """Each block has one of its own in the forward and one in the backward, in the order of the program."""
    planning = problem_of(program_of("blocks"), MESH)
    names = [segment.name for segment in segment_step(planning, drawn_choice(planning, 0), shares=False)]
    forward = [f"forward of blocks.{index}" for index in range(4)]
    backward = [f"backward of blocks.{index}" for index in reversed(range(4))]
    assert [name for name in names if "blocks" in name] == forward + backward


def test_parameters_are_gathered_early_and_gradients_reduced_late() -> None:
    """Fully sharded data parallel: gathers need nothing of the step, nothing waits for reductions."""
    mesh = Mesh({"x": 4})
    constraints = {"*.up.weight": P("x"), "*.down.weight": P("x"), "input:0": P("x")}
    planning = _constrained(mesh, constraints)
    segments = segment_step(*planning)
    ops = [op for segment in segments for op in segment.ops]
    gathers = [op for op in ops if op.name.startswith("all_gather p_")]
    reductions = [op for op in ops if op.name.startswith("reduce_scatter")]
    assert gathers
    assert all(op.early for op in gathers)
    assert reductions
    assert all(not op.early and op.needs for op in reductions)
    for segment in segments:
        waited = {need for op in segment.ops for need in op.needs}
        late = [index for index, op in enumerate(segment.ops) if op.name.startswith("reduce_scatter")]
        assert not waited & set(late)


def _constrained(mesh: Mesh, constraints: dict) -> tuple[PlanningProblem, list[int]]:
    """The best choice under constraints, for blocks wide enough to be worth gathering."""
    from passes.planning.constraints import allowed_options
    from passes.planning.search import Search

    program = blocks_program(batch=256, length=512, hidden=1024, count=3)
    planning = planning_problem(program, mesh, h100s(mesh), PlanOptions())
    return planning, list(Search(None, 30.0)(planning, allowed_options(planning, constraints)).choice)


def test_axes_between_nodes_have_a_stream_of_their_own() -> None:
    """A group that spans nodes uses the network; one within a node its fabric."""
    cluster = Cluster("h100_sxm", nodes=2, devices_per_node=2)
    planning = planning_problem(program_of("blocks"), MESH, cluster, PlanOptions())
    ops = [op for seed in range(6) for op in ops_of(planning, drawn_choice(planning, seed))]
    assert {(op.label, op.stream) for op in ops if op.stream != COMPUTE} == {("data", "network"), ("model", "node")}


def test_copies_of_reshards_are_counted_apart() -> None:
    """Copies around a collective are computation of their own label."""
    planning = problem_of(program_of("blocks"), MESH)
    times = simulate_streams(segment_step(planning, drawn_choice(planning, 0)))
    assert set(times.compute_s) == {"forward", "backward", COPIES}
    assert times.compute_s[COPIES] > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_faster_link_never_slows_a_plan(seed: int) -> None:
    """Twice the bandwidth inside the node, or between nodes: no plan takes longer."""
    node = node_type("h100_sxm")
    assert node.inter is not None
    slow = Cluster(node, nodes=2, devices_per_node=2)
    program = program_of("blocks")
    planning = planning_problem(program, MESH, slow, PlanOptions())
    choice = drawn_choice(planning, seed)
    before = simulate_streams(segment_step(planning, choice)).total_s
    for faster in (replace(node, intra=node.intra.scaled(2)), replace(node, inter=node.inter.scaled(2))):
        quick = planning_problem(program, MESH, Cluster(faster, nodes=2, devices_per_node=2), PlanOptions())
        assert simulate_streams(segment_step(quick, choice)).total_s <= before * (1 + 1e-12)


def test_a_step_repeats_all_but_its_update() -> None:
    """Micro-batches run forward and backward each; gradients' reductions end before the update."""
    model = alike(6)
    planning = problem_of(short_step(model, adamw(model), 1), Mesh({"x": 2}))
    choice = drawn_choice(planning, 0)
    one, two = (repeated_step(planning, choice, count) for count in (1, 2))
    update = [item for item in one if item.is_barrier]
    assert update
    assert one[-len(update) :] == two[-len(update) :] == tuple(update)
    assert two[: -len(update)] == (*one[: -len(update)] * 2, *adding_up(planning.adding_s(choice), 2))
    assert [op.seconds for item in adding_up(0.5, 3) for op in item.ops] == [1.0]
    times = simulate_streams(one)
    assert times.total_s == pytest.approx(simulate_streams(segment_step(planning, choice)).total_s)
