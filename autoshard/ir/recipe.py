"""Recipes: layouts of a training run in the words of Megatron-LM, DeepSpeed and FSDP.

`autoshard.plan` restricts its search by a recipe. `autoshard.price` turns a complete recipe into constraints on a
traced program. A `Runtime` says how a framework runs the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter

from autoshard.errors import RecipeError
from cost_models.schedule_orders import SCHEDULES, usual_schedule

RECOMPUTE = ("none", "selective", "full")
OFFLOADS = ("none", "activations", "optimizer", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The layout of a training step in the words of Megatron-LM, DeepSpeed and FSDP.

    Every field is None by default. `autoshard.plan` and `autoshard.compile` search the fields that are None. On a mesh,
    a size that is given must equal the size of its axis, which is named below. `autoshard.price` searches nothing and
    replaces None. It takes all remaining devices for `data`, 1 for other sizes, 0 for `zero`, False for flags and
    "none" for texts.

    Args:
        data: data-parallel ranks, which split the batch; FSDP's shards count among them. Axes "replica", "data" and
            "expert" together.
        zero: ZeRO stage over `data` x `context`. Stage 0 shards nothing, 1 the optimizer state, 2 gradients too, 3
            parameters too.
        zero_group: ranks over which ZeRO shards, for hybrid sharding (HSDP). On a mesh, a value needs an axis "data" of
            this size, and an axis "replica" for the copies. None: all of `data` x `context`.
        tensor: ranks of tensor parallelism, which split heads, hidden units and the vocabulary. Axis "model".
        sequence_parallel: whether `tensor` splits activations along the sequence, outside the regions of tensor
            parallelism.
        context: ranks of context parallelism, which split the sequence in all layers, attention included. Axis
            "context".
        expert: ranks of expert parallelism, each with some of the experts. They are ranks of `data` x `context` x
            `tensor` / `expert_tensor`, and add no devices. `compile` runs only divisors of `data`. Axis "expert".
        expert_tensor: ranks among `tensor` that split each expert; a divisor of `tensor`. `compile` runs only 1 and
            `tensor`.
        pipeline: ranks of the pipeline, each with `virtual_stages` stages. Axis "pipeline", whose size replaces None.
        virtual_stages: pipeline stages on each pipeline rank. None on a mesh: the fewest that the schedule takes.
        schedule: name of the pipeline schedule, such as "1F1B" or "ZBVZeroBubble". All names are in
            docs/tutorials/pipelines_and_experts.md. None on a mesh: "1F1B", or "Interleaved1F1B" with several virtual
            stages.
        stage_layers: number of blocks in each stage, in the order of the forward. There are `pipeline` x
            `virtual_stages` entries. None balances the stages.
        micro_batch: samples that each of the `data` ranks computes in one forward. A step on a batch has batch /
            (`data` x `micro_batch`) micro-batches.
        recompute: activations that the backward computes again. "none"; "selective", the core of attention, which
            `compile` refuses; "full", all activations in blocks.
        offload: tensors that wait in host memory. "none"; "activations", those that blocks save for the backward;
            "optimizer", the optimizer state; "parameters", parameters and optimizer state. `compile` and `price` both
            refuse the last two. `compile` takes "activations" only with `recompute`.

    Raises:
        RecipeError: a field is out of range, or two fields contradict each other. The message names the fields.

    Example:
        >>> Recipe(data=8, tensor=8, pipeline=2).devices
        128
    """

    data: int | None = None
    zero: int | None = None
    zero_group: int | None = None
    tensor: int | None = None
    sequence_parallel: bool | None = None
    context: int | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    pipeline: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    stage_layers: Sequence[int] | None = None
    micro_batch: int | None = None
    recompute: str | None = None
    offload: str | None = None

    def __post_init__(self) -> None:
        for name, value in zip(_COUNTS, _counts_of(self), strict=True):
            if value is not None:
                check_count(name, value)
        try:
            _check_kinds(*_kinds_of(self))
        except TypeError:  # a value cannot be hashed
            _check_kinds.__wrapped__(*_kinds_of(self))
        self._check_axes()
        self._check_stages()

    @property
    def is_complete(self) -> bool:
        """Whether all fields but the optional `zero_group`, `schedule` and `stage_layers` are given."""
        return None not in _decided_of(self)

    @property
    def of_stage(self) -> Recipe:
        """The same recipe with `pipeline=1`: the layout of a single stage on the mesh axes other than the pipeline."""
        return replace(self, pipeline=1, schedule=None, virtual_stages=1, stage_layers=None)

    @property
    def devices(self) -> int:
        """Number of devices: pipeline x data x context x tensor, where a field that is None counts 1."""
        return math.prod(size or 1 for size in (self.pipeline, self.data, self.context, self.tensor))

    @property
    def words(self) -> str:
        """The recipe as a line of text for people.

        Example:
            >>> Recipe(data=4, zero=1, recompute="none").words
            "data=4, zero=1, recompute='none'; all else is searched"
        """
        if not self.is_complete:
            return self._partial_words()
        axes = [f"data {self.data}{self._sharding_words()}"]
        if is_several(self.tensor):
            axes.append(f"tensor {self.tensor}" + (" with sequence parallelism" if self.sequence_parallel else ""))
        if is_several(self.context):
            axes.append(f"context {self.context}")
        if is_several(self.expert):
            axes.append(f"expert {self.expert}" + (" x tensor" if is_several(self.expert_tensor) else ""))
        if is_several(self.pipeline):
            stages = f", {self.virtual_stages} stages a rank" if is_several(self.virtual_stages) else ""
            ends = ""
            if self.stage_layers is not None:
                ends = f", of {'+'.join(map(str, self.stage_layers))} blocks"
            axes.append(f"pipeline {self.pipeline} ({named_schedule(self)}{stages}{ends})")
        again = {"selective": "; attention's core computed again", "full": "; blocks computed again"}
        host = "; activations on the host" if self.offload == "activations" else ""
        return f"{', '.join(axes)}; {self._batch_words()}{again.get(self.recompute or '', '')}{host}"

    def _batch_words(self) -> str:
        return f"micro-batches of {self.micro_batch}"

    def _partial_words(self) -> str:
        """Return the given fields as text, and the names of the free fields if there are at most `_NAMED`."""
        given = {item.name: getattr(self, item.name) for item in fields(Recipe)}
        said = [
            f"{name}={value!r}"
            for name, value in given.items()
            if value is not None and not (name in _OF_EXPERTS_AND_STAGES and value == 1)
        ]
        free = [name for name in DECIDED if given[name] is None]
        if not said:
            return "everything is searched"
        rest = f"searched: {', '.join(free)}" if len(free) <= _NAMED else "all else is searched"
        return f"{', '.join(said)}; {rest}"

    def _sharding_words(self) -> str:
        is_whole = self.zero_group in (None, (self.data or 1) * (self.context or 1))
        group = "" if is_whole else f" in groups of {self.zero_group}"
        return f" (ZeRO-{self.zero}{group})" if self.zero else ""

    @property
    def without_program(self) -> str:
        """The first field that `compile` cannot run yet, with its value; "" if `compile` can run the recipe.

        Example:
            >>> Recipe(recompute="selective").without_program
            "recompute='selective'"
        """
        has_experts, has_groups = is_several(self.expert), self.zero_group is not None
        refused = {
            f"expert={self.expert} with data={self.data}": has_experts and (self.data or 0) % (self.expert or 1) != 0,
            f"expert={self.expert} with zero_group={self.zero_group}": has_experts and has_groups,
            f"expert_tensor={self.expert_tensor} with tensor={self.tensor}": (
                self.expert_tensor not in (None, 1, self.tensor)
            ),
            f"recompute={self.recompute!r}": self.recompute == "selective",
            f"offload={self.offload!r}": self.offload in ("optimizer", "parameters"),
            "offload='activations' with recompute=None": self.offload == "activations" and self.recompute is None,
            f"zero_group={self.zero_group} with context={self.context}": has_groups and self.context not in (None, 1),
        }
        return next((words for words, is_asked in refused.items() if is_asked), "")

    def _check_axes(self) -> None:
        tensor, pieces, group = self.tensor, self.expert_tensor, self.zero_group
        replicas = None if self.data is None or self.context is None else self.data * self.context
        if self.sequence_parallel and tensor == 1:
            raise RecipeError("sequence_parallel=True splits activations over the tensor axis, but tensor=1.")
        if tensor is not None and pieces is not None:
            if tensor % pieces:
                raise RecipeError(f"expert_tensor={pieces} must divide tensor={tensor}.")
            if replicas is not None and self.expert is not None and replicas * tensor // pieces % self.expert:
                raise RecipeError(
                    f"expert={self.expert} must divide data={self.data} x context={self.context} x tensor={tensor} / "
                    f"expert_tensor={pieces}: experts are shared out among the ranks of a pipeline stage."
                )
        if group is not None and replicas is not None and replicas % group:
            raise RecipeError(
                f"zero_group={group} must divide data={self.data} x context={self.context}, over which ZeRO shards."
            )
        if self.offload in ("optimizer", "parameters") and self.zero == 0:
            raise RecipeError(f"offload={self.offload!r} needs zero of at least 1: ZeRO's shard goes to the host.")

    def _check_stages(self) -> None:
        if is_several(self.virtual_stages) and self.pipeline == 1:
            raise RecipeError(f"virtual_stages={self.virtual_stages} needs a pipeline, but pipeline=1.")
        if self.schedule is not None and self.pipeline == 1:
            raise RecipeError(f"schedule={self.schedule!r} needs a pipeline, but pipeline=1.")
        each = least_stages(self)
        refusal = SCHEDULES[named_schedule(self)].refusal_of_stages(each)
        if refusal is not None:
            raise RecipeError(f"schedule={self.schedule!r} {refusal}.")
        if self.stage_layers is None:
            return
        object.__setattr__(self, "stage_layers", _stage_layers(self.stage_layers))
        if not all(type(count) is int and count >= 0 for count in self.stage_layers):
            raise RecipeError(f"stage_layers={self.stage_layers!r} must be whole numbers of at least 0, one a stage.")
        if self.pipeline is not None and len(self.stage_layers) != self.pipeline * each:
            raise RecipeError(
                f"stage_layers has {len(self.stage_layers)} entries, but there are pipeline={self.pipeline} x "
                f"virtual_stages={each} = {self.pipeline * each} stages."
            )


def is_several(size: int | None) -> bool:
    """Whether a field of a recipe is given and exceeds one."""
    return size is not None and size > 1


def named_schedule(recipe: Recipe) -> str:
    """Return the name of the recipe's pipeline schedule.

    For `schedule=None`, the result is the usual schedule with the recipe's `virtual_stages`.
    """
    return recipe.schedule or usual_schedule(recipe.virtual_stages or 1)


def least_stages(recipe: Recipe) -> int:
    """Return the stages on each pipeline rank: `virtual_stages`, or the schedule's minimum for None."""
    return recipe.virtual_stages or SCHEDULES[named_schedule(recipe)].least_stages


_COUNTS = (
    *("data", "tensor", "context", "expert", "expert_tensor", "pipeline", "virtual_stages", "micro_batch"),
    "zero_group",
)
_CHOICES: dict[str, tuple[object, ...]] = {
    "zero": (0, 1, 2, 3),
    "schedule": (None, *SCHEDULES),
    "recompute": RECOMPUTE,
    "offload": OFFLOADS,
}
_OPTIONAL = ("zero_group",)
_FLAGS = ("sequence_parallel",)
_OF_EXPERTS_AND_STAGES = ("expert", "expert_tensor", "pipeline", "virtual_stages")
DECIDED = tuple(item.name for item in fields(Recipe) if item.name not in ("zero_group", "schedule", "stage_layers"))
"""Names of the fields that have a value in every complete recipe."""

_NAMED = 4
"""`words` lists the free fields if there are at most this many."""

_counts_of = attrgetter(*_COUNTS)
_kinds_of = attrgetter(*_CHOICES, *_FLAGS)
_decided_of = attrgetter(*DECIDED)


@lru_cache(maxsize=1024, typed=True)
def _check_kinds(*values: object) -> None:
    """Check the values of the fields in `_CHOICES` and `_FLAGS`, given in this order; None is allowed.

    Raises `RecipeError` for an invalid value. Calls are cached, because a search checks the same values many times.
    """
    for name, value in zip((*_CHOICES, *_FLAGS), values, strict=True):
        if value is not None:
            check_field(name, value)


def check_field(name: str, value: object) -> None:
    """Check one field of a recipe regardless of the other fields. Raises `RecipeError` if the value is invalid."""
    if name in _COUNTS and not (value is None and name in _OPTIONAL):
        check_count(name, value)
    if name in _CHOICES:
        check_choice(name, value, _CHOICES[name])
    if name in _FLAGS:
        check_flag(name, value)


def _stage_layers(given: object) -> tuple[object, ...]:
    if not isinstance(given, Iterable):
        raise RecipeError(f"stage_layers={given!r} is a {type(given).__name__}; pass a tuple of whole numbers.")
    return tuple(given)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise `RecipeError` for a value outside `choices` (texts, numbers and None). True and 1.0 do not count as 1."""
    if not isinstance(value, str | int | None) or isinstance(value, bool) or value not in choices:
        raise RecipeError(f"{name}={value!r} is unknown; use one of {', '.join(map(str, choices))}.")


def check_flag(name: str, value: object) -> None:
    """Raise `RecipeError` for a value other than True and False."""
    if not isinstance(value, bool):
        raise RecipeError(f"{name}={value!r} must be True or False.")


_MAX_BITS = 63


def check_count(name: str, value: object) -> None:
    """Raise `RecipeError` for a value that is no whole number from 1 to 2**63 - 1."""
    if type(value) is not int or value < 1:
        raise RecipeError(f"{name}={value!r} must be a whole number of at least 1.")
    if value.bit_length() > _MAX_BITS:
        raise RecipeError(f"{name} is a number of {value.bit_length()} bits; pass at most {_MAX_BITS} bits.")
