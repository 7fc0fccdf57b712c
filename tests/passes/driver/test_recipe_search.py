"""`plan` with a global batch and a runtime searches recipes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard import Cluster, DoesNotFitError, P, Plan, Recipe, Runtime
from autoshard.errors import InvalidSpecError, NotAvailableError, RecipeError
from autoshard.ir.cluster_mesh import ClusterMesh
from tests.passes.decoders import PRICED, dense, tokens

MODEL = dense(4)
CLUSTER = Cluster("h100_sxm", 1, 4)


def _plan(cluster: Cluster | ClusterMesh = CLUSTER, **arguments) -> Plan:
    given = {"optimizer": "adamw", "global_batch": 16, "example_inputs": tokens(), **arguments}
    if given["global_batch"] or "recipe" in given:
        given = {"runtime": PRICED, **given}
    return autoshard.plan(given.pop("model", MODEL), cluster, **given)


def _price(recipe: Recipe, runtime: Runtime = PRICED, global_batch: int = 16) -> Plan:
    """Price a recipe with `autoshard.price`, as a user does."""
    options = {"example_inputs": tokens(), "runtime": runtime, "global_batch": global_batch}
    return autoshard.price(MODEL, CLUSTER, recipe, **options)


def test_the_plan_is_that_of_the_fastest_recipe(tmp_path) -> None:
    """A plan predicts what `price` predicts for its recipe, and is no slower than any baseline, such as FSDP.

    A saved plan keeps its recipe.
    """
    plan = _plan()
    assert plan.recipe is not None
    assert plan.recipe.data * plan.recipe.micro_batch * plan.micro_batches == 16
    assert plan.predicted == _price(plan.recipe).predicted
    assert plan.objective == plan.predicted.step_time_s == plan.lower_bound
    assert plan.gap == 0.0
    assert all(seconds is None or seconds >= plan.objective for seconds in plan.baselines.values())
    assert {"data parallel", "FSDP", "Megatron TP+SP"} <= plan.baselines.keys()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").recipe == plan.recipe


def test_another_runtime_does_not_run_our_kernels() -> None:
    """Our kernels (`backend=`) with another library's `runtime=` are refused, and the error names both arguments."""
    with pytest.raises(NotAvailableError, match="backend='triton' says which kernels compile runs; runtime="):
        _plan(backend="triton")


def test_plans_of_recipes_and_of_specs_are_compared(tmp_path, specs: Plan) -> None:
    """`compare` lists the fields in which two recipes differ.

    For a plan of specs and a loaded plan of a recipe, it compares tokens per second, as the batches differ.
    """
    one, other = (_plan(recipe=Recipe(data=4, zero=zero)) for zero in (0, 3))
    assert one.compare(other).recipe_fields == {"zero": (0, 3)}
    assert "recipe: zero" in str(one.compare(other))
    other.save(tmp_path / "plan.json")
    found = specs.compare(Plan.load(tmp_path / "plan.json"))
    assert found.recipes == (None, other.recipe)
    assert found.recipe_fields == {}
    assert found.tokens_per_s == (specs.predicted.tokens_per_s, other.predicted.tokens_per_s)
    assert "none: specs" in str(found)
    assert "tokens per second" in str(found)


def test_print_says_in_words_what_it_is() -> None:
    """A recipe's plan prints its axes, schedule and micro-batches, and whether `compile` can run the recipe."""
    piped = _plan(recipe=Recipe(pipeline=2, data=2, micro_batch=2, recompute="full"))
    assert "Recipe: data 2, pipeline 2 (1F1B); micro-batches of 2; blocks computed again." in str(piped)
    assert "Batch: 16 sequences, in 4 micro-batches." in str(piped)
    assert f"price of a run under runtime={PRICED.name!r}. For compile, plan with recipe=plan.recipe." in str(piped)
    again = _plan(recipe=Recipe(data=4, recompute="selective"))
    assert "compile has no program for recompute='selective'." in " ".join(str(again).split())
    flat = _plan(recipe=Recipe(tensor=2, data=2))
    assert "until then" in str(dataclasses.replace(flat, was_interrupted=True))


def test_what_does_not_fit_names_what_would() -> None:
    """If no recipe fits, the error states the least memory. Planning with this memory, or with more nodes, succeeds."""
    with pytest.raises(DoesNotFitError, match=r"the smallest needs .* of optimizer state, .* \(data") as raised:
        _plan(memory_budget=100_000)
    least = raised.value.smallest_bytes
    assert _plan(memory_budget=least).predicted.peak_memory_bytes == least
    with pytest.raises(DoesNotFitError, match="Use more devices, or devices with more memory"):
        _plan(memory_budget=least - 1)
    assert _plan(Cluster("h100_sxm", 2, 4), memory_budget=least - 1).gap == 0.0


def test_a_batch_that_nothing_runs_is_refused() -> None:
    """Three sequences over seven devices are refused. A constraint that leaves no recipe is refused by its name."""
    with pytest.raises(DoesNotFitError, match=r"No recipe runs whole micro-batches .* Change the batch, or the dev"):
        autoshard.plan(MODEL, Cluster("h100_sxm", 1, 7), example_inputs=tokens(), optimizer="adamw", global_batch=3)
    with pytest.raises(DoesNotFitError, match=r"Without the constraint on 'pipeline' there is one"):
        _plan(constraints={"pipeline": 3, "zero": 1})


def test_optimizers_are_those_of_recipes() -> None:
    """An optimizer gives the same prediction by name or as an object.

    Planning without an optimizer, or with RMSprop, is refused.
    """
    given = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)
    assert _plan(optimizer=given).predicted == _plan(optimizer="sgd_momentum").predicted != _plan().predicted
    for optimizer in (None, "rmsprop"):
        with pytest.raises(NotAvailableError, match="recipes are of whole training steps, with one of sgd"):
            _plan(optimizer=optimizer)


def test_a_model_in_float32_is_planned_in_16_bits() -> None:
    """A model in float32 is planned like `model.bfloat16()` by default, and its parameters stay float32."""
    wide = copy.deepcopy(MODEL).float()
    narrow = _plan(precision="bf16").predicted
    assert _plan(model=wide).predicted == narrow
    assert _plan(model=wide, precision="f32").predicted.mfu != narrow.mfu
    assert {(item.dtype, item.device.type) for item in wide.parameters()} == {
        (torch.float32, next(MODEL.parameters()).device.type)
    }


def test_inputs_in_float32_go_with_a_model_in_float32() -> None:
    """Float32 inputs, such as images, are cast to the dtype of the matrix products, in prices and in plans of specs."""
    images, classes = torch.empty(8, 3, 8, 8), torch.zeros(8, dtype=torch.int64)
    model = nn.Sequential(nn.Conv2d(3, 64, 8), nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 10))
    same = {"model": model, "example_inputs": (images,), "loss_fn": lambda y: F.cross_entropy(y, classes[: len(y)])}
    found = _plan(**same)
    assert found.recipe is not None
    narrow = autoshard.price(
        copy.deepcopy(model).bfloat16(), CLUSTER, found.recipe,
        example_inputs=(images.bfloat16(),), loss_fn=same["loss_fn"], global_batch=16, runtime=PRICED,
    )  # fmt: skip
    assert found.predicted.step_time_s == narrow.predicted.step_time_s
    assert images.dtype == next(model.parameters()).dtype == torch.float32
    specs = _plan(CLUSTER.mesh({"data": 4}), **same, global_batch=None)
    assert specs.why_not("expert").variants == ()


def test_price_confirms_plans_of_models_in_float32() -> None:
    """For a model in float32, `price` of the plan's recipe gives the plan's prediction in each precision."""
    images = torch.empty(8, 64)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    same = {"example_inputs": (images,), "loss_fn": lambda y: y.float().sum()}
    for precision in ("bf16", "f16", "f8", "f32"):
        plan = _plan(model=model, precision=precision, **same)
        assert plan.recipe is not None
        asked = {"precision": precision, "global_batch": 16, "runtime": PRICED}
        again = autoshard.price(model, CLUSTER, plan.recipe, **same, **asked)
        assert (again.predicted, again.parameters) == (plan.predicted, plan.parameters)


def test_products_run_in_the_models_own_dtype() -> None:
    """A model in bfloat16 takes less memory if planned in 8-bit floats, and is refused in float32."""
    assert _plan(precision="f8").predicted.peak_memory_bytes < _plan().predicted.peak_memory_bytes
    with pytest.raises(NotAvailableError, match=r"precision='f32' cannot be planned .* torch.bfloat16"):
        _plan(precision="f32")


def test_what_recipes_do_not_follow_is_refused() -> None:
    """A search for recipes refuses a mesh and constraints on specs.

    A given recipe refuses arguments that contradict it.
    """
    with pytest.raises(NotAvailableError, match=r"A search for another runtime chooses the axes"):
        _plan(CLUSTER.mesh({"data": 4}))
    with pytest.raises(NotAvailableError, match="gives a value its spec"):
        _plan(constraints={"*": P()})
    with pytest.raises(RecipeError, match=r"global_batch=15 is no multiple of micro_batch=1 x data=4"):
        _plan(recipe=Recipe(data=4), global_batch=15)
    with pytest.raises(NotAvailableError, match="optimizer='rmsprop' with global_batch= or recipe="):
        _plan(recipe=Recipe(data=4), optimizer="rmsprop")
    with pytest.raises(NotAvailableError, match=r"constraints=.* does not go with recipe="):
        _plan(constraints={"tensor": 2}, recipe=Recipe(data=4))
    with pytest.raises(InvalidSpecError, match="with plan\\(global_batch=\\)"):
        _plan(constraints={"tensor": 2}, global_batch=None)


def test_a_recipe_must_fit_in_the_memory_that_is_named() -> None:
    """A given recipe is accepted with a `memory_budget` of its peak memory, and refused with one byte less."""
    recipe = Recipe(data=4)
    needed = _plan(recipe=recipe).predicted.peak_memory_bytes
    assert _plan(recipe=recipe, memory_budget=needed).memory_budget == needed
    with pytest.raises(DoesNotFitError, match=r"The recipe needs .* more than memory_budget=") as raised:
        _plan(recipe=recipe, memory_budget=needed - 1)
    assert raised.value.smallest_bytes == needed


def test_a_search_without_time_says_so() -> None:
    """A search with `time_budget_s=0` raises NotAvailableError, because no recipe has a price."""
    with pytest.raises(NotAvailableError, match="time_budget_s=0 ended before any recipe was priced"):
        _plan(time_budget_s=0.0)


@pytest.fixture(scope="module")
def specs() -> Plan:
    """A plan of specs on four data ranks, for a batch of 8."""
    return autoshard.plan(MODEL, CLUSTER.mesh({"data": 4}), example_inputs=tokens(8), optimizer="adamw")


@pytest.mark.slow
def test_what_no_axis_can_do_is_planned_on_another_mesh(specs: Plan) -> None:
    """`why_not` of a pipeline, for which the mesh has no axis, gives the step time of a new plan on another mesh."""
    answer = specs.why_not("pp")
    (found,) = answer.variants
    assert found.recipe is not None
    piped = autoshard.plan(
        MODEL, CLUSTER, example_inputs=tokens(8), optimizer="adamw", global_batch=8, constraints={"pipeline": (2, 4)}
    )
    assert piped.stages
    assert found.step_time_s == pytest.approx(piped.predicted.step_time_s)
    assert answer.chosen.step_time_s == specs.predicted.step_time_s
    assert f"{found.step_time_s / specs.predicted.step_time_s - 1:+.1%} beside the chosen one" in str(answer)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["sequence", "recompute", "offload", "hsdp"])
def test_each_feature_has_a_plan(specs: Plan, name: str) -> None:
    """For each feature that the plan does not use, `why_not` gives plans that fit and have a step time."""
    answer = specs.why_not(name)
    assert answer.variants
    assert all(item.fits and item.step_time_s for item in answer.variants)


def test_zero_2_is_a_choice_of_specs(specs: Plan) -> None:
    """`why_not` of ZeRO-2 gives one plan that fits, with ZeRO-2 over the only axis of the mesh."""
    (found,) = specs.why_not("zero-2").variants
    assert (found.name, found.fits) == ("zero-2 over data", True)


def test_what_the_model_has_not_is_said(specs: Plan) -> None:
    """`why_not` says that a dense model has no experts. It refuses a pipeline for inputs without a common batch dim."""
    answer = specs.why_not("ep")
    assert answer.variants == ()
    assert "expert: the model has no experts to share out." in str(answer)

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) + y).sum()

    inputs = (torch.ones(8, 4), torch.ones(1, 4))
    plan = autoshard.plan(Added(), CLUSTER.mesh({"data": 4}), example_inputs=inputs, optimizer="sgd")
    with pytest.raises(NotAvailableError, match=r"first dim of every input .* differ"):
        plan.why_not("pipeline")


def test_a_model_in_float32_keeps_what_is_frozen() -> None:
    """A model in float32 with frozen weights has the recipe, memory and cost of the same model in bfloat16."""
    model = dense(2).float().requires_grad_(False)
    model.last.requires_grad_(True)
    options: dict[str, Any] = {"example_inputs": tokens(), "optimizer": "adamw", "global_batch": 8, "runtime": PRICED}
    found, cast = (
        autoshard.plan(each, Cluster("h100_sxm", 1, 2), **options) for each in (model, copy.deepcopy(model).bfloat16())
    )
    assert found.recipe == cast.recipe
    assert found.predicted.peak_memory_bytes == cast.predicted.peak_memory_bytes
    assert found.objective == cast.objective
