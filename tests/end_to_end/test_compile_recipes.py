"""`compile` obeys the decisions that its recipe states, and searches all others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autoshard
from autoshard import Cluster, Mesh, NotAvailableError, PlanMismatchError, Recipe, RecipeError
from tests.end_to_end.decoders import LLAMA, decoder
from tests.end_to_end.test_recipe_plans import ADAMW, SHAPE, trained_alone
from tests.end_to_end.training import assert_close, whole

SQUARE = Mesh({"data": 2, "model": 2})


def compiled(target: Any, **options: Any) -> tuple[Any, torch.nn.Module, dict[str, Any]]:
    """Compile a small Llama with AdamW; return the step, the model and a batch."""
    model, inputs = decoder(SHAPE)
    settings = {"optimizer": ADAMW(model.parameters()), "time_budget_s": 5.0, **options}
    return autoshard.compile(model, target, **settings), model, inputs


def test_a_step_is_what_its_recipe_says() -> None:
    """Steps with ZeRO-3 and tensor parallelism equal one device, and a smaller batch can be evaluated."""
    step, model, inputs = compiled(SQUARE, recipe=Recipe(zero=3, tensor=2))
    losses, parameters = trained_alone(steps=2)
    for number, loss in enumerate(losses):
        assert_close(whole(step(**inputs)), loss, f"loss of step {number}")
    matrices = [item for item in step.plan.parameters.values() if len(item.shape) > 1]
    assert all(set(item.spec.sharded_axes) == {"data", "model"} for item in matrices)
    assert step.plan.recipe == Recipe(zero=3, tensor=2)
    for name, parameter in model.named_parameters():
        assert_close(whole(parameter), parameters[name], name)
    with torch.no_grad():
        few = {name: value[:3] for name, value in inputs.items()}
        assert_close(whole(step.sharded(**few)), model(**few), "evaluation")


def test_inference_is_what_its_recipe_says() -> None:
    """Compiled without an optimizer, ZeRO-2 splits no parameter, and the forward equals one device."""
    model, inputs = decoder(SHAPE)
    with torch.no_grad():
        expected = model(**inputs)
        sharded = autoshard.compile(model, SQUARE, recipe=Recipe(data=2, zero=2, tensor=2), time_budget_s=5.0)
        assert_close(whole(sharded(**inputs)), expected, "loss")
    split = {axis for spec in sharded.specs.values() for axis in spec.sharded_axes}
    assert split == {"model"}


def test_a_micro_batch_says_how_many_a_step_has() -> None:
    """A recipe's micro-batch of 2 samples a rank fixes the number of micro-batches of the example's batch."""
    model, inputs = decoder(SHAPE)
    settings = {"optimizer": ADAMW(model.parameters()), "example_inputs": inputs, "time_budget_s": 5.0}
    step = autoshard.compile(model, Mesh({"data": 2}), recipe=Recipe(micro_batch=2), **settings)
    (batch,) = {len(value) for value in inputs.values()}
    assert step.micro_batches == batch // 2 // 2


def test_the_axes_of_a_cluster_are_those_of_the_recipe() -> None:
    """On a cluster, the mesh has exactly the axes of the recipe, and the first loss equals one device."""
    model, inputs = decoder(SHAPE)
    settings = {"optimizer": ADAMW(model.parameters()), "example_inputs": inputs, "time_budget_s": 5.0}
    step = autoshard.compile(model, Cluster("h100_sxm", 1, 2), recipe=Recipe(tensor=2, micro_batch=4), **settings)
    assert (step.plan.mesh, step.micro_batches) == (Mesh({"model": 2}), 2)
    assert_close(whole(step(**inputs)), trained_alone(steps=2)[0][0], "loss")


def test_a_schedule_on_a_cluster_is_of_stages_that_are_searched() -> None:
    """A recipe with only a schedule gives a pipeline, whose number of stages the planner searches."""
    model, inputs = decoder(replace(LLAMA, layers=2))
    optimizer = ADAMW(model.parameters())
    cluster, recipe = Cluster("h100_sxm", 1, 4), Recipe(schedule="1F1B")
    step = autoshard.compile(model, cluster, recipe=recipe, optimizer=optimizer, example_inputs=inputs)
    assert step.plan.schedule == "1F1B"
    assert step.plan.mesh.axis_size("pipeline") > 1
    loss = model(**inputs).detach()
    assert_close(whole(step(**inputs)), loss, "loss")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"recipe": "tensor=2"}, RecipeError, "recipe='tensor=2' is a str; pass an autoshard.Recipe"),
        ({"recipe": Recipe(tensor=4)}, RecipeError, "tensor=4, but the mesh .* has 2 ranks along 'model'"),
        ({"recipe": Recipe(pipeline=2)}, RecipeError, "pipeline=2, but the mesh .* has 1 ranks along 'pipeline'"),
        ({"recipe": Recipe(schedule="GPipe")}, RecipeError, "schedule='GPipe' needs a pipeline"),
        ({"recipe": Recipe(recompute="selective")}, NotAvailableError, "recompute='selective' has no program yet"),
        (
            {"recipe": Recipe(micro_batch=2), "micro_batches": 2},
            NotAvailableError,
            r"recipe=Recipe\(micro_batch=2\) and micro_batches=2 say the same thing",
        ),
        ({"recipe": Recipe(micro_batch=2)}, NotAvailableError, "takes a batch that is known: pass example_inputs="),
        (
            {"recipe": Recipe(micro_batch=2), "optimizer": None},
            NotAvailableError,
            r"recipe=Recipe\(micro_batch=2\) belongs to a training step",
        ),
    ],
)
def test_a_recipe_that_contradicts_the_call_is_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """A recipe that contradicts the mesh or another argument raises an error that names both."""
    with pytest.raises(error, match=words):
        compiled(SQUARE, **options)


def test_a_recipe_that_contradicts_the_plan_is_refused() -> None:
    """A recipe that differs from the given plan raises an error that names the field; an equal recipe runs."""
    model, inputs = decoder(SHAPE)
    asked = {"example_inputs": inputs, "precision": None, "recipe": Recipe(tensor=2), "time_budget_s": 5.0}
    plan = autoshard.plan(model, SQUARE, optimizer=ADAMW(model.parameters()), **asked)
    with pytest.raises(PlanMismatchError, match=r"zero=3 is asked for, and the plan has zero=None\. Leave zero out"):
        compiled(SQUARE, plan=plan, recipe=Recipe(zero=3))
    step, _, _ = compiled(SQUARE, plan=plan, recipe=Recipe(tensor=2))
    assert_close(whole(step(**inputs)), trained_alone(steps=2)[0][0], "loss")
