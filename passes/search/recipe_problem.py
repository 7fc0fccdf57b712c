"""Search the fastest recipe of a model on a cluster, and of each known kind (FSDP, Megatron TP+SP)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.errors import RecipeError
from autoshard.ir.execution import Execution
from autoshard.ir.recipe import Recipe
from cost_models.errors import CostModelError
from cost_models.hardware import Cluster
from passes.search.layers.price_model import CountedModel
from passes.search.recipe_pricer import RecipePricer
from passes.search.recipe_space import Only, RecipeSpace, keeps
from passes.search.search_recipes import NOTHING, FoundRecipe, Watch, search_recipes
from passes.solver.search_control import Ceiling

NO_BLOCKS = "the model has no list of blocks; stages, recomputation and offload take whole blocks"
NO_HOST_LINK = "the device's data have no host link"
"""Reasons why no recipe of a model has a feature."""


@dataclass
class RecipeProblem:
    """The problem of finding the fastest recipe of a model on a cluster, of which all devices are used.

    Args:
        base: an execution with the global batch and all fields that are not in `recipe_space.SEARCHED`.
        memory_limit: bytes of a device that recipes may take.
        least_tokens: the smallest number of tokens of a sequence on a context rank.
        pinned: searched field → its allowed values in every search (`recipe_constraints`). Pinned tensor ranks may
            exceed a node, and `least_tokens` does not apply to pinned context ranks.
        runs: whether to search only recipes whose programs `compile` can run.
    """

    counted: CountedModel
    cluster: Cluster
    base: Execution
    memory_limit: float
    least_tokens: int = 128
    pinned: Only = field(default_factory=dict)
    runs: bool = False

    @cached_property
    def pricer(self) -> RecipePricer:
        """The prices that all searches of the problem share."""
        return RecipePricer(self.counted, self.cluster)

    @cached_property
    def kinds(self) -> dict[str, Only]:
        """The kinds of `known_kinds` that have any recipe in this problem: name → the restriction that defines it."""
        known = known_kinds(self.cluster, has_experts=self.counted.has_experts)
        return {name: only for name, only in known.items() if any(True for _ in self.space(only).recipes())}

    def within(self, memory_limit: float) -> RecipeProblem:
        """Return this problem with another memory limit, in bytes of a device. Both problems share their prices."""
        other = replace(self, memory_limit=memory_limit)
        other.pricer = self.pricer
        return other

    def best(
        self,
        *,
        only: Only | None = None,
        ceiling: Ceiling | None = None,
        known: Execution | None = None,
        watch: Watch | None = None,
    ) -> FoundRecipe:
        """Return the fastest recipe that fits.

        Args:
            only: searched field → its allowed values, such as `{"pipeline": range(2, 65)}`.
            ceiling, known, watch: arguments of `search_recipes`.

        Raises:
            RecipeError: a restricted field is not searched.
        """
        return search_recipes(
            self.space(only), self.pricer, self.memory_limit, ceiling=ceiling, known=known, watch=watch
        )

    def smallest(self, *, only: Only | None = None, ceiling: Ceiling | None = None) -> FoundRecipe:
        """Return the recipe with the least peak memory, whatever `memory_limit` is.

        The `objective` of the result is in bytes. The arguments are those of `best`.
        """
        return search_recipes(self.space(only), self.pricer, math.inf, smallest=True, ceiling=ceiling)

    def proposals(self, only: Only, ceiling: Ceiling) -> list[FoundRecipe]:
        """Return the fastest recipe that `only` allows, then the fastest recipe of each known kind that `only` allows.

        `only` has the allowed values of searched fields. A known kind that contradicts these values is left out.
        """
        kinds = [both for kind in self.kinds.values() if all((both := _both(kind, only)).values())]
        return [self.best(only=each, ceiling=ceiling) for each in (only, *kinds)]

    def baselines(self, ceiling: Ceiling | None = None) -> dict[str, FoundRecipe]:
        """Search each known kind (`kinds`), and return its fastest recipe within the memory limit, by the kind's name.

        Ctrl-C ends the search of the present kind, and skips the later kinds. The result has the kinds searched so far.

        Raises:
            KeyboardInterrupt: Ctrl-C before any recipe was priced.
        """
        found: dict[str, FoundRecipe] = {}
        for name, only in self.kinds.items():
            try:
                each = self.best(only=only, ceiling=ceiling)
            except KeyboardInterrupt:
                if all(known.recipe is None for known in found.values()):
                    raise
                each = replace(NOTHING, was_interrupted=True)
            found[name] = each
            if each.was_interrupted:
                break
        return found

    @property
    def has_recipes(self) -> bool:
        """Whether any recipe keeps the constraints of the problem. Memory does not count."""
        return next(self.space().recipes(), None) is not None

    def missing(self, feature: str) -> str:
        """Return the reason why no recipe of the model can have a feature, or "" if a recipe may have it.

        `feature` is a name of `why_not`: "expert", "context", "pipeline", "recompute" or "offload".
        """
        if feature == "expert" and not self.counted.has_experts:
            return "the model has no experts to share out"
        if feature == "context" and not self.counted.tokens:
            return "the model's inputs are no tokens, of which ranks could share a sequence"
        if feature in ("pipeline", "recompute", "offload") and not self.counted.blocks:
            return NO_BLOCKS
        no_host = feature == "offload" and self.cluster.device.host_link is None
        return NO_HOST_LINK if no_host else ""

    def admits(self, recipe: Execution) -> bool:
        """Whether a recipe fits in memory, has the values that `pinned` allows, and can be run if `runs` is set.

        Raises:
            RecipeError: the recipe needs another number of devices than the cluster has.
        """
        runs = not (self.runs and recipe.without_program)
        return runs and keeps(recipe, self.pinned) and self.pricer.fits(recipe, self.memory_limit)

    def best_of_all(
        self, *, ceiling: Ceiling | None = None, known: Execution | None = None, watch: Watch | None = None
    ) -> tuple[FoundRecipe, dict[str, FoundRecipe]]:
        """Return the fastest recipe, and the fastest recipe of each known kind (`baselines`).

        The search begins from `known` or from the fastest recipe of a known kind, whichever is faster. The search time
        of the result includes the searches of the kinds.
        """
        start = time.monotonic()
        kinds = self.baselines(ceiling)
        parts = list(kinds.values())
        if known is not None:
            parts.append(replace(NOTHING, recipe=known, objective=self.pricer.time_s(known), priced=1))
        first = min(parts, key=lambda each: each.objective, default=NOTHING)
        if any(each.was_interrupted for each in parts):
            found = replace(first, lower_bound=0.0, is_complete=False, was_interrupted=True)
        else:
            found = self.best(known=first.recipe, ceiling=ceiling, watch=watch)
        return replace(found, search_time_s=time.monotonic() - start), kinds

    def space(self, only: Only | None = None) -> RecipeSpace:
        """Return the set of recipes to search. `only` further restricts the values of searched fields."""
        return RecipeSpace(
            self.counted,
            self.cluster.size,
            self.base,
            most_tensor=None if "tensor" in self.pinned else self.cluster.devices_per_node,
            least_tokens=1 if "context" in self.pinned else self.least_tokens,
            offloads=self.cluster.device.host_link is not None,
            only=_both({name: values for name, values in self.pinned.items() if name != "zero_group"}, only or {}),
            zero_groups=self.pinned.get("zero_group"),
            runs=self.runs,
        )


def _both(one: Only, other: Only) -> Only:
    common = {name: tuple(value for value in one[name] if value in other[name]) for name in one.keys() & other.keys()}
    return {**one, **other, **common}


def known_kinds(cluster: Cluster, *, has_experts: bool) -> dict[str, Only]:
    """Return the kinds of recipes that experts know by name, such as FSDP.

    The value is the restriction that defines a kind: searched field → its allowed values. Tensor parallel ranks stay
    within a node, as in Megatron-LM. Pipelines have Megatron-LM's schedules. HSDP shards within nodes, and equals FSDP
    on a single node.
    """
    alone: Only = dict.fromkeys(("tensor", "context", "expert", "pipeline"), (1,))
    node = cluster.devices_per_node
    inside = range(2, node + 1)
    megatron: Only = {"tensor": inside, "sequence_parallel": (True,), "context": (1,), "zero": (0, 1)}
    schedules: Only = {
        "pipeline": range(2, cluster.size + 1),
        "schedule": ("1F1B", "Interleaved1F1B"),
    }
    kinds: dict[str, Only] = {
        "data parallel": {**alone, "zero": (0,)},
        "ZeRO-1": {**alone, "zero": (1,), "zero_group": (None,)},
        "FSDP": {**alone, "zero": (3,), "zero_group": (None,)},
        "HSDP": {**alone, "zero": (3,), "zero_group": (node if cluster.nodes > 1 else None,)},
        "Megatron TP+SP": {**megatron, "pipeline": (1,), "expert": (1,), "zero_group": (None,)},
        "Megatron TP+SP+PP": {**megatron, **schedules, "expert": (1,), "zero_group": (None,)},
    }
    if has_experts:
        shared: Only = {"expert": range(2, cluster.size + 1), "context": (1,), "zero": (0, 1), "zero_group": (None,)}
        kinds["expert parallel"] = {**shared, "tensor": (1,), "pipeline": (1,)}
        kinds["expert parallel + PP"] = {**shared, **schedules, "tensor": (1,)}
    return kinds


def known_recipe(problem: RecipeProblem, before: Recipe) -> Execution | None:
    """Return `before`, the recipe of another plan, as a recipe of the problem.

    None is returned if `before` does not fit, is excluded by constraints, or suits another cluster or batch.
    """
    try:
        recipe = problem.base.of(before)
        return recipe if problem.admits(recipe) else None
    except (RecipeError, CostModelError):
        return None
