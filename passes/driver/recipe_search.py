"""`plan(model, cluster, global_batch=...)`: the fastest recipe for a whole training step, pipelines included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.arguments import ExampleInputs, check_trains
from autoshard.errors import NotAvailableError
from autoshard.ir.answers import Explanation, Limits, WhyNot
from autoshard.ir.execution import OPTIMIZERS, Execution
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.ir.runtime import MEGATRON, TRITON, USUAL, Runtime
from cost_models.hardware import Cluster
from cost_models.memory import room_bytes
from passes.driver.pricing import narrow_dtype, price_execution, priced_model
from passes.driver.progress import Show, search_bar
from passes.recipe_search.recipe_alternatives import RecipeAlternatives
from passes.recipe_search.recipe_constraints import pinned
from passes.recipe_search.recipe_problem import RecipeProblem
from passes.recipe_search.recipe_shortage import shortage
from passes.recipe_search.recipe_space import Only
from passes.recipe_search.search_recipes import FoundRecipe, Watch
from passes.recipe_search.warm_start import known_recipe
from passes.recipes.own_runtime import own_runtime
from passes.sections.price_model import CountedModel, PricedModel
from passes.solver.search_control import Ceiling

_AXES = 3
"""Axes of more than one device that a recipe is taken to have, by which its communicators are counted."""


@dataclass(frozen=True, slots=True)
class RecipeSearch:
    """A search for the fastest recipe of a whole training step.

    Args:
        model, example_inputs, loss_fn: as of `autoshard.plan`.
        problem: what is searched.
        priced: the model, as recipes are priced.
        runtime: of another framework, whose run recipes describe; None: recipes are for `compile`.
        forecast: why the plan of any recipe of the problem would be a price alone; "": `compile` runs it.
        before: the recipe where the search begins, if any.
        time_budget_s, progress: see `autoshard.plan`.
    """

    model: nn.Module
    example_inputs: ExampleInputs
    loss_fn: Callable[..., torch.Tensor] | None
    problem: RecipeProblem
    priced: PricedModel
    runtime: Runtime | None
    forecast: str
    before: Recipe | None
    time_budget_s: float
    progress: bool | None

    def run(self) -> tuple[RecipeSearch, FoundRecipe, Mapping[str, FoundRecipe]]:
        """The fastest recipe that fits, those of the known kinds, and the search that found them.

        That is one among all recipes, where none fits of those that `compile` runs.

        Raises:
            DoesNotFitError: no recipe fits; carries the least memory that one takes.
            NotAvailableError: time ran out before any was priced.
        """
        ceiling = Ceiling.within(self.time_budget_s)
        with search_bar(self.time_budget_s, self.progress) as show:
            watch = None if show is None else _watching(show)
            known = None if self.before is None else known_recipe(self.problem, self.before, ceiling)
            found, kinds = self.problem.best_of_all(ceiling=ceiling, known=known, watch=watch)
        if found.recipe is not None:
            return self, found, kinds
        if not found.is_complete:
            raise NotAvailableError(
                f"time_budget_s={self.time_budget_s:g} ended before any recipe was priced; give the search more time."
            )
        if self.problem.runs:
            why = "of the recipes that fit and keep the constraints, none has a program yet that compile runs"
            return replace(self, problem=replace(self.problem, runs=False), forecast=why).run()
        raise shortage(self.problem, Ceiling.within(self.time_budget_s))

    def price(self, found: FoundRecipe, kinds: Mapping[str, FoundRecipe], forecast: str = "") -> Plan:
        """The plan that is the price of the recipe found.

        Args:
            found, kinds: of `run`.
            forecast: why it is a price, where that of the search is not.
        """
        assert found.recipe is not None, "a recipe was found"
        problem = self.problem
        chosen = price_execution(self.model, problem.cluster, found.recipe, self.example_inputs, self.loss_fn)
        return replace(
            chosen,
            runtime=MEGATRON if self.runtime is None else self.runtime.name,
            objective=found.objective,
            lower_bound=found.lower_bound,
            search_time_s=found.search_time_s,
            was_interrupted=found.was_interrupted,
            was_cut=found.was_cut,
            memory_budget=int(problem.memory_limit),
            baselines={
                name: each.objective if each.recipe else None
                for name, each in kinds.items()
                if each.recipe or each.is_complete
            },
            alternatives=RecipeAlternatives(problem, self.priced, self.time_budget_s),
            forecast=self.forecast or forecast,
        )


@dataclass(frozen=True)
class RecipeAnswers:
    """Answers questions about a plan in stages by the price of its recipe. Prices nothing until it is asked.

    Args:
        search: for recipes.
        found: the recipe that the plan was planned from.
    """

    search: RecipeSearch
    found: FoundRecipe

    @cached_property
    def priced(self) -> Plan:
        """The price of the recipe, which stands beside other recipes."""
        return self.search.price(self.found, {})

    def why_not(self, plan: Plan, feature: str) -> WhyNot:
        """See `Plan.why_not`."""
        return self.priced.why_not(feature)

    def limits(self, plan: Plan) -> Limits:
        """See `Plan.limits`."""
        return self.priced.limits()

    def explain(self, plan: Plan, name: str) -> Explanation:
        """See `Plan.explain`."""
        return self.priced.explain(name)


def recipe_search(
    model: nn.Module,
    cluster: Cluster,
    *,
    example_inputs: ExampleInputs,
    optimizer: str | torch.optim.Optimizer | None,
    global_batch: int,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    constraints: Mapping[str, object] | None = None,
    memory_budget: int | None = None,
    precision: str | None = None,
    with_kernels: bool = False,
    runtime: Runtime | None = None,
    previous: Plan | None = None,
    time_budget_s: float = 60.0,
    progress: bool | None = None,
) -> RecipeSearch:
    """The search for the fastest recipe; see `autoshard.plan` for the arguments.

    `with_kernels`: recipes run our own kernels, see `Runtime.kernels`; `runtime`: None for our own.

    Raises:
        RecipeError: a constraint that names no field of recipes, or no value of one.
        NotAvailableError: an optimizer or precision that recipes do not have, or a constraint on a value's spec.
    """
    check_trains(model, optimizer)
    base = base_recipe(model, optimizer, precision, global_batch)
    only = pinned(constraints or {})
    forecast = "" if runtime is not None else _only_priced(optimizer, base)
    if runtime is None and not forecast:
        has_masters = narrow_dtype(model, base.precision) is not None
        base = replace(base, runtime=_of_compile(cluster, has_masters=has_masters, with_kernels=with_kernels))
    else:
        executes = runtime or replace(USUAL, master_weights=base.precision != "f32")
        base = replace(base, runtime=replace(executes, kernels=TRITON) if with_kernels else executes)
    priced = priced_model(model, example_inputs, loss_fn, base.precision)
    problem = problem_of(priced.counted, cluster, base, memory_budget, only)
    problem = replace(problem, runs=runtime is None and not forecast)
    before = None if previous is None else previous.recipe
    return RecipeSearch(
        *(model, example_inputs, loss_fn, problem, priced, runtime, forecast, before, time_budget_s, progress)
    )


def _of_compile(cluster: Cluster, *, has_masters: bool, with_kernels: bool) -> Runtime:
    """The runtime of `compile` on a cluster; `has_masters`: parameters are wider than what products read."""
    own = own_runtime(cluster)
    if not with_kernels:
        return replace(own, master_weights=has_masters)
    return replace(own, master_weights=has_masters, fused=True, kernels=TRITON)


def _only_priced(optimizer: str | torch.optim.Optimizer | None, base: Execution) -> str:
    """Why no recipe of a search could have a plan that `compile` runs; "" where recipes may."""
    if base.precision == "f8":
        return "precision='f8' has no program yet that compile runs"
    if optimizer == "sgd_momentum":
        return "optimizer='sgd_momentum' has no learning rate to plan with; pass torch.optim.SGD(..., momentum=0.9)"
    return ""


@dataclass(frozen=True, slots=True)
class RecipeForecast:
    """What recipes say of what plans of specs cannot do: `Plan.why_not("pipeline")`. Traces nothing until it is asked.

    Args:
        model, example_inputs, loss_fn, optimizer: of the plan.
        cluster: whose devices it is for.
        constrained: whether it keeps constraints on specs, which no recipe does.
        with_kernels: see `recipe_search`.
        time_budget_s: seconds of each search.
    """

    model: nn.Module
    cluster: Cluster
    example_inputs: ExampleInputs
    loss_fn: Callable[..., torch.Tensor] | None
    optimizer: str | torch.optim.Optimizer | None
    constrained: bool
    with_kernels: bool
    time_budget_s: float

    def __call__(self, plan: Plan, feature: str) -> WhyNot:
        """The fastest recipes with a feature beside the fastest without, within the plan's memory, for its batch.

        Raises:
            NotAvailableError: there is no optimizer, there are constraints, or inputs have no batch: says what to call.
        """
        question = f"why_not({feature!r}): plans of specs, as this one, have no such choice, and recipes, which do,"
        if self.optimizer is None:
            raise NotAvailableError(
                f"{question} are of whole training steps: plan with optimizer='adamw', say, and ask that plan."
            )
        if self.constrained:
            raise NotAvailableError(
                f"{question} keep no constraints on specs: plan without constraints= and ask that plan, or plan with "
                "global_batch=."
            )
        precision = None if narrow_dtype(self.model, plan.precision) is None else plan.precision
        base = base_recipe(self.model, self.optimizer, precision, _batch_of(self.example_inputs, question))
        has_masters = plan.precision is not None and base.precision != "f32"
        runtime = _of_compile(self.cluster, has_masters=has_masters, with_kernels=self.with_kernels)
        base = replace(base, runtime=runtime)
        priced = priced_model(self.model, self.example_inputs, self.loss_fn, base.precision)
        problem = problem_of(priced.counted, self.cluster, base, plan.memory_budget, {})
        return RecipeAlternatives(problem, priced, self.time_budget_s).forecast(plan, feature)


def _batch_of(example_inputs: ExampleInputs, question: str) -> int:
    """Sequences of the inputs: their first dim, which all have in common."""
    leaves = [leaf for leaf in pytree.tree_leaves(example_inputs) if isinstance(leaf, torch.Tensor)]
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    size = next(iter(sizes), None)
    if len(sizes) != 1 or size is None:
        raise NotAvailableError(
            f"{question} take the first dim of every input for the batch; those of these inputs differ: "
            f"{[list(leaf.shape) for leaf in leaves]}. Plan with inputs that have it in common."
        )
    return size


def problem_of(
    counted: CountedModel, cluster: Cluster, base: Execution, memory_budget: int | None, pinned: Only
) -> RecipeProblem:
    """The search for a model's recipe, within so many bytes of each device; None: its own."""
    limit = room_bytes(cluster.device, _AXES if cluster.size > 1 else 0) if memory_budget is None else memory_budget
    return RecipeProblem(counted, cluster, base, limit, pinned=pinned)


def recipe_problem(
    model: nn.Module,
    cluster: Cluster,
    base: Execution,
    *,
    example_inputs: ExampleInputs,
    memory_limit: float,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    pinned: Only | None = None,
) -> RecipeProblem:
    """The search for a model's recipe: its `best(fixed={"pipeline": 8})` is the fastest with a field fixed."""
    counted = priced_model(model, example_inputs, loss_fn, base.precision).counted
    return RecipeProblem(counted, cluster, base, memory_limit, pinned=pinned or {})


def base_recipe(
    model: nn.Module, optimizer: str | torch.optim.Optimizer | None, precision: str | None, global_batch: int
) -> Execution:
    """The fixed part of searched recipes, as a call of `plan` gives it."""
    return Execution(
        global_batch=global_batch, precision=products_precision(model, precision), optimizer=optimizer_name(optimizer)
    )


_OWN = {torch.bfloat16: ("bf16", "f8"), torch.float16: ("f16", "f8"), torch.float32: ("f32",)}
"""In which precisions a model of a dtype is priced, its own first."""


def products_precision(model: nn.Module, asked: str | None) -> str:
    """The precision of a model's products in recipes; `asked` None: the model's own.

    Raises:
        NotAvailableError: a model of its types has no such products.
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
            "has 16 bits, and in 16 bits or f8 where all are float32. Cast the model first: model.bfloat16()."
        )
    return asked or common[0]


def optimizer_name(given: str | torch.optim.Optimizer | None) -> str:
    """What recipes call an optimizer. Raises NotAvailableError for one that they do not have."""
    name = given.lower() if isinstance(given, str) else type(given).__name__.lower()
    if isinstance(given, torch.optim.Optimizer) and name == "sgd" and any(g["momentum"] for g in given.param_groups):
        name = "sgd_momentum"
    if name not in OPTIMIZERS:
        raise NotAvailableError(
            f"optimizer={given!r} with global_batch= or recipe=: recipes are of whole training steps, with one of "
            f"{', '.join(OPTIMIZERS)}. Pass optimizer='adamw', say."
        )
    return name


def _watching(show: Show) -> Watch:
    return lambda found: show(f"recipes, {found.nodes:,} sets", found.objective, found.lower_bound)
