"""With constraints on recipes, the search finds the best recipe within the constraints."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard
from autoshard import Cluster, DoesNotFitError, P, RecipeError
from autoshard.errors import NotAvailableError
from autoshard.ir.execution import Execution
from autoshard.ir.recipe import RECOMPUTE
from passes.driver.pricing import price_execution
from passes.search.recipe_constraints import pinned
from passes.search.recipe_plan import predict_recipe
from passes.search.recipe_problem import RecipeProblem
from tests.passes.decoders import PRICED, dense, priced_dense, tokens

MODEL, CLUSTER = dense(4), Cluster("h100_sxm", 1, 4)
BASE = Execution(global_batch=4)

CONSTRAINTS = st.fixed_dictionaries(
    {},
    optional={
        "tensor": st.sampled_from([2, (1, 2), (2, 4)]),
        "pipeline": st.sampled_from([1, 2, (1, 2, 4)]),
        "zero": st.sampled_from([0, (0, 1), [3]]),
        "recompute": st.sampled_from(["none", ("selective", "full")]),
        "offload": st.sampled_from(["none", "activations", ("none", "activations")]),
        "micro_batch": st.sampled_from([1, {1, 2}]),
        "sequence_parallel": st.booleans(),
    },
)


@cache
def every_recipe() -> list[tuple[float, int, Execution]]:
    """Return time, memory and recipe of all recipes of a search without constraints."""
    found = []
    problem = RecipeProblem(priced_dense(4).counted, CLUSTER, BASE, 80e9)
    for recipe in (recipe for name in RECOMPUTE for recipe in problem.space({"recompute": (name,)}).recipes()):
        prediction = predict_recipe(priced_dense(4).counted, recipe, CLUSTER)
        found.append((prediction.step_time_s, prediction.peak_memory_bytes, recipe))
    return found


def keeps(recipe: Execution, constraints: dict[str, object]) -> bool:
    """Whether every constrained field has an allowed value."""
    return all(
        getattr(recipe, name) in (given if isinstance(given, (tuple, list, set)) else (given,))
        for name, given in constraints.items()
    )


@settings(max_examples=12)
@given(CONSTRAINTS)
def test_the_best_that_keeps_constraints_is_found(constraints: dict[str, object]) -> None:
    """The search finds the fastest recipe within drawn constraints, or none if no recipe keeps the constraints."""
    found = RecipeProblem(priced_dense(4).counted, CLUSTER, BASE, 80e9, pinned=pinned(constraints)).best()
    known = [(time, memory) for time, memory, recipe in every_recipe() if keeps(recipe, constraints)]
    assert (found.recipe is None) == (not known)
    if found.recipe is None:
        return
    assert keeps(found.recipe, constraints)
    assert found.objective == found.lower_bound == min(known)[0] >= min(every_recipe(), key=lambda item: item[0])[0]
    priced = price_execution(MODEL, CLUSTER, found.recipe, tokens())
    assert priced.predicted.step_time_s == found.objective


@settings(max_examples=8)
@given(st.data())
def test_a_recipe_that_is_pinned_whole_is_the_plan(data: st.DataObject) -> None:
    """If constraints fix every field of a recipe, the plan is the recipe, with its time and memory."""
    even = [each for each in every_recipe() if each[2].stage_layers is None]
    time, memory, recipe = data.draw(st.sampled_from(even))
    names = ("data", "tensor", "sequence_parallel", "context", "pipeline", "schedule", "virtual_stages",
             "micro_batch", "recompute", "offload", "zero", "zero_group")  # fmt: skip
    plan = autoshard.plan(
        MODEL, CLUSTER, example_inputs=tokens(), optimizer="adamw", runtime=PRICED, global_batch=4,
        memory_budget=memory, constraints={name: getattr(recipe, name) for name in names},
    )  # fmt: skip
    assert plan.recipe == recipe.recipe
    assert (plan.objective, plan.predicted.peak_memory_bytes, plan.gap) == (time, memory, 0.0)


def test_what_a_runtime_does_is_kept_by_questions() -> None:
    """`why_not` prices variants under the plan's runtime, here without fusion; no variant is faster than the plan."""
    arguments = {"example_inputs": tokens(), "optimizer": "adamw", "global_batch": 4}
    eager = replace(PRICED, fused=False)
    plan = autoshard.plan(MODEL, CLUSTER, constraints={"tensor": (1, 2)}, runtime=eager, **arguments)
    assert plan.objective > autoshard.plan(MODEL, CLUSTER, runtime=PRICED, **arguments).objective
    answer = plan.why_not("pipeline")
    assert answer.variants
    assert all(item.step_time_s is not None and item.step_time_s >= plan.objective for item in answer.variants)


def test_tensor_ranks_may_span_nodes_where_they_are_pinned() -> None:
    """Under a constraint of four tensor ranks, these ranks span two nodes of two devices."""
    cluster = Cluster("h100_sxm", 2, 2)
    plan = autoshard.plan(
        MODEL,
        cluster,
        example_inputs=tokens(),
        optimizer="adamw",
        runtime=PRICED,
        global_batch=4,
        constraints={"tensor": 4},
    )
    assert plan.recipe is not None
    assert plan.recipe.tensor == 4


@pytest.mark.parametrize(
    ("constraints", "sentence"),
    [
        ({"layers": 3}, "a recipe has no such field; there are data, tensor"),
        ({"tensor": 0}, "tensor=0 must be a whole number"),
        ({"recompute": "some"}, "recompute='some' is unknown"),
        ({"sequence_parallel": 1}, "sequence_parallel=1 must be True or False"),
        ({"pipeline": ()}, "leaves no value"),
        ({"fused": (True, False)}, "it says what a runtime does: pass runtime=autoshard.Runtime"),
        ({"global_batch": 8}, "pass global_batch="),
        ({"stage_layers": (2, 2)}, "autoshard.price, take a recipe with others"),
    ],
)
def test_mistakes_are_named(constraints: dict[str, object], sentence: str) -> None:
    """A wrong constraint is refused, and the error names the mistake or another way."""
    with pytest.raises(RecipeError, match=sentence):
        pinned(constraints)


def test_specs_are_refused() -> None:
    """A constraint that gives parameters a spec is refused, because recipes do not choose specs one by one."""
    with pytest.raises(NotAvailableError, match="gives a value its spec, but with global_batch="):
        pinned({"layers.*": P("data")})


@pytest.mark.parametrize(
    ("constraints", "sentence"),
    [
        ({"tensor": 3}, "Without the constraint on 'tensor' there is one"),
        ({"tensor": 4, "pipeline": 2}, "Without the constraint on 'tensor' or 'pipeline' there is one"),
        ({"tensor": 3, "pipeline": 5}, "Leave out more than one of them"),
    ],
)
def test_constraints_that_no_recipe_keeps_are_named(constraints: dict[str, object], sentence: str) -> None:
    """If no recipe keeps all constraints, the error names the constraints whose removal alone helps, if any."""
    with pytest.raises(DoesNotFitError, match=sentence):
        autoshard.plan(
            MODEL,
            CLUSTER,
            example_inputs=tokens(),
            optimizer="adamw",
            runtime=PRICED,
            global_batch=4,
            constraints=constraints,
        )


def test_constraints_that_do_not_fit_are_named() -> None:
    """If no recipe within the constraints fits, the error names the constraints and their least memory."""
    arguments = {"example_inputs": tokens(), "optimizer": "adamw", "runtime": PRICED, "global_batch": 4}
    least = min(memory for _, memory, _ in every_recipe())
    sentence = r"with constraints=.*'zero': \(0,\).* Without constraints .* would do"
    with pytest.raises(DoesNotFitError, match=sentence) as raised:
        autoshard.plan(MODEL, CLUSTER, constraints={"zero": 0, "tensor": 1}, memory_budget=least, **arguments)
    kept = [memory for _, memory, recipe in every_recipe() if (recipe.zero, recipe.tensor) == (0, 1)]
    assert raised.value.smallest_bytes == min(kept)
