"""The set of recipes that a search goes through: every way to lay a model's step out over a cluster, each once.

A recipe is chosen in four steps, and each choice is a tuple of data:

1. A `Layout` has the sizes of `tensor`, `context`, `expert`, `expert_tensor`, and the micro-batch. It also says
   whether the tensor axis splits activations between its split products (sequence parallelism). The layout decides the
   time and memory of layer classes.
2. An `ActivationPolicy` says whether values of blocks are computed again (`recompute`), or lie on the host (`offload`).
3. A `Pipe` has the number of pipeline ranks, the schedule, the virtual stages, and the blocks of each stage. Stages
   have equal numbers of blocks, with or without counting the embedding and the head as blocks. The remaining devices
   are `data`.
4. A `Sharding` has the ZeRO stage, and the number of ranks over which ZeRO shards.

All other fields (runtime, precision, optimizer, batch) come from a given execution, `base`. Only possible recipes are
in the set:

* The product of the sizes is the number of devices, and each replica runs whole micro-batches.
* Each axis splits some dim of a block's values: heads, hidden units, experts, or the sequence.
* Each axis divides every dim that it splits. Only the vocabulary may be padded.
* There are at most `most_tensor` tensor ranks, usually the devices of a node, as in all published runs.
* A context rank has at least `least_tokens` tokens of a sequence, a tile of attention kernels.
* A pipeline has at most as many stages as blocks. The embedding and the head count where they are split off.
* The schedule allows the number of micro-batches (`cost_models.schedule_orders.admits`).
* Every stage but the first and the last has a block.

A recipe that can be written in two ways is in the set once. Sharding over all replicas is `zero_group=None`. Without an
attention core, selective recomputation is the same as none. ZeRO needs two replicas or more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from autoshard.errors import RecipeError
from autoshard.ir.execution import Execution
from autoshard.ir.recipe import RECOMPUTE, Recipe, is_several
from cost_models.schedule_orders import SCHEDULES, admits, usual_schedule
from passes.search.layers.price_model import CountedModel, RecipeKind
from passes.search.pipeline_stages import even_blocks

SEARCHED = (
    "data", "tensor", "sequence_parallel", "context", "expert", "expert_tensor", "pipeline", "schedule",
    "virtual_stages", "micro_batch", "recompute", "offload", "zero", "zero_group",
)  # fmt: skip
"""The fields of a recipe that the search chooses."""

Only = Mapping[str, Collection[object]]
"""A restriction of recipes: the allowed values of some fields, by the field's name."""


def keeps(recipe: Recipe, only: Only) -> bool:
    """Whether each field of a recipe that `only` restricts has an allowed value."""
    return all(getattr(recipe, name) in values for name, values in only.items())


class Layout(NamedTuple):
    """The split of one micro-batch on one pipeline stage: the size of each axis, and the number of sequences."""

    tensor: int
    sequence_parallel: bool
    context: int
    expert: int
    expert_tensor: int
    micro_batch: int

    @property
    def ranks(self) -> int:
        """Number of devices that run a micro-batch together on one stage."""
        return self.tensor * self.context


class ActivationPolicy(NamedTuple):
    """The choice to keep, recompute or offload a block's values after its forward. The fields are as in `Recipe`."""

    recompute: str = "none"
    offload: str = "none"


POLICIES = tuple(ActivationPolicy(recompute, offload) for offload in ("none", "activations") for recompute in RECOMPUTE)


class Pipe(NamedTuple):
    """A pipeline of `pipeline` ranks. `schedule` is None for a single rank.

    With `split_ends`, the embedding and the head count as blocks when blocks are shared out over stages.
    """

    pipeline: int = 1
    schedule: str | None = None
    virtual_stages: int = 1
    split_ends: bool = False

    @property
    def chosen_schedule(self) -> str:
        """Name of the schedule. A single rank has the usual schedule for its number of virtual stages."""
        return self.schedule or usual_schedule(self.virtual_stages)

    def stage_layers(self, blocks: int) -> tuple[int, ...] | None:
        """Return the number of blocks on each stage if `split_ends` is set.

        None stands for numbers of blocks that are as even as possible, with the embedding and the head not counted.
        """
        if not self.split_ends:
            return None
        return even_blocks(blocks, self.pipeline * self.virtual_stages, split_ends=True)

    def recipe(self, blocks: int) -> Execution:
        """Return a recipe with this pipeline, whose other fields have their defaults."""
        return Execution(
            pipeline=self.pipeline,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            stage_layers=self.stage_layers(blocks),
        )


@lru_cache(maxsize=4096)
def known_pipes(ranks: int, micro_batches: int, blocks: int, *, every: bool = False) -> tuple[Pipe, ...]:
    """Return the pipelines of `ranks` ranks whose schedule allows the number of micro-batches.

    The number of virtual stages on a rank is a power of two, or the largest possible. With `every`, it is any number.
    """
    if ranks == 1:
        return (Pipe(),)
    found: list[Pipe] = []
    for split_ends in (False, True) if blocks else ():
        most = (blocks + 2 * split_ends) // ranks
        for item in SCHEDULES.values():
            known = item.numbers_of_stages(most) if item.is_searched else ()
            found += [
                Pipe(ranks, item.name, virtual, split_ends)
                for virtual in known
                if (every or virtual == most or virtual.bit_count() == 1)
                and admits(item.name, ranks, micro_batches, virtual)
            ]
    return tuple(found)


class Sharding(NamedTuple):
    """The ZeRO stage `zero`, 0 to 3, and the number `group` of replicas over which ZeRO shards.

    A `group` of 0 means all replicas.
    """

    zero: int = 0
    group: int = 0


_GROUPS = tuple(8**power for power in range(1, 6))
"""Numbers of replicas over which ZeRO may shard, beside all replicas."""


@dataclass(frozen=True, slots=True)
class RecipeSpace:
    """The set of recipes of a model on a cluster that a search goes through.

    Args:
        devices: the number of devices of the cluster.
        base: the fields that are not searched, and the global batch. Its values of searched fields do not count.
        most_tensor: the largest number of tensor ranks; None: any number.
        least_tokens: the smallest number of tokens of a sequence on a context rank, where inputs are tokens.
        offloads: whether activations may go to the host.
        only: searched field → its allowed values. A group of all replicas is `zero_group=None`.
        zero_groups: a further restriction of `zero_group`. Here a group of all replicas may also be named by its size.
        runs: whether to have only recipes with a program that `compile` can run.

    Raises:
        RecipeError: a restricted field is not searched, or `base` has no global batch.
    """

    counted: CountedModel
    devices: int
    base: Execution
    most_tensor: int | None = None
    least_tokens: int = 1
    offloads: bool = False
    only: Only = field(default_factory=dict)
    zero_groups: Collection[object] | None = None
    runs: bool = False
    _shardings: dict[tuple[int, bool], tuple[Sharding, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        unknown = [name for name in self.only if name not in SEARCHED]
        if unknown:
            raise RecipeError(f"{unknown[0]!r} is not searched; the searched fields are {', '.join(SEARCHED)}.")
        if self.base.global_batch is None:
            raise RecipeError("A search over recipes needs their global_batch: the sequences of a step.")

    @property
    def batch(self) -> int:
        """Number of sequences in a step on all replicas together, the global batch."""
        return self.base.batch

    def layouts(self) -> Iterator[tuple[Layout, ...]]:
        """Yield tuples of layouts that differ only in the micro-batch, with the smallest micro-batch first."""
        sizes = divisors(self.devices)
        experts = sizes if self.counted.has_experts else (1,)
        tensors = [size for size in sizes if self.most_tensor is None or size <= self.most_tensor]
        tokens = self.counted.tokens or math.inf
        contexts = [size for size in sizes if size == 1 or tokens / size >= self.least_tokens]
        for tensor, context, expert in product(tensors, contexts, experts):
            for parallel, whole in product((False, True), (True, False)):
                expert_tensor = 1 if whole else tensor
                if (tensor == 1 and (parallel or not whole)) or not (self.counted.has_experts or whole):
                    continue
                first = Layout(tensor, parallel, context, expert, expert_tensor, 1)
                if self._admits(first):
                    yield tuple(first._replace(micro_batch=size) for size in self._micro_batches(first))

    def _admits(self, layout: Layout) -> bool:
        fields = ("tensor", "sequence_parallel", "context", "expert", "expert_tensor")
        if not all(self._allows(name, getattr(layout, name)) for name in fields):
            return False
        whole, left = divmod(self.devices, layout.ranks)
        if left or self._expert_ranks(layout, whole) % layout.expert:
            return False
        return _splits_evenly(self.counted, self.kind(layout), layout)

    def kind(self, layout: Layout) -> RecipeKind:
        """Return the kind of a layout's recipes: which axes exist, without their sizes."""
        return RecipeKind.of(self.base)._replace(
            tensor=layout.tensor > 1,
            sequence_parallel=layout.sequence_parallel,
            context=layout.context > 1,
            expert=layout.expert > 1,
            expert_tensor=layout.expert_tensor > 1,
        )

    def _micro_batches(self, layout: Layout) -> list[int]:
        sizes = [size for size in divisors(self.batch) if self._allows("micro_batch", size)]
        return [size for size in sizes if any(True for _ in self.pipelines(layout._replace(micro_batch=size)))]

    def pipelines(self, layout: Layout) -> Iterator[int]:
        """Yield the possible numbers of pipeline ranks for a layout, the smallest first."""
        for ranks in divisors(self.devices // layout.ranks):
            data = self.devices // layout.ranks // ranks
            allowed = self._allows("pipeline", ranks) and self._allows("data", data)
            fits = (
                self.batch % (layout.micro_batch * data) == 0 and self._expert_ranks(layout, data) % layout.expert == 0
            )
            if allowed and fits and (ranks == 1 or 0 < ranks <= len(self.counted.blocks) + 2):
                yield ranks

    def _expert_ranks(self, layout: Layout, data: int) -> int:
        """Return the number of ranks of a pipeline stage with `data` replicas over which experts may be shared out.

        With `Runtime.folded_experts` the number is that of all ranks of the stage, divided by `expert_tensor`.
        Otherwise it is `data`.
        """
        return data * layout.ranks // layout.expert_tensor if self.base.runtime.folded_experts else data

    def policies(self, layout: Layout) -> list[ActivationPolicy]:
        """Return the possible activation policies for a layout. A model without blocks keeps all values."""
        known = POLICIES if self.counted.blocks else POLICIES[:1]
        names_none = self._allows("recompute", "none") and not self.counted.has_core(self.kind(layout))
        return [
            policy
            for policy in known
            if self._allows("recompute", policy.recompute)
            and self._allows("offload", policy.offload)
            and self.admits(Recipe(recompute=policy.recompute, offload=policy.offload))
            and (self.offloads or policy.offload == "none")
            and not (names_none and policy.recompute == "selective")
        ]

    def pipes(self, layout: Layout, ranks: int) -> tuple[Pipe, ...]:
        """Return the pipelines of `ranks` ranks that a layout's micro-batches, runtime and restriction allow."""
        micro_batches = self.batch * ranks * layout.ranks // (layout.micro_batch * self.devices)
        every, offered = "virtual_stages" in self.only, self.base.runtime.schedules
        known = known_pipes(ranks, micro_batches, len(self.counted.blocks), every=every)
        if offered:
            known = tuple(pipe for pipe in known if pipe.schedule in (None, *offered))
        if not every and "schedule" not in self.only:
            return known
        return tuple(
            pipe
            for pipe in known
            if self._allows("schedule", pipe.schedule) and self._allows("virtual_stages", pipe.virtual_stages)
        )

    @property
    def most_zero(self) -> int:
        """The highest allowed ZeRO stage, 0 to 3."""
        return max((zero for zero in range(4) if self._allows("zero", zero)), default=0)

    def shardings(self, layout: Layout, ranks: int) -> tuple[Sharding, ...]:
        """Return the possible ZeRO shardings for a layout with `ranks` pipeline ranks.

        ZeRO shards over all replicas, or within groups of replicas. A group has one of the sizes `_GROUPS`. If
        `zero_group` is restricted, the size may be any divisor of the number of replicas.
        """
        replicas = self.devices // layout.tensor // ranks
        key = (replicas, ranks > 1)
        if key not in self._shardings:
            runtime = self.base.runtime
            offered = runtime.zero_in_pipelines if ranks > 1 else runtime.zero_stages
            every = "zero_group" in self.only or self.zero_groups is not None
            sizes = [size for size in divisors(replicas) if 1 < size < replicas and (every or size in _GROUPS)]
            groups = [0, *sizes] if replicas > 1 else []
            self._shardings[key] = tuple(
                item
                for item in (Sharding(), *(Sharding(zero, group) for zero in (1, 2, 3) for group in groups))
                if item.zero in offered
                and self._allows("zero", item.zero)
                and self._allows("zero_group", item.group or None)
                and (self.zero_groups is None or {item.group or None, item.group or replicas} & {*self.zero_groups})
            )
        return self._shardings[key]

    def _allows(self, name: str, value: object) -> bool:
        return name not in self.only or value in self.only[name]

    def recipe(self, layout: Layout, policy: ActivationPolicy, pipe: Pipe, sharding: Sharding) -> Execution:
        """Return the recipe with a layout, policy, pipeline and sharding, and with all other fields of `base`."""
        made = {
            **_fields_of(self.base),
            "data": self.devices // layout.ranks // pipe.pipeline,
            "tensor": layout.tensor,
            "sequence_parallel": layout.sequence_parallel,
            "context": layout.context,
            "expert": layout.expert,
            "expert_tensor": layout.expert_tensor,
            "micro_batch": layout.micro_batch,
            "recompute": policy.recompute,
            "offload": policy.offload,
            "pipeline": pipe.pipeline,
            "schedule": pipe.schedule,
            "virtual_stages": pipe.virtual_stages,
            "stage_layers": pipe.stage_layers(len(self.counted.blocks)),
            "zero": sharding.zero,
            "zero_group": sharding.group or None,
        }
        return Execution(**made)

    def recipes(self) -> Iterator[Execution]:
        """Yield every recipe of the set, once."""
        for layouts in self.layouts():
            for layout in layouts:
                for policy, ranks in product(self.policies(layout), self.pipelines(layout)):
                    for pipe, sharding in product(self.pipes(layout, ranks), self.shardings(layout, ranks)):
                        recipe = self.recipe(layout, policy, pipe, sharding)
                        if self.admits(recipe):
                            yield recipe

    def admits(self, recipe: Recipe) -> bool:
        """Whether `self.runs` and the runtime allow a recipe.

        With `self.runs`, `compile` must have a program for the recipe (`Recipe.without_program`). A recipe that
        offloads activations in a pipeline needs a runtime with `offloads_in_pipelines`.
        """
        if recipe.offload == "activations" and is_several(recipe.pipeline):
            return self.base.runtime.offloads_in_pipelines and not (self.runs and recipe.without_program)
        return not (self.runs and recipe.without_program)


@lru_cache(maxsize=16)
def _fields_of(recipe: Execution) -> Mapping[str, Any]:
    """Return the fields of a recipe by name.

    The result is cached, because `dataclasses.replace` would read them each time.
    """
    return {item.name: getattr(recipe, item.name) for item in fields(recipe)}


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, the smallest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return (*small, *(number // size for size in reversed(small) if size * size != number))


def _splits_evenly(counted: CountedModel, kind: RecipeKind, layout: Layout) -> bool:
    """Whether every axis of a layout splits some value of a block, and divides each dim that it splits."""
    sizes = {"tensor": layout.tensor, "context": layout.context, "expert": layout.expert}
    splits = counted.splits(kind)
    used = {axis for _, axes in splits for axis in axes}
    if any(size > 1 and axis not in used for axis, size in sizes.items()):
        return False
    return all(dim % math.prod(sizes[axis] for axis in axes) == 0 for dim, axes in splits)
