"""Executions: complete recipes, each with its runtime and all other settings that a price depends on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from autoshard.errors import RecipeError
from autoshard.ir.recipe import DECIDED, Recipe, check_choice, check_count, check_field, least_stages, named_schedule
from autoshard.ir.runtime import USUAL, Runtime

PRECISIONS = ("bf16", "f16", "f8", "f32")
OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "adamw")
_OF_RECIPES = tuple(item.name for item in fields(Recipe))


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution(Recipe):
    """A complete recipe with its runtime and all other settings that its price depends on. Each field has a default.

    Args:
        runtime: the framework that executes the recipe.
        optimizer: "sgd", "sgd_momentum", "adam" or "adamw"; its state takes memory and bandwidth.
        precision: type of matrix products inside blocks: "bf16", "f16", "f8" or "f32".
        global_batch: sequences of a step, over all replicas; None: one micro-batch for each replica.

    Raises:
        RecipeError: a field is invalid, or `global_batch` is no multiple of `micro_batch` x `data`, or `expert` does
            not divide `data` and the runtime has no `folded_experts`.

    Example:
        >>> Execution(data=8, tensor=8, pipeline=2, micro_batch=1, global_batch=64).micro_batches
        8
    """

    data: int = 1
    zero: int = 0
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    offload: str = "none"
    runtime: Runtime = USUAL
    optimizer: str = "adamw"
    precision: str = "bf16"
    global_batch: int | None = None

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        if not self.is_complete:
            for name in DECIDED:
                check_field(name, getattr(self, name))
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        if self.global_batch is not None:
            check_count("global_batch", self.global_batch)
        if not self.runtime.folded_experts and self.data % self.expert:
            raise RecipeError(
                f"expert={self.expert} must divide data={self.data}: with runtime={self.runtime.name!r} the ranks of "
                "an expert group differ in their data alone. Use fewer expert ranks or more data ranks."
            )
        each = self.micro_batch * self.data
        if self.batch % each:
            raise RecipeError(
                f"global_batch={self.global_batch} is no multiple of micro_batch={self.micro_batch} x "
                f"data={self.data}: each replica must run whole micro-batches. The next multiple is "
                f"{(self.batch // each + 1) * each}."
            )

    @property
    def recipe(self) -> Recipe:
        """The recipe alone, without the runtime and the further settings."""
        return Recipe(**{name: getattr(self, name) for name in _OF_RECIPES})

    def of(self, recipe: Recipe) -> Execution:
        """Return an execution of another recipe, `recipe`, with the runtime and the settings of this execution.

        A field that is None in `recipe` gets a plain value: size 1, `zero` 0, no recomputation, no offload.
        `virtual_stages` becomes the smallest number that the schedule takes.
        """
        given = {name: getattr(recipe, name) for name in _OF_RECIPES}
        given = {name: _PLAIN[name] if value is None else value for name, value in given.items()}
        return replace(self, **{**given, "virtual_stages": least_stages(recipe)})

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters without ZeRO: data x context."""
        return self.data * self.context

    @property
    def expert_ranks(self) -> int:
        """Number of ranks of a pipeline stage that share out the experts, or pieces of experts (`expert_tensor`)."""
        return self.replicas * self.tensor // self.expert_tensor

    @property
    def stages(self) -> int:
        """Number of stages on all pipeline ranks together: pipeline x virtual_stages."""
        return self.pipeline * self.virtual_stages

    @property
    def chosen_schedule(self) -> str:
        """Name of the pipeline's schedule; for `schedule=None`, the usual schedule with these virtual stages."""
        return named_schedule(self)

    @property
    def batch(self) -> int:
        """Number of sequences in a step, over all replicas."""
        return self.micro_batch * self.data if self.global_batch is None else self.global_batch

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that each replica runs in a step."""
        return self.batch // (self.micro_batch * self.data)

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced after each micro-batch, because a rank keeps only its shard of their sum."""
        return self.zero == 3 or (self.zero == 2 and self.micro_batches > 1)

    def _batch_words(self) -> str:
        return f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} of {self.micro_batch}"


_PLAIN = {item.name: item.default for item in fields(Execution) if item.name in _OF_RECIPES}
"""Name of a field of `Recipe` → the plain value that replaces None."""
