"""`plan(model, cluster, global_batch=...)`: search the fastest recipe of a whole training step, pipelines included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from autoshard.arguments import check_trains, checked_cluster
from autoshard.call import Call
from autoshard.errors import DoesNotFitError, NotAvailableError
from autoshard.ir.execution import OPTIMIZERS, Execution
from autoshard.ir.recipe import Recipe
from autoshard.ir.runtime import OURS, Runtime
from autoshard.ir.text import format_bytes
from cost_models.hardware import Cluster
from cost_models.memory import room_bytes
from cost_models.streams import overlap_of
from passes.driver.pricing import has_frozen_masters, narrow_dtype, priced_model
from passes.driver.progress import Show, search_bar
from passes.search.layers.price_model import CountedModel
from passes.search.recipe_constraints import pinned
from passes.search.recipe_plan import predict_recipe
from passes.search.recipe_problem import RecipeProblem, known_recipe
from passes.search.recipe_space import SEARCHED, Only
from passes.search.search_recipes import FoundRecipe, Watch
from passes.solver.search_control import Ceiling

_AXES = 3
"""The assumed number of mesh axes with several ranks. Each axis takes memory for its communicators (`room_bytes`)."""


@dataclass(frozen=True, slots=True)
class RecipeSearch:
    """A search for the fastest recipe of a whole training step.

    Args:
        call: the arguments of `autoshard.plan`.
        problem: the recipes to search, with their prices and the memory limit.
        before: the recipe where the search begins, if any.
    """

    call: Call
    problem: RecipeProblem
    before: Recipe | None

    @property
    def time_budget_s(self) -> float:
        """Seconds that one search over recipes may take."""
        return self.call.time_budget_s

    def run(self) -> tuple[FoundRecipe, Mapping[str, FoundRecipe]]:
        """Return the fastest recipe that fits, and the fastest recipe of each known kind by the kind's name.

        Raises:
            DoesNotFitError: no recipe fits. The message names the memory of the recipe that needs least.
            NotAvailableError: time ran out before a recipe was priced, or `compile` can run no recipe that fits.
        """
        ceiling = Ceiling.within(self.time_budget_s)
        with search_bar(self.time_budget_s, self.call.progress) as show:
            watch = None if show is None else _watching(show)
            known = None if self.before is None else known_recipe(self.problem, self.before)
            found, kinds = self.problem.best_of_all(ceiling=ceiling, known=known, watch=watch)
        if found.recipe is not None:
            return found, kinds
        if not found.is_complete:
            raise NotAvailableError(
                f"time_budget_s={self.time_budget_s:g} ended before any recipe was priced; give the search more time."
            )
        if self.problem.runs and self._is_priced_elsewhere():
            kept = f" and keep constraints={dict(self.problem.pinned)!r}" if self.problem.pinned else ""
            raise NotAvailableError(
                f"Recipes fit{kept}, but compile runs none of these recipes. Other constraints may allow one; "
                "runtime='megatron' prices these recipes."
            )
        raise _shortage(self.problem, Ceiling.within(self.time_budget_s))

    def _is_priced_elsewhere(self) -> bool:
        """Whether some recipe fits in memory if the search also admits recipes that only other frameworks can run."""
        free = replace(self.problem, runs=False)
        least = free.smallest(ceiling=Ceiling.within(self.time_budget_s))
        return least.recipe is not None and least.objective <= free.memory_limit


def recipe_search(call: Call, global_batch: int) -> RecipeSearch:
    """Return the search for the fastest recipe of a call. The call's constraints are on fields of recipes.

    Args:
        global_batch: number of sequences in a step.

    Raises:
        RecipeError: a constraint names an unknown field of recipes, or an unknown value.
        NotAvailableError: recipes or `compile` do not support the optimizer or precision, or a constraint gives a spec.
    """
    model, runtime, cluster = call.model, call.runtime, checked_cluster(call.target)
    assert call.example_inputs is not None, "plan takes example inputs"
    check_trains(model, call.optimizer)
    base = base_recipe(model, call.optimizer, call.precision, global_batch)
    only = pinned(call.constraints or {}) if call.recipe is None else _given(call.recipe)
    if runtime is None and base.precision == "f8":
        raise NotAvailableError(
            "precision='f8' has no program that compile runs. Plan with precision='bf16' or 'f16', the model's own; "
            "runtime='megatron' prices f8."
        )
    if runtime is None:
        has_masters = narrow_dtype(model, base.precision) is not None
        runtime = own_runtime(cluster, base.precision, has_masters=has_masters)
        runtime = replace(runtime, frozen_masters=has_masters and has_frozen_masters(model))
    base = replace(base, runtime=runtime)
    is_ours = call.runtime is None
    priced = priced_model(model, call.example_inputs, call.loss_fn, base.precision, whole_experts=is_ours)
    problem = problem_of(priced.counted, cluster, base, call.memory_budget, only)
    problem = replace(problem, runs=is_ours)
    before = None if call.previous is None else call.previous.recipe
    return RecipeSearch(call, problem, before)


def own_runtime(cluster: Cluster, precision: str, *, has_masters: bool) -> Runtime:
    """Return the runtime whose costs serve to compare recipes for `compile`.

    Final prices come from the lowered programs.

    `has_masters` says whether parameters are float32 master weights, and products run in 16 bits.
    """
    overlaps = overlap_of(cluster) is not None
    return replace(
        OURS,
        master_weights=has_masters,
        gradient_dtype="f32" if has_masters else precision,
        overlap_gradients=overlaps,
        overlap_parameters=overlaps,
        overlap_tensor=overlaps,
    )


def _given(recipe: Recipe) -> Only:
    values = {name: getattr(recipe, name) for name in SEARCHED}
    return {name: (value,) for name, value in values.items() if value is not None}


def problem_of(
    counted: CountedModel, cluster: Cluster, base: Execution, memory_budget: int | None, pinned: Only
) -> RecipeProblem:
    """Return the search problem over recipes of a model.

    Args:
        base: an execution with the fields that all recipes share, such as the batch.
        memory_budget: bytes on each device; None: the device's memory, less the memory that libraries take.
        pinned: the allowed values of recipe fields.
    """
    limit = room_bytes(cluster.device, _AXES if cluster.size > 1 else 0) if memory_budget is None else memory_budget
    return RecipeProblem(counted, cluster, base, limit, pinned=pinned)


def base_recipe(
    model: nn.Module, optimizer: str | torch.optim.Optimizer | None, precision: str | None, global_batch: int
) -> Execution:
    """Return an execution with the batch, precision and optimizer that all searched recipes of a call share."""
    return Execution(
        global_batch=global_batch, precision=products_precision(model, precision), optimizer=optimizer_name(optimizer)
    )


_OWN = {torch.bfloat16: ("bf16", "f8"), torch.float16: ("f16", "f8"), torch.float32: ("f32",)}
"""Dtype of a model's parameters → the precisions of its products, the usual precision first."""


def products_precision(model: nn.Module, asked: str | None) -> str:
    """Return the precision in which recipes run a model's matrix products, such as "bf16".

    The result is the user's `asked` precision, or else the precision of the model's parameters.

    Raises:
        NotAvailableError: `asked` is unknown, or a model with these parameters does not run in this precision.
    """
    narrow = narrow_dtype(model, asked)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtypes = dtypes if narrow is None else {narrow}
    known = [_OWN.get(dtype, ()) for dtype in dtypes]
    if asked is not None and not any(asked in names for names in _OWN.values()):
        raise NotAvailableError(f"precision={asked!r} is unknown; use 'bf16', 'f16', 'f8' or 'f32'.")
    common = [name for name in (known[0] if known else ()) if all(name in each for each in known)]
    if not common or (asked is not None and asked not in common):
        raise NotAvailableError(
            f"precision={asked!r} cannot be planned with global_batch= for a model with parameters of "
            f"{', '.join(sorted(map(str, dtypes)))}: a recipe's products run in the model's own dtype, in f8 where it "
            "has 16 bits, and in 16 bits or f8 where the others are float32. Pass precision='bf16', or cast the model "
            "first: model.bfloat16()."
        )
    return asked or common[0]


def optimizer_name(given: str | torch.optim.Optimizer | None) -> str:
    """Return the name of an optimizer in recipes, such as "sgd_momentum".

    Raises:
        NotAvailableError: recipes have no name for the optimizer.
    """
    name = given.lower() if isinstance(given, str) else type(given).__name__.lower()
    if isinstance(given, torch.optim.Optimizer) and name == "sgd" and any(g["momentum"] for g in given.param_groups):
        name = "sgd_momentum"
    if name not in OPTIMIZERS:
        raise NotAvailableError(
            f"optimizer={given!r} with global_batch= or recipe=: recipes are of whole training steps, with one of "
            f"{', '.join(OPTIMIZERS)}. Pass optimizer='adamw', say."
        )
    return name


def _shortage(problem: RecipeProblem, ceiling: Ceiling) -> DoesNotFitError:
    """Return the error to raise if no recipe fits in memory.

    The message names the recipe that needs the least memory, and its three largest parts. If no recipe exists at all,
    the message names the constraint to leave out.
    """
    least = problem.smallest(ceiling=ceiling)
    kept = f" with constraints={dict(problem.pinned)!r}" if problem.pinned else ""
    if least.recipe is None:
        loose = (name for name in problem.pinned if _without(problem, name).has_recipes)
        blamed = " or ".join(f"{name!r}" for name in loose)
        advice = f"Without the constraint on {blamed} there is one." if blamed else "Change the batch, or the devices."
        if problem.pinned and not blamed and replace(problem, pinned={}).has_recipes:
            advice = "Leave out more than one of them."
        return DoesNotFitError(
            f"No recipe runs whole micro-batches of global_batch={problem.base.batch} on each of "
            f"{problem.cluster.size} devices{kept}. {advice}",
            smallest_bytes=0,
        )
    parts = predict_recipe(problem.counted, least.recipe, problem.cluster).memory_breakdown
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    return DoesNotFitError(
        f"No recipe{kept} fits in {format_bytes(problem.memory_limit)} per device: the smallest needs "
        f"{format_bytes(least.objective)}, {', '.join(f'{format_bytes(size)} of {name}' for name, size in largest)} "
        f"({least.recipe.words}). {_remedy(problem, ceiling)}",
        smallest_bytes=int(least.objective),
    )


def _remedy(problem: RecipeProblem, ceiling: Ceiling) -> str:
    """Return advice if no recipe fits: drop the constraints if a recipe then fits, or else add memory."""
    free = replace(problem, pinned={}).smallest(ceiling=ceiling) if problem.pinned else None
    if free is None or free.recipe is None or free.objective > problem.memory_limit:
        return "Use more devices, or devices with more memory."
    return f"Without constraints {format_bytes(free.objective)} would do ({free.recipe.words})."


def _without(problem: RecipeProblem, name: str) -> RecipeProblem:
    return replace(problem, pinned={other: values for other, values in problem.pinned.items() if other != name})


def _watching(show: Show) -> Watch:
    return lambda found: show(f"recipes, {found.nodes:,} sets", found.objective, found.lower_bound)
