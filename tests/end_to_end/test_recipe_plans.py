"""Plans within recipes have the same price by every computation of it, run, and equal one device."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import Cluster, Mesh, NotAvailableError, Plan, PlanMismatchError, Recipe, RecipeError
from autoshard.ir.execution import Execution
from autoshard.runtime.launch import share_among_processes
from autoshard.runtime.stages.stage_meshes import is_elsewhere
from cost_models.schedule_orders import SCHEDULES, admits
from cost_models.streams import overlap_of, simulate_streams
from passes.driver.plan_again import PlanAgain
from passes.driver.plan_and_lower import planning_problem
from passes.driver.plan_of_choice import lowered_plan
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.memory.lowered_memory import peak_bytes
from passes.prediction.walk_program import walk_program
from passes.questions.ask import Questions
from passes.recomputation.plan_before import solution_of
from passes.strategies.price_nodes import NodePrices
from tests.end_to_end.decoders import LLAMA, decoder
from tests.end_to_end.training import assert_close, plain_step, whole
from tests.runtime.processes import on_processes
from tests.zoo.table import ARCHITECTURES

ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
"""AdamW with an eps above the rounding of small gradients, which would show in updates otherwise."""

BATCH = 8
SHAPE = replace(LLAMA, layers=1)
GLOO = (
    Recipe(data=4, zero=3, zero_group=2, micro_batch=1, recompute="full"),
    Recipe(pipeline=2, data=2, zero=1, micro_batch=1),
)
REFUSED = (
    (Recipe(data=2, tensor=2, expert=4), "expert=4 with data=2 has no program yet that compile runs"),
    (Recipe(data=4, expert=2, zero_group=2), "expert=2 with zero_group=2 has no program yet"),
    (Recipe(data=4, recompute="selective"), "recompute='selective' has no program yet"),
    (Recipe(data=4, zero=1, offload="optimizer"), "offload='optimizer' has no program yet"),
)


def cluster_of(devices: int) -> Cluster:
    """Return a cluster of H100s in one node."""
    return Cluster("h100_sxm", nodes=1, devices_per_node=devices)


def plan_of(recipe: Recipe, target: Cluster | Mesh, layers: int = 1, **options: Any) -> Plan:
    """Return the plan of a small Llama within a recipe, for a global batch of `BATCH`."""
    model, inputs = decoder(replace(SHAPE, layers=layers))
    asked = {"optimizer": ADAMW(model.parameters()), "precision": None, "global_batch": BATCH, **options}
    return autoshard.plan(model, target, example_inputs=inputs, recipe=recipe, **asked)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Draw a complete recipe of two or four devices without stages."""
    data, context, tensor = draw(
        st.sampled_from([(2, 1, 1), (4, 1, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (1, 2, 1), (1, 2, 2)])
    )
    has_groups = data == 4 and draw(st.booleans())
    return Recipe(
        data=data,
        context=context,
        tensor=tensor,
        zero=draw(st.integers(0, 3)),
        zero_group=2 if has_groups else None,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        micro_batch=draw(st.sampled_from([BATCH // data, BATCH // data // 2])),
        recompute=draw(st.sampled_from(["none", "full"])),
        offload=draw(st.sampled_from(["none", "activations"])),
    )


@st.composite
def staged_recipes(draw: st.DrawFn) -> Recipe:
    """Draw a complete recipe of two pipeline ranks, with one or two stages each."""
    data, context, tensor = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]))
    micro_batches = draw(st.sampled_from([2, 4]))
    admitted = [(name, two) for name, two in product(SCHEDULES, (1, 2)) if admits(name, 2, micro_batches, two)]
    schedule, virtual_stages = draw(st.sampled_from(admitted))
    return Recipe(
        data=data,
        context=context,
        tensor=tensor,
        zero=draw(st.integers(0, 3)),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        pipeline=2,
        schedule=schedule,
        virtual_stages=virtual_stages,
        stage_layers=(1, 3) if virtual_stages == 1 and draw(st.booleans()) else None,
        micro_batch=BATCH // data // micro_batches,
        recompute=draw(st.sampled_from(["none", "full"])),
    )


def check_price(plan: Plan, cluster: Cluster) -> None:
    """Check that a plan, a plan of its specs without the recipe, and its lowered program agree.

    Step time, peak memory and bytes sent are compared.
    """
    assert isinstance(plan.alternatives, Questions)
    assert isinstance(plan.alternatives.replan, PlanAgain)
    asked = plan.alternatives.replan.planned
    options = replace(asked.planner._options(asked.program, plan.mesh, {}), recipe=None)
    planning = planning_problem(asked.program, plan.mesh, cluster, options)
    same = solution_of(plan, planning, {})
    assert same is not None
    of_specs = lowered_plan(
        same.planning, same.solution.choice, same.solution.cost, None, cluster, options
    ).plan.predicted
    phased = lower_program(asked.program, plan, cluster, LoweringOptions(micro_batches=plan.micro_batches))
    walked = walk_program(phased, NodePrices(cluster, plan.mesh), micro_batches=plan.micro_batches)
    times = simulate_streams(walked.segments, overlap_of(cluster), dispatch_s=cluster.device.dispatch("eager"))
    for seconds in (of_specs.step_time_s, times.total_s):
        assert seconds == pytest.approx(plan.predicted.step_time_s, rel=1e-6)
    for size in (of_specs.peak_memory_bytes, peak_bytes(phased, micro_batches=plan.micro_batches)):
        assert size == plan.predicted.peak_memory_bytes
    for sent in (of_specs.sent_bytes, walked.sent_bytes):
        assert sent == plan.predicted.sent_bytes


@cache
def trained_alone(layers: int = 1, steps: int = 3) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the losses and parameters of some steps on one device."""
    model, inputs = decoder(replace(SHAPE, layers=layers))
    optimizer = ADAMW(model.parameters())
    losses = [plain_step(model, optimizer, **inputs) for _ in range(steps)]
    return losses, {name: item.detach() for name, item in model.named_parameters()}


def check_runs(plan: Plan, mesh: Any, layers: int = 1) -> None:
    """Check that three steps under a plan have the losses and parameters of one device."""
    model, inputs = decoder(replace(SHAPE, layers=layers))
    step = autoshard.compile(model, mesh, optimizer=ADAMW(model.parameters()), plan=plan)
    losses, parameters = trained_alone(layers)
    for number, loss in enumerate(losses):
        assert_close(whole(step(**inputs)), loss, f"loss of step {number}")
    held = {name: item for name, item in model.named_parameters() if not is_elsewhere(item)}
    assert held, "a rank holds the parameters of its stage"
    for name, parameter in held.items():
        assert_close(whole(parameter), parameters[name], name)


EXAMPLES = 20 if settings.default is None else settings.default.max_examples


@settings(max_examples=max(1, EXAMPLES // 4))
@given(recipe=recipes())
def test_one_price_and_it_runs(recipe: Recipe) -> None:
    """For any complete recipe, plan, specs and lowered program have the same price, and training equals one device."""
    cluster = cluster_of(recipe.devices)
    plan = plan_of(recipe, cluster)
    assert plan.runs
    assert plan.micro_batches == BATCH // recipe.data // recipe.micro_batch
    check_price(plan, cluster)
    check_runs(plan, plan.mesh)


@pytest.mark.slow
@settings(max_examples=max(1, EXAMPLES // 10))
@given(recipe=staged_recipes())
def test_recipes_with_stages_run(recipe: Recipe) -> None:
    """For any complete recipe with stages, the plan does as the recipe says, and training equals one device."""
    layers = 4 if recipe.virtual_stages > 1 or recipe.stage_layers else 2
    plan = plan_of(recipe, cluster_of(recipe.devices), layers=layers)
    assert (plan.runs, plan.recipe) == (True, recipe)
    assert len(plan.stages) == 2 * recipe.virtual_stages
    assert plan.micro_batches == BATCH // recipe.data // recipe.micro_batch
    blocks = [len({name.split(".")[1] for name in stage.parameters if "layers" in name}) for stage in plan.stages]
    assert recipe.stage_layers in (None, tuple(blocks))
    assert any(stage.recompute.nodes for stage in plan.stages) == (recipe.recompute == "full")
    matrices = [item for item in plan.parameters.values() if len(item.shape) > 1]
    axes = {
        name for name, size in (("data", recipe.data), ("context", recipe.context)) if size > 1 and recipe.zero == 3
    }
    assert all(axes <= set(item.spec.sharded_axes) for item in matrices)
    check_runs(plan, plan.mesh, layers=layers)


def test_blocks_that_a_model_has_not_are_refused() -> None:
    """A recipe that assigns three blocks to stages of a model with two raises an error with both numbers."""
    with pytest.raises(RecipeError, match=r"stage_layers=\(1, 2\) shares out 3 blocks, .* passes 2"):
        plan_of(Recipe(pipeline=2, stage_layers=(1, 2), micro_batch=4), cluster_of(2), layers=2)


@pytest.mark.filterwarnings("ignore")  # of other people's models
@pytest.mark.parametrize(
    ("recipe", "split", "within"),
    [
        (Recipe(data=2, expert=2, zero=3, pipeline=2, micro_batch=1), {"expert"}, set()),
        pytest.param(
            Recipe(data=2, expert=2, tensor=2, expert_tensor=2, micro_batch=2),
            {"expert"},
            {"model"},
            marks=pytest.mark.slow,
        ),
        pytest.param(Recipe(data=2, expert=2, tensor=2, micro_batch=2), {"expert"}, set(), marks=pytest.mark.slow),
    ],
)
def test_recipes_with_experts_run(recipe: Recipe, split: set[str], within: set[str]) -> None:
    """Axis "expert" splits experts, "model" splits each expert if the recipe says so, and a step equals one device."""
    model, inputs = ARCHITECTURES["mixtral"].build()
    inputs = {name: torch.cat([value] * 2) for name, value in inputs.items()}
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = {"example_inputs": inputs, "optimizer": optimizer, "precision": None, "recipe": recipe}
    plan = autoshard.plan(model, cluster_of(recipe.devices), **asked)
    matrices = {name: item for name, item in plan.parameters.items() if "experts.down" in name}
    assert {axis for item in matrices.values() for axis in item.spec.axes_of(0)} == split
    nodes = [
        each for part in plan.stages or [plan] for name, each in part.nodes.items() if name in ("experts", "experts_1")
    ]
    assert {axis for each in nodes for axis in each.inputs[-1].sharded_axes} == split | within
    step = autoshard.compile(model, plan.mesh, optimizer=optimizer, plan=plan)
    loss = alone(**inputs).loss
    loss.backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_close(whole(step(**inputs)), loss.detach(), "loss")
    held = dict(model.named_parameters())
    for name, parameter in alone.named_parameters():
        assert_close(whole(held[name]), parameter.detach(), name)


def test_what_a_recipe_says_is_what_the_plan_does(tmp_path) -> None:
    """A plan places parameters, recomputes and has micro-batches as its recipe states, and is saved with the recipe."""
    plan = plan_of(Recipe(data=2, zero=3, tensor=2, micro_batch=2, recompute="full"), cluster_of(4), layers=2)
    assert plan.mesh == Mesh({"data": 2, "model": 2})
    matrices = [item for item in plan.parameters.values() if len(item.shape) > 1]
    assert all(set(item.spec.sharded_axes) == {"data", "model"} for item in matrices)
    assert plan.recompute.nodes
    assert not plan.offload.nodes
    assert "ZeRO-3" in str(plan)
    assert "runs it, in 2 micro-batches" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded.runs, loaded.micro_batches, loaded.recipe) == (True, 2, plan.recipe)
    check_runs(loaded, loaded.mesh, layers=2)


def test_what_a_recipe_leaves_free_is_searched() -> None:
    """Fields without a value are searched, and the found plan is no more than 1 % slower than a complete recipe."""
    free, complete = Recipe(data=2), Execution(data=2, micro_batch=4).recipe
    found = plan_of(free, cluster_of(2))
    assert found.micro_batches == 1
    assert found.predicted.step_time_s <= plan_of(complete, cluster_of(2)).predicted.step_time_s * 1.01
    assert {each.mesh for each in map(plan_of, (Recipe(zero=0),), (cluster_of(2),))} <= {
        Mesh({"data": 2}),
        Mesh({"model": 2}),
    }


@pytest.mark.parametrize(("recipe", "words"), REFUSED)
def test_what_has_no_program_yet_is_refused_by_name(recipe: Recipe, words: str) -> None:
    """A recipe that has no program yet raises an error that names the unsupported fields."""
    with pytest.raises(NotAvailableError, match=words):
        plan_of(recipe, cluster_of(4))


def test_a_recipe_that_is_not_of_the_devices_is_refused() -> None:
    """A recipe that does not fit the cluster, the mesh or the batch raises an error with the sizes."""
    with pytest.raises(RecipeError, match=r"data=2 .* does not make 4 devices"):
        plan_of(Recipe(data=2, context=1, tensor=1), cluster_of(4))
    with pytest.raises(RecipeError, match=r"tensor=1, but the mesh .* has 2 ranks along 'model'"):
        plan_of(Recipe(data=2, tensor=1), Mesh({"data": 2, "model": 2}))
    with pytest.raises(RecipeError, match="global_batch=8 is no multiple of micro_batch=3 x data=2"):
        plan_of(Recipe(data=2, micro_batch=3), Mesh({"data": 2}))


def test_a_step_has_the_micro_batches_of_its_plan() -> None:
    """`compile` refuses another number of micro-batches than the plan's, and a plan priced for another runtime."""
    plan = plan_of(Recipe(data=2, micro_batch=2), Mesh({"data": 2}))
    model, inputs = decoder(SHAPE)
    with pytest.raises(PlanMismatchError, match="a step of 2 micro-batches, and micro_batches=4"):
        autoshard.compile(model, plan.mesh, optimizer=ADAMW(model.parameters()), plan=plan, micro_batches=4)
    priced = autoshard.plan(
        model, cluster_of(2), example_inputs=inputs, recipe=Recipe(data=2), global_batch=BATCH, precision="f32",
        runtime="fsdp2",
    )  # fmt: skip
    assert priced.runtime == "fsdp2"
    with pytest.raises(PlanMismatchError, match=r"prices a recipe .* under runtime='fsdp2'"):
        autoshard.compile(model, Mesh({"data": 2}), optimizer=ADAMW(model.parameters()), plan=priced)


def check_on_gloo(recipe: Recipe) -> None:
    """On four processes, training under the plan of a recipe equals one device."""
    layers = recipe.pipeline or 1
    plan = share_among_processes(lambda: plan_of(recipe, cluster_of(4), layers=layers))
    sizes, names = zip(*((size, name) for name, size in plan.mesh.axes), strict=True)
    check_runs(plan, init_device_mesh("cpu", sizes, mesh_dim_names=names), layers=layers)


CHECKS = {recipe.words: partial(check_on_gloo, recipe) for recipe in GLOO}

test_on_four_processes = on_processes(CHECKS, slow=CHECKS)
