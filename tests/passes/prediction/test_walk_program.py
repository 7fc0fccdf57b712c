"""Walking a lowered program gives the cost that the search gave to its strategies."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx

from autoshard import tracing
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.ir.spec import P
from autoshard.testing.programs import programs
from cost_models.compute import memory_time
from cost_models.streams import overlap_of, simulate_streams
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.lowering.bucket_collectives import MIB, BucketCollectives
from passes.lowering.lower_program import lower_prepared
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.rewrite_phases import rewrite_phases
from passes.lowering.start_ahead import StartAhead
from passes.lowering.wait_late import WaitLate
from passes.memory.lowered_memory import peak_bytes
from passes.planning.build_assignment import PlanningProblem
from passes.planning.constraints import allowed_options
from passes.planning.search import Search
from passes.prediction.walk_program import ACCUMULATION, COPIES, WalkedStep, adding_up, walk_program
from passes.strategies.price_nodes import NodePrices
from passes.verification.expand_biases import expand_biases
from tests.passes.blocks import blocks_program, h100s, problem_of, two_nodes
from tests.passes.deep import adamw, alike, short_step, step
from tests.passes.drawn_choices import drawn_choice, program_of

PAIR, LINE, SQUARE = Mesh({"x": 2}), Mesh({"x": 4}), Mesh({"x": 2, "y": 2})
FREE = 0.0
"""No slowdown of computation beside communication."""


def phased_of(planning: PlanningProblem, choice: list[int]) -> PhasedProgram:
    """The lowered program of a choice, without overlap."""
    cluster = planning.prices.cluster
    plan = lowered_plan(planning, choice, 0.0, None, cluster, PlanOptions()).plan
    return lower_prepared(planning.space.program, plan, cluster, LoweringOptions(with_overlap=False))


def walk(planning: PlanningProblem, phased: PhasedProgram, micro_batches: int = 1) -> WalkedStep:
    """Walk a lowered program with the prices of a planning problem."""
    return walk_program(phased, NodePrices(planning.prices.cluster, phased.lowered.mesh), micro_batches)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["perceptron", "classifier", "blocks"])
def test_the_walk_takes_what_the_objective_says(name: str, seed: int) -> None:
    """The time of the walked program equals the search's cost of its choice, also with an axis between nodes."""
    for cluster in (h100s(SQUARE), two_nodes(SQUARE)):
        planning = problem_of(program_of(name), SQUARE, cluster)
        choice = drawn_choice(planning, seed)
        times = simulate_streams(walk(planning, phased_of(planning, choice)).segments)
        assert times.total_s == pytest.approx(planning.assignment.cost_of(choice), rel=1e-6)


def may_be_padded(program: Program, mesh: Mesh) -> bool:
    """Whether the number of devices does not divide some dim, so that a split of it may be padded."""
    values = [node.meta.get("val") for node in program.graph_module.graph.nodes]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    return any(size > 1 and size % mesh.size for shape in shapes for size in shape)


@settings(max_examples=6)
@given(st.data())
def test_drawn_programs_have_one_price(data: st.DataObject) -> None:
    """The walk of a drawn program takes the cost of the search, within 2 % if splits may be padded.

    The search prices a bias apart from its product. Programs with unread calls are not drawn, because unread calls do
    not run. A split norm's statistics without a backward are an example.
    """
    drawn = data.draw(programs(max_blocks=2, uneven=False))
    program = tracing.trace(drawn.model, drawn.inputs)
    mesh = data.draw(st.sampled_from([PAIR, SQUARE]))
    planning = problem_of(program, mesh)
    choice = drawn_choice(planning, data.draw(st.integers(0, 99)))
    error = 0.02 if may_be_padded(program, mesh) else 1e-6
    phased = rewrite_phases(phased_of(planning, choice), expand_biases)
    assume(all(node.users for node in phased.lowered.graph_module.graph.nodes if node.op == "call_function"))
    times = simulate_streams(walk(planning, phased).segments)
    assert times.total_s == pytest.approx(planning.assignment.cost_of(choice), rel=error)


def test_repeated_blocks_are_walked_as_often_as_they_run() -> None:
    """For a program without inner blocks, the time of the walk equals the search's cost of all blocks."""
    model = alike(6)
    planning = problem_of(short_step(model, adamw(model, 1.0), 1), SQUARE)
    choice = drawn_choice(planning, 1)
    times = simulate_streams(walk(planning, phased_of(planning, choice)).segments)
    assert times.total_s == pytest.approx(planning.assignment.cost_of(choice), rel=1e-6)


def data_parallel_choice(planning: PlanningProblem) -> list[int]:
    """The best choice with copied weights and a split batch."""
    constraints = {"*.up.weight": P(), "*.down.weight": P(), "input:0": P("x")}
    return list(Search(None, 30.0)(planning, allowed_options(planning, constraints)).choice)


@cache
def data_parallel() -> tuple[PlanningProblem, PhasedProgram]:
    """Return the planning problem and the lowered program of data-parallel blocks, without overlap."""
    planning = problem_of(blocks_program(batch=256, length=512, hidden=1024, count=3), LINE)
    return planning, phased_of(planning, data_parallel_choice(planning))


def with_late_waits(phased: PhasedProgram) -> PhasedProgram:
    """Move each wait of the backward directly before its reader."""
    graph = fx.Graph()
    results = graph.graph_copy(phased.backward.graph, {})
    graph.output(results)
    for new, old in zip(graph.nodes, phased.backward.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    for node in reversed(list(graph.nodes)):
        if node.target is torch.ops._c10d_functional.wait_tensor.default:
            min(node.users, key=list(graph.nodes).index).prepend(node)
    return replace(phased, backward=fx.GraphModule(phased.backward, graph))


def test_what_a_pass_moves_is_priced_where_it_stands() -> None:
    """If waits for reductions move behind computation, the exposed time more than halves, and no other time changes."""
    planning, phased = data_parallel()
    early, late = (simulate_streams(walk(planning, item).segments, FREE) for item in (phased, with_late_waits(phased)))
    assert early.total_s == pytest.approx(simulate_streams(walk(planning, phased).segments).total_s)
    assert late.communication_s == pytest.approx(early.communication_s)
    assert late.compute_s == pytest.approx(early.compute_s)
    assert late.exposed_s["x"] < 0.5 * early.exposed_s["x"]
    assert late.total_s == pytest.approx(sum(late.compute_s.values()) + late.exposed_s["x"])


def test_members_of_buckets_are_copied_into_order() -> None:
    """In buckets, weights that are split along columns are copied twice.

    Weights that are split along rows are not copied.
    """
    copied_s, moved_s = {}, {}
    for name, spec in {"rows": P("x"), "columns": P(None, "x")}.items():
        planning = problem_of(blocks_program(batch=2**18, length=1, hidden=1024, count=3), LINE)
        allowed = allowed_options(planning, {"*.up.weight": spec, "*.down.weight": spec, "input:0": P("x")})
        phased = phased_of(planning, list(Search(None, 30.0)(planning, allowed).choice))
        for rewrite in (WaitLate(), StartAhead(by=None), BucketCollectives(None, 64 * MIB, 64 * MIB)):
            phased = rewrite(phased)
        walked = walk(planning, phased)
        copied_s[name] = simulate_streams(walked.segments).compute_s[COPIES]
        whole_bytes = walked.sent_bytes["x"] * 4 / 3  # of four ranks each sends three quarters
        moved_s[name] = memory_time(2 * whole_bytes, planning.prices.cluster.device)
    assert copied_s["rows"] < 1e-6 * moved_s["rows"]
    assert copied_s["columns"] == pytest.approx(moved_s["columns"], rel=0.01)


def test_micro_batches_repeat_forward_and_backward() -> None:
    """Three micro-batches walk forward and backward three times, and the update once."""
    model = alike(2)
    planning = problem_of(step(model, adamw(model, 1.0)), SQUARE)
    phased = phased_of(planning, drawn_choice(planning, 1))
    one, three = walk(planning, phased), walk(planning, phased, micro_batches=3)
    times, thrice = (simulate_streams(item.segments).compute_s for item in (one, three))
    names = [segment.name for segment in three.segments]
    assert names == [*["forward", "backward"] * 3, ACCUMULATION, "update"]
    assert thrice["forward"] == pytest.approx(3 * times["forward"])
    assert thrice["update"] == pytest.approx(times["update"])


def test_gradients_of_micro_batches_are_added_up() -> None:
    """Each micro-batch but the first adds its gradients, which reads two values and writes one for each gradient.

    A program without inner blocks counts the gradients of all blocks.
    """
    model = alike(6)
    optimizer = adamw(model, 1.0)
    found, sent = [], []
    for program in (step(model, optimizer), short_step(model, optimizer, 1)):
        planning = problem_of(program, PAIR)
        choice = data_parallel_choice(planning)
        walked = walk(planning, phased_of(planning, choice), micro_batches=3)
        found.append(simulate_streams(walked.segments).compute_s[ACCUMULATION])
        sent.append(walked.sent_bytes)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert found[0] == pytest.approx(2 * memory_time(3 * size, planning.prices.cluster.device))
    assert found[1] == pytest.approx(found[0])
    assert sent[1] == pytest.approx(sent[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_add_up_as_the_objective_says(seed: int) -> None:
    """In drawn layouts, adding the gradients of one more micro-batch takes the time that the objective gives it."""
    model = alike(6)
    program = short_step(model, adamw(model, 1.0), 1)
    problems = [problem_of(program, SQUARE, micro_batches=count) for count in (2, 3, 4)]
    choice = drawn_choice(problems[0], seed)
    walked = walk(problems[0], phased_of(problems[0], choice))
    each = [segment for segment in walked.segments if segment.name != "update"]
    once = sum(op.seconds for segment in each for op in segment.ops)
    costs = [problem.assignment.cost_of(choice) for problem in problems]
    more = [after - before - once for before, after in pairwise(costs)]
    assert more == pytest.approx([walked.adding_s] * 2)


def test_bytes_on_the_wire_are_counted_by_axis() -> None:
    """In data parallelism over four ranks, each rank sends 3/2 of the bytes of all gradients."""
    planning, phased = data_parallel()
    weights = 3 * 8 * 1024**2 * 2
    assert walk(planning, phased).sent_bytes["x"] == pytest.approx(1.5 * weights, rel=0.01)


def test_predictions_are_of_what_runs() -> None:
    """The predicted time, traffic and peak memory of a plan are those of its overlapped program.

    On GPUs a part of the communication is hidden.
    """
    planning, serial = data_parallel()
    choice = data_parallel_choice(planning)
    cluster = planning.prices.cluster
    plan = lowered_plan(planning, choice, 0.0, None, cluster, PlanOptions()).plan
    run = lower_prepared(planning.space.program, plan, cluster)
    walked = walk(planning, run)
    times = simulate_streams(walked.segments, overlap_of(cluster), dispatch_s=cluster.device.dispatch("eager"))
    assert plan.predicted.step_time_s == pytest.approx(times.total_s)
    assert plan.predicted.peak_memory_bytes == peak_bytes(run)
    assert plan.predicted.sent_bytes == walked.sent_bytes == pytest.approx(walk(planning, serial).sent_bytes)
    launched = sum(op.launches for segment in walk(planning, serial).segments for op in segment.ops)
    assert plan.predicted.launches < launched
    assert plan.predicted.overlapped["x"] > 0
    assert not plan.predicted.overlaps


def test_a_step_of_micro_batches_is_predicted_whole() -> None:
    """With three micro-batches, backward compute takes three times as long, and the update less than 1.5 times.

    The utilisation counts the FLOPs of all micro-batches.
    """
    model = alike(2)
    program = step(model, adamw(model, 1.0))
    one, three = (problem_of(program, PAIR, micro_batches=count) for count in (1, 3))
    choice = drawn_choice(one, 1)
    plans = [lowered_plan(item, choice, 0.0, None, h100s(PAIR), PlanOptions()).plan for item in (one, three)]
    once, thrice = (plan.predicted for plan in plans)
    assert thrice.breakdown["backward compute"] == pytest.approx(3 * once.breakdown["backward compute"])
    updates = [each.breakdown["update compute"] for each in (once, thrice)]
    assert updates[0] <= updates[1] < 1.5 * updates[0]
    assert once.mfu is not None
    assert thrice.mfu == pytest.approx(3 * once.mfu * once.step_time_s / thrice.step_time_s)


def test_one_micro_batch_adds_nothing_up() -> None:
    """Without gradients or with one micro-batch nothing is added. Three micro-batches add all gradients twice."""
    assert not adding_up(1.0, 1)
    assert not adding_up(0.0, 3)
    ((op,),) = (segment.ops for segment in adding_up(1.0, 3))
    assert (op.seconds, op.launches) == (2.0, 2)
