"""Executions: what a price is of. A complete recipe, the runtime that executes it, and what is trained."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from autoshard.errors import RecipeError
from autoshard.ir.recipe import SEARCHED, Recipe, check_choice, check_count, check_field
from autoshard.ir.runtime import USUAL, Runtime

PRECISIONS = ("bf16", "f16", "f8", "f32")
OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "adamw")
_OF_RECIPES = tuple(item.name for item in fields(Recipe))


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution(Recipe):
    """A recipe with all else that its price depends on; its own fields are complete.

    Args:
        runtime: what executes it.
        optimizer: "adamw", ...: whose state takes memory and bandwidth.
        precision: of matrix products inside blocks: "bf16", "f16", "f8" or "f32".
        global_batch: sequences of a step, over all replicas; None: one micro-batch for each.

    Raises:
        RecipeError: as of `Recipe`; or replicas cannot run whole micro-batches.

    Example:
        >>> Execution(data=8, tensor=8, pipeline=2, micro_batch=1, global_batch=64).micro_batches
        8
    """

    runtime: Runtime = USUAL
    optimizer: str = "adamw"
    precision: str = "bf16"
    global_batch: int | None = None

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        if not self.is_complete:
            for name in SEARCHED:
                check_field(name, getattr(self, name))
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        if self.global_batch is not None:
            check_count("global_batch", self.global_batch)
        each = self.micro_batch * self.data
        if self.batch % each:
            raise RecipeError(
                f"global_batch={self.global_batch} is no multiple of micro_batch={self.micro_batch} x "
                f"data={self.data}: each replica must run whole micro-batches. The next multiple is "
                f"{(self.batch // each + 1) * each}."
            )

    @property
    def recipe(self) -> Recipe:
        """The recipe alone."""
        return Recipe(**{name: getattr(self, name) for name in _OF_RECIPES})

    def of(self, recipe: Recipe) -> Execution:
        """The same of another recipe."""
        return replace(self, **{name: getattr(recipe, name) for name in _OF_RECIPES})

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.micro_batch * self.data if self.global_batch is None else self.global_batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each replica runs in a step."""
        return self.batch // (self.micro_batch * self.data)

    @property
    def reduces_each(self) -> bool:
        """Whether each micro-batch's gradients are reduced at once, as a rank keeps its shard of the sum only."""
        return self.zero == 3 or (self.zero == 2 and self.micro_batches > 1)

    @property
    def gathers_once(self) -> bool:
        """Whether a micro-batch's backward reads what ZeRO-3 gathered for its forward."""
        return self.runtime.compiled and self.recompute != "full"

    @property
    def reduces_late(self) -> bool:
        """Whether gradients are summed over micro-batches, and the sum is reduced beside the update."""
        return self.runtime.compiled and self.micro_batches > 1 and not self.reduces_each

    def _batch_words(self) -> str:
        return f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} of {self.micro_batch}"
