"""Without a recipe, the planner finds known recipes from prices alone, in other batches, meshes and memory limits."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch

from autoshard.errors import DoesNotFitError, InvalidSpecError, NoShardingRuleError, PlanMismatchError, RecipeError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import P, PartitionSpec
from autoshard.rules import registry
from passes.driver import plan_and_lower as pipeline
from passes.driver.fastest_choice import fastest
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program, prepare
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.order import Moment, passes_at
from passes.prediction.predict import HOST
from passes.solver.search_control import SearchControl
from tests.passes.blocks import blocks_program, h100s, perceptron_program

WEIGHTS = ("up.weight", "down.weight")


def plan_of(batch: int, length: int, axes: dict[str, int], *, memory_budget: float | None = None) -> Plan:
    """Plan two blocks of width 4,096 with the state of Adam on one node of H100s, within `memory_budget` bytes."""
    mesh = Mesh(axes)
    options = PlanOptions(memory_budget=memory_budget, state_bytes_per_parameter_byte=2)
    program = blocks_program(batch=batch, length=length, hidden=4096)
    return plan_program(program, mesh, h100s(mesh), options)


def weight_specs(plan: Plan) -> list[PartitionSpec]:
    """The specs of all weight matrices."""
    return [item.spec for name, item in plan.parameters.items() if name.endswith(WEIGHTS)]


def product_specs(plan: Plan) -> list[tuple[PartitionSpec, ...]]:
    """The operand specs of all matrix products."""
    return [node.inputs for name, node in plan.nodes.items() if name.startswith("mm")]


def test_a_large_batch_with_ample_memory_is_data_parallel() -> None:
    """With a large batch and ample memory, weights are replicated and the batch is split."""
    plan = plan_of(256, 512, {"x": 8})
    assert set(weight_specs(plan)) == {P()}
    assert plan.nodes["input_0"].outputs == (P("x"),)


@pytest.mark.slow
def test_a_large_batch_with_little_memory_is_fully_sharded() -> None:
    """With a large batch and little memory, weights are split and gathered for their products.

    The batch stays split.
    """
    plan = plan_of(256, 512, {"x": 8}, memory_budget=3.7e9)
    assert all(spec.sharded_axes == ("x",) for spec in weight_specs(plan))
    assert plan.nodes["input_0"].outputs == (P("x"),)
    forward = plan.nodes["mm"].inputs
    assert forward[0].axes_of(0) == ("x",)
    assert forward[1] == P()
    assert plan.predicted.peak_memory_bytes <= 3.7e9


def test_a_small_batch_is_tensor_parallel_as_in_megatron() -> None:
    """With a small batch, a block's first weight is split by columns and its second by rows.

    No product reads a whole weight.
    """
    plan = plan_of(1, 2048, {"x": 8})
    assert weight_specs(plan) == [P("x"), P(None, "x")] * 2
    assert all(any("x" in spec.sharded_axes for spec in specs) for specs in product_specs(plan))
    assert plan.nodes["mm"].inputs[1] == P(None, "x")


def test_two_axes_mix_data_and_tensor_parallel() -> None:
    """On a mesh of two axes, one axis splits the batch, and the other axis splits the weights."""
    plan = plan_of(32, 512, {"data": 2, "model": 4}, memory_budget=3.2e9)
    (batch_axes,) = (plan.nodes["input_0"].outputs[0].axes_of(0),)
    split_by = {spec.sharded_axes for spec in weight_specs(plan)}
    assert len(batch_axes) == 1
    assert len(split_by) == 1
    assert split_by != {batch_axes}


def test_constraints_reach_hybrid_sharding() -> None:
    """Weights constrained to one axis, with the batch split over both axes, give hybrid sharded data parallelism."""
    mesh = Mesh({"replica": 2, "shard": 4})
    constraints = {"blocks.*.weight": P(), "blocks.*.up.weight": P("shard"), "input:0": P(("replica", "shard"))}
    constraints |= {"blocks.*.down.weight": P(None, "shard"), "blocks.*.norm.weight": P()}
    del constraints["blocks.*.weight"]
    program = blocks_program(batch=64, length=64, hidden=256)
    plan = plan_program(program, mesh, h100s(mesh), PlanOptions(constraints=constraints))
    assert weight_specs(plan) == [P("shard"), P(None, "shard")] * 2
    assert plan.nodes["input_0"].outputs == (P(("replica", "shard")),)


def test_the_chosen_plan_is_never_worse_than_a_baseline() -> None:
    """No known recipe that fits has a shorter step than the plan."""
    plan = plan_of(32, 512, {"x": 4})
    assert plan.baselines
    assert all(step is None or plan.predicted.step_time_s <= step for step in plan.baselines.values())


def test_the_prediction_is_the_objective_less_what_overlap_hides() -> None:
    """The predicted step is the sum of its parts, and the peak memory is the sum of its parts.

    Without waits for the host, overlap makes the step shorter than the objective by at most a fifth.
    """
    plan = plan_of(32, 512, {"data": 2, "model": 2})
    waits = plan.predicted.breakdown.get(HOST, 0.0)
    assert 0.8 * plan.objective < plan.predicted.step_time_s - waits <= plan.objective * (1 + 1e-9)
    assert sum(plan.predicted.breakdown.values()) == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert sum(plan.predicted.overlapped.values()) > 0
    assert sum(plan.predicted.memory_breakdown.values()) == pytest.approx(plan.predicted.peak_memory_bytes, rel=1e-6)


def test_a_limit_that_nothing_meets_names_the_smallest_that_would() -> None:
    """If no plan fits, the error states a larger memory limit, and planning within this limit succeeds."""
    with pytest.raises(DoesNotFitError, match="are enough; fewer may be") as caught:
        plan_of(4, 64, {"x": 2}, memory_budget=1e6)
    smallest = caught.value.smallest_bytes
    assert plan_of(4, 64, {"x": 2}, memory_budget=smallest).predicted.peak_memory_bytes <= smallest


def test_a_constraint_never_lowers_the_cost() -> None:
    """A plan with a constraint on a parameter costs at least as much as the plan without the constraint."""
    mesh, program = Mesh({"x": 2}), perceptron_program(batch=64)
    free = plan_program(program, mesh, h100s(mesh), PlanOptions())
    for spec in (P(), P("x"), P(None, "x")):
        options = PlanOptions(constraints={"first.weight": spec})
        pinned = plan_program(program, mesh, h100s(mesh), options)
        assert pinned.parameters["first.weight"].spec == spec
        assert pinned.objective >= free.objective * (1 - 1e-12)


def test_a_constraint_that_matches_nothing_is_refused() -> None:
    """A constraint whose pattern matches no parameter is refused with the pattern and the existing names."""
    mesh = Mesh({"x": 2})
    options = PlanOptions(constraints={"thrid.weight": P("x")})
    with pytest.raises(InvalidSpecError, match=r"constraints\['thrid.weight'\] matches no parameter.*first.weight"):
        plan_program(perceptron_program(), mesh, h100s(mesh), options)


def test_a_constraint_with_more_pieces_than_elements_is_refused() -> None:
    """Splitting a batch of four over eight devices is refused, and the error names the input and the spec."""
    mesh = Mesh({"x": 8})
    options = PlanOptions(constraints={"input:0": P("x")})
    with pytest.raises(InvalidSpecError, match=r"'input:0' cannot be laid out as P\('x'\)"):
        plan_program(perceptron_program(batch=4), mesh, h100s(mesh), options)


def test_a_spec_that_no_value_of_that_shape_has_names_the_value() -> None:
    """A constraint whose spec has more dims than a matched value is refused, and the error names the value."""
    mesh = Mesh({"x": 2})
    wrong = r"'first.bias' cannot be laid out as P\(None, 'x'\): .* splits 2 dims, but the tensor has ndim=1"
    with pytest.raises(InvalidSpecError, match=wrong):
        plan_program(perceptron_program(), mesh, h100s(mesh), PlanOptions(constraints={"first.*": P(None, "x")}))


def test_an_operator_without_a_rule_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict planning refuses an operator without a rule and names its line.

    Otherwise every rank computes the operator.
    """
    monkeypatch.delitem(registry._rules, torch.ops.aten.relu.default)
    mesh, program = Mesh({"x": 2}), perceptron_program()
    with pytest.raises(NoShardingRuleError, match=r"aten.relu.default .*blocks.py:\d+ in forward"):
        plan_program(program, mesh, h100s(mesh), PlanOptions(strict=True))
    plan = plan_program(program, mesh, h100s(mesh), PlanOptions())
    assert plan.replicated_operators[0][0] == "aten.relu.default"


def test_a_plan_of_another_model_is_refused() -> None:
    """A plan for one batch size is refused when a program of another batch size is lowered with it."""
    mesh = Mesh({"x": 2})
    plan = plan_program(perceptron_program(), mesh, h100s(mesh), PlanOptions())
    with pytest.raises(PlanMismatchError, match="The plan is for another model or other inputs"):
        lower_program(perceptron_program(batch=4), plan)


def test_a_saved_plan_lowers_to_the_same_program(tmp_path) -> None:
    """A loaded plan equals the saved plan, and lowers to the same program text."""
    mesh, program = Mesh({"x": 2}), perceptron_program(batch=64)
    plan = plan_program(program, mesh, h100s(mesh), PlanOptions(constraints={"first.weight": P("x")}))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    texts = [str(lower_program(program, item).lowered.graph_module.graph) for item in (plan, loaded)]
    assert texts[0] == texts[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", [1.0, 0.7])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_plan_is_predicted_from_what_runs(share: float, micro_batches: int) -> None:
    """The planner predicts the program that its plan lowers to, also if the plan recomputes or offloads."""
    mesh, program = Mesh({"x": 2}), blocks_program(batch=16, length=256, hidden=64)
    options = PlanOptions(micro_batches=micro_batches)
    peak = plan_program(program, mesh, h100s(mesh), options).predicted.peak_memory_bytes
    options = replace(options, memory_budget=int(share * peak))
    found = pipeline.plan_and_lower(program, mesh, h100s(mesh), options)
    saves = found.plan.recompute.nodes or found.plan.offload.nodes
    assert bool(saves) is (share < 1)
    again = lower_program(program, found.plan, h100s(mesh), LoweringOptions(micro_batches=micro_batches))
    assert found.phased is not None
    assert str(found.phased.lowered.graph_module.graph) == str(again.lowered.graph_module.graph)
    assert found.phased.digest() == again.digest()


def test_the_order_of_passes_is_data() -> None:
    """The passes of `Moment.TRACED`, applied in turn, give the program of `prepare`."""
    program = perceptron_program()
    for rewrite in passes_at(Moment.TRACED):
        program = rewrite(program)
    assert program.digest() == prepare(perceptron_program()).digest()


def test_what_keeps_everything_is_lowered_beside_what_recomputes_while_there_is_time() -> None:
    """In little memory, plans with and without recomputation are lowered, and the fastest is taken.

    After the time limit only the search's own choices are lowered.
    """
    mesh = Mesh({"data": 8})
    program, cluster = blocks_program(batch=64, length=1024, hidden=4096, count=4), h100s(mesh)
    options = PlanOptions(state_bytes_per_parameter_byte=2)
    limit = 0.6 * plan_program(program, mesh, cluster, options).predicted.peak_memory_bytes
    options = replace(options, memory_budget=limit)
    planning = pipeline.planning_problem(program, mesh, cluster, options)
    found = pipeline.solve(planning, options, {})
    assert found.searched[0].restored.recomputed
    assert found.bucketed is not None
    assert planning.usage(found.bucketed.choice).max() <= limit
    late = replace(options, control=SearchControl.within(0.0))
    first = fastest(planning, found, cluster, late).plan
    alone = lowered_plan(planning, found.bucketed.choice, 0.0, None, cluster, options).plan.predicted.step_time_s
    best = fastest(planning, found, cluster, options).plan
    assert best.predicted.step_time_s <= min(first.predicted.step_time_s, alone)
    assert first.objective in [each.solution.cost for each in found.searched]


def test_a_choice_that_leaves_room_for_collectives_is_lowered_too() -> None:
    """If memory binds, the search adds a choice that leaves a twentieth of the memory to collectives.

    The faster choice becomes the plan.
    """
    mesh = Mesh({"data": 8})
    program, cluster = blocks_program(batch=64, length=1024, hidden=4096, count=4), h100s(mesh)
    options = PlanOptions(state_bytes_per_parameter_byte=2, with_baselines=False)
    peak = plan_program(program, mesh, cluster, options).predicted.peak_memory_bytes
    small = replace(options, memory_budget=0.6 * peak)
    less = plan_program(program, mesh, cluster, small).predicted.peak_memory_bytes
    for budget, count in ((2.0 * peak, 1), (1.01 * less, 2)):
        each = replace(options, memory_budget=budget)
        planning = pipeline.planning_problem(program, mesh, cluster, each)
        found = pipeline.solve(planning, each, {})
        assert len(found.searched) == count
        own = [lowered_plan(one.planning, one.solution.choice, 0.0, None, cluster, each) for one in found.searched]
        steps = [one.plan.predicted.step_time_s for one in own]
        assert fastest(planning, found, cluster, each).plan.predicted.step_time_s == min(steps)
        assert own[-1].plan.predicted.peak_memory_bytes <= budget


def test_a_mesh_on_which_all_plans_are_dear_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh is not searched if all its plans cost more than a plan elsewhere.

    It has the plan of its fastest known recipe, or raises DearMeshError if the plan elsewhere is faster.
    """
    mesh, program = Mesh({"data": 4, "model": 2}), blocks_program(batch=64, length=1024, hidden=4096)
    free = plan_program(program, mesh, h100s(mesh), PlanOptions())
    least_s = min(step for step in free.baselines.values() if step is not None)
    cheap = replace(free, objective=0.5 * free.objective, baselines={})
    monkeypatch.setattr(pipeline, "solve_jointly", None)
    fast = replace(cheap, predicted=replace(free.predicted, step_time_s=0.5 * least_s))
    with pytest.raises(pipeline.DearMeshError) as raised:
        plan_program(program, mesh, h100s(mesh), PlanOptions(elsewhere=[fast]))
    assert raised.value.baselines == free.baselines
    slow = replace(cheap, predicted=replace(free.predicted, step_time_s=least_s))
    assert plan_program(program, mesh, h100s(mesh), PlanOptions(elsewhere=[slow])).predicted.step_time_s == least_s


@pytest.mark.parametrize("share", [0.6, 2.0])
def test_a_plan_does_not_hang_on_the_machine(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the time limit is far, a clock that jumps by a minute at each reading does not change the plan."""
    mesh, program = Mesh({"x": 2}), blocks_program(batch=64, length=128, hidden=128)
    largest = plan_program(program, mesh, h100s(mesh), PlanOptions()).predicted.peak_memory_bytes
    found = []
    for step_s in (1e-6, 60.0):
        clock = itertools.count(0.0, step_s)
        monkeypatch.setattr(time, "monotonic", lambda clock=clock: next(clock))
        options = PlanOptions(memory_budget=share * largest, control=SearchControl.within(1e9))
        found.append(plan_program(program, mesh, h100s(mesh), options))
    first, second = (replace(plan, search_time_s=0.0).to_json() for plan in found)
    assert first == second
    assert not first["was_cut"]


@pytest.mark.parametrize("looks", [1, 2, 5, 20, 100])
def test_a_plan_that_the_ceiling_cut_says_so(
    looks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan from a search that the time limit cut fits in memory and has a valid lower bound.

    Its print and file say that the search was cut, and one warning is logged.
    """
    mesh, program = Mesh({"x": 2}), blocks_program(batch=64, length=128, hidden=128)
    whole = plan_program(program, mesh, h100s(mesh), PlanOptions())
    clock = itertools.count(0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    options = PlanOptions(memory_budget=whole.predicted.peak_memory_bytes, control=SearchControl.within(looks))
    found = plan_program(program, mesh, h100s(mesh), options)
    assert found.predicted.peak_memory_bytes <= whole.predicted.peak_memory_bytes
    assert found.lower_bound is not None
    assert found.lower_bound <= whole.objective * (1 + 1e-9)
    assert ("cut by time_budget_s" in str(found)) is found.was_cut
    assert caplog.text.count("time_budget_s was over") == found.was_cut
    assert found.was_cut or found.objective == pytest.approx(whole.objective, rel=1e-9)
    assert found.was_cut or looks > 1
    assert Plan.from_json(found.to_json()).was_cut is found.was_cut


def test_a_constraint_that_contradicts_a_recipe_is_refused_with_the_name_of_the_parameter() -> None:
    """A constraint that contradicts the recipe is refused with the parameter's qualified name, not its node's name."""
    mesh = Mesh({"data": 2})
    options = PlanOptions(constraints={"second.weight": P()}, recipe=Recipe(zero=3))
    with pytest.raises(RecipeError, match=r"recipe= \(zero=3; .*\) leave no spec for 'second\.weight' together"):
        plan_program(perceptron_program(), mesh, h100s(mesh), options)
