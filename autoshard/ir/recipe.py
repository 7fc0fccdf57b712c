"""Recipes: how an expert lays out a training run, in the words of Megatron-LM, DeepSpeed and FSDP.

A recipe names sizes of mesh axes (pipeline x data x context x tensor; experts share the data and context axes), what
ZeRO shards, what is computed twice, and what the framework overlaps and fuses. `autoshard.plan` turns it into a
restriction of its search, `autoshard.price` into constraints on a traced program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

from autoshard.errors import RecipeError
from cost_models.schedule_orders import SCHEDULES, usual_schedule

RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("bf16", "f16", "f8", "f32")
OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "adamw")
OFFLOADS = ("none", "activations", "optimizer", "parameters")
LIBRARY, TRITON = KERNELS = ("library", "triton")
GRADIENT_DTYPES = ("bf16", "f16", "f32")
SEARCHED = ("data", "zero", "tensor", "sequence_parallel", "context", "micro_batch", "recompute", "offload")
"""Fields that may be left free."""
_OF_EXPERTS_AND_STAGES = (
    *("zero_group", "expert", "expert_tensor", "pipeline", "schedule", "virtual_stages", "stage_blocks"),
)

if TYPE_CHECKING:  # what reads a field has a complete recipe
    Count = int
    Word = str
    Flag = bool
else:
    Count, Word, Flag = int | None, str | None, bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An expert's plan of a training step.

    `data`, `zero`, `tensor`, `sequence_parallel`, `context`, `micro_batch`, `recompute` and `offload` may be None: free
    for `autoshard.plan` to choose. Under the runtimes of others recipes are priced that leave nothing free.

    Args:
        data: replicas of the model (full width; FSDP's shards are among them).
        zero: what is sharded over `data` x `context`: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        zero_group: ranks over which ZeRO shards, for hybrid sharding; None: all of `data` x `context`.
        tensor: ranks that split heads, hidden units and the vocabulary of each layer.
        sequence_parallel: between split regions activations are split over `tensor` along the sequence.
        context: ranks that split the sequence.
        expert: ranks that share out the experts, taken from `data` x `context` x `tensor` / `expert_tensor`.
        expert_tensor: ranks among `tensor` that split each expert.
        pipeline: stages that a micro-batch passes.
        schedule: the order of the stages' work, by its name in torch.distributed.pipelining ("1F1B", "ZBVZeroBubble"),
            see docs/pipelines.md. None: "1F1B", or "Interleaved1F1B" where there are virtual stages.
        virtual_stages: model chunks on each pipeline rank.
        stage_blocks: blocks on each stage (of `pipeline` x `virtual_stages`); None: as even as can be.
        split_ends: the embedding and the head each count as a block when blocks are shared out.
        micro_batch: sequences of one replica's forward.
        global_batch: sequences of a step, over all replicas; None: one micro-batch for each.
        recompute: what the backward computes again: "none"; "selective", some modules; "full", every block.
        recompute_modules: what "selective" means: modules, by their own names joined by + ("act+norm"); None:
            attention's core.
        early_stop: recomputing a block ends with the last value that its backward needs, before its last product
            (torch's checkpoints that are not reentrant).
        attention: the kernel of fused attention, by the device's names ("flash2"); None: the device's usual one.
        precision: of matrix products inside blocks: "bf16", "f16", "f8" or "f32".
        optimizer: "adamw", ...: whose state takes memory and bandwidth.
        gradient_dtype: in which gradients are summed over micro-batches and reduced over replicas.
        separate_sum: a micro-batch's gradients, in 16 bits, are kept beside their sum in float32 (DeepSpeed's bf16
            optimizer; Megatron-LM adds each product to the sum at once).
        master_weights: the optimizer keeps parameters in float32.
        offload: what lies in the host's memory: "none"; "activations", what blocks keep from their forward to their
            backward; "optimizer" (its state), "parameters" (with it).
        overlap_gradients: gradients are reduced while the backward of the last micro-batch runs.
        overlap_parameters: ZeRO-1/2 gather the updated parameters while the next forward runs, ZeRO-3 gathers each
            block's while the block before it runs.
        overlap_tensor: the backward's collectives over `tensor` run beside the products of weight gradients.
        overlap_pipeline: activations are sent between stages while others are computed.
        overlap_expert: expert all-to-alls of one micro-batch run beside the computation of another.
        merged_dispatch: a token goes once to a rank that has several of its experts, over the network once to a node
            (DeepEP, HybridEP); otherwise once for each expert, and ranks sort by expert what comes.
        separate_experts: each expert's product is a kernel of its own (Transformer Engine's grouped layers on cuBLAS);
            otherwise one kernel has all experts of a rank.
        bucket_bytes: gradients and parameters are exchanged in pieces of about this size, at least one for each block
            under ZeRO-3.
        listed_collectives: gathers and scatters go through lists of a tensor for each rank, which the host copies one
            by one (torch.distributed.all_gather before torch 1.10).
        whole_tensors: ZeRO-1 keeps each parameter whole on one rank: gradients are reduced to all, updated parameters
            broadcast one by one (InternEvo's hybrid optimizer), not scattered and gathered.
        fused: chains of memory-bound operators run as one kernel each, and so does the optimizer.
        kernels: what chains of memory-bound operators run as: "library", what the usual libraries have; "triton", what
            `backend="triton"` puts in their place, see docs/kernels.md.
        unfused: modules, by their own names joined by + ("clamp+bias"), whose operators run one by one all the same.
        compiled: the step is one program, as `autoshard.compile` runs it. Parameters lie in the optimizer's own type.
            ZeRO-1 and -2 gather them in that type, beside the update. Gradients of several micro-batches are reduced
            beside the update too, but for ZeRO-2 and -3. ZeRO-3 gathers again only for what is computed again.
        cuda_graph: kernels are launched from a captured graph.
        blocking_launches: the host waits for each kernel before it issues the next (CUDA_LAUNCH_BLOCKING=1).

    Raises:
        RecipeError: a field is out of range, or two fields contradict each other; names them.

    Example:
        >>> Recipe(data=8, tensor=8, pipeline=2, micro_batch=1, global_batch=64).micro_batches
        8
    """

    data: Count = 1
    zero: Count = 0
    zero_group: int | None = None
    tensor: Count = 1
    sequence_parallel: Flag = False
    context: Count = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    schedule: str | None = None
    virtual_stages: int = 1
    stage_blocks: Sequence[int] | None = None
    split_ends: bool = False
    micro_batch: Count = 1
    global_batch: int | None = None
    recompute: Word = "none"
    recompute_modules: str | None = None
    early_stop: bool = False
    attention: str | None = None
    precision: str = "bf16"
    optimizer: str = "adamw"
    gradient_dtype: str = "f32"
    separate_sum: bool = False
    master_weights: bool = True
    offload: Word = "none"
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tensor: bool = True
    overlap_pipeline: bool = False
    overlap_expert: bool = False
    merged_dispatch: bool = False
    separate_experts: bool = False
    bucket_bytes: int = 200_000_000
    listed_collectives: bool = False
    whole_tensors: bool = False
    fused: bool = True
    kernels: str = LIBRARY
    unfused: str | None = None
    compiled: bool = False
    cuda_graph: bool = False
    blocking_launches: bool = False

    def __post_init__(self) -> None:
        for name, value in zip(_COUNTS, _counts_of(self), strict=True):
            if value is not None or name not in SEARCHED:
                _check_count(name, value)
        try:
            _check_kinds(*_kinds_of(self))
        except TypeError:  # one cannot be hashed
            _check_kinds.__wrapped__(*_kinds_of(self))
        if self.is_complete:
            self._check_batch()
            self._check_axes()
        self._check_stages()
        self._check_kernels()

    @property
    def is_complete(self) -> bool:
        """Whether no field is free."""
        return None not in _searched_of(self)

    @property
    def of_stage(self) -> Recipe:
        """The recipe of each stage, on the axes that the pipeline leaves."""
        return replace(self, pipeline=1, schedule=None, virtual_stages=1, stage_blocks=None, split_ends=False)

    @property
    def devices(self) -> int:
        """Ranks that the recipe needs."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, before ZeRO: data x context."""
        return self.data * self.context

    @property
    def expert_ranks(self) -> int:
        """Ranks of a pipeline stage that hold whole experts, or pieces of the same kind."""
        return self.replicas * self.tensor // self.expert_tensor

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
        return self.compiled and self.recompute != "full"

    @property
    def reduces_late(self) -> bool:
        """Whether gradients are summed over micro-batches, and the sum is reduced beside the update."""
        return self.compiled and self.micro_batches > 1 and not self.reduces_each

    @property
    def stages(self) -> int:
        """Stages over all pipeline ranks."""
        return self.pipeline * self.virtual_stages

    @property
    def chosen_schedule(self) -> str:
        """Name of the pipeline's schedule, the usual one where `schedule` is None."""
        return self.schedule or usual_schedule(self.virtual_stages)

    @property
    def words(self) -> str:
        """What the recipe does, in a sentence's words.

        Example:
            >>> Recipe(data=4, zero=1, tensor=8, sequence_parallel=True, pipeline=2, global_batch=16).words
            'data 4 (ZeRO-1), tensor 8 with sequence parallelism, pipeline 2 (1F1B); 4 micro-batches of 1'
        """
        if not self.is_complete:
            return self._partial_words()
        axes = [f"data {self.data}{self._sharding_words()}"]
        if self.tensor > 1:
            axes.append(f"tensor {self.tensor}" + (" with sequence parallelism" if self.sequence_parallel else ""))
        if self.context > 1:
            axes.append(f"context {self.context}")
        if self.expert > 1:
            axes.append(f"expert {self.expert}" + (" x tensor" if self.expert_tensor > 1 else ""))
        if self.pipeline > 1:
            stages = f", {self.virtual_stages} stages a rank" if self.virtual_stages > 1 else ""
            ends = ", its ends split off" if self.split_ends else ""
            if self.stage_blocks is not None:
                ends = f", of {'+'.join(map(str, self.stage_blocks))} blocks"
            axes.append(f"pipeline {self.pipeline} ({self.chosen_schedule}{stages}{ends})")
        some = self.recompute_modules or "attention's core"
        again = {"none": "", "selective": f"; {some} computed again", "full": "; blocks computed again"}
        batches = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} of {self.micro_batch}"
        host = "; activations on the host" if self.offload == "activations" else ""
        kernels = "; Triton kernels" if self.kernels == TRITON else ""
        return f"{', '.join(axes)}; {batches}{again[self.recompute]}{host}{kernels}"

    def _partial_words(self) -> str:
        """The fields that are given and not those that are free."""
        given = ((name, getattr(self, name)) for name in SEARCHED)
        more = ((name, getattr(self, name)) for name in _OF_EXPERTS_AND_STAGES)
        said = [f"{name}={value!r}" for name, value in given if value is not None]
        said += [f"{name}={value!r}" for name, value in more if value not in (None, 1)]
        free = ", ".join(name for name in SEARCHED if getattr(self, name) is None)
        return f"{', '.join(said)}; searched: {free}"

    def _sharding_words(self) -> str:
        group = "" if self.zero_group in (None, self.replicas) else f" in groups of {self.zero_group}"
        return f" (ZeRO-{self.zero}{group})" if self.zero else ""

    @property
    def without_program(self) -> str:
        """The field that no program of `compile` has yet, "recompute='selective'" say; "" where each has one."""
        has_experts, has_groups = self.expert > 1, self.zero_group is not None
        refused = {
            f"expert={self.expert} with data={self.data}": has_experts and (self.data or 0) % self.expert != 0,
            f"expert={self.expert} with zero_group={self.zero_group}": has_experts and has_groups,
            f"expert_tensor={self.expert_tensor} with tensor={self.tensor}": self.expert_tensor not in (1, self.tensor),
            f"recompute={self.recompute!r}": self.recompute == "selective",
            f"offload={self.offload!r}": self.offload in ("optimizer", "parameters"),
            f"precision={self.precision!r}": self.precision == "f8",
            "offload='activations' with recompute=None": self.offload == "activations" and self.recompute is None,
            f"zero_group={self.zero_group} with context={self.context}": has_groups and self.context not in (None, 1),
        }
        return next((words for words, is_asked in refused.items() if is_asked), "")

    def _check_batch(self) -> None:
        each = self.micro_batch * self.data
        if self.batch % each:
            raise RecipeError(
                f"global_batch={self.global_batch} is no multiple of micro_batch={self.micro_batch} x "
                f"data={self.data}: each replica must run whole micro-batches. The next multiple is "
                f"{(self.batch // each + 1) * each}."
            )

    def _check_axes(self) -> None:
        if self.sequence_parallel and self.tensor == 1:
            raise RecipeError("sequence_parallel=True splits activations over the tensor axis, but tensor=1.")
        if self.tensor % self.expert_tensor:
            raise RecipeError(f"expert_tensor={self.expert_tensor} must divide tensor={self.tensor}.")
        if self.expert_ranks % self.expert:
            raise RecipeError(
                f"expert={self.expert} must divide data={self.data} x context={self.context} x tensor={self.tensor} / "
                f"expert_tensor={self.expert_tensor}: experts are shared out among the ranks of a pipeline stage."
            )
        if self.whole_tensors and self.zero != 1:
            raise RecipeError(f"whole_tensors=True says how ZeRO-1 shares parameters out, but zero={self.zero}.")
        if self.zero_group is not None and self.replicas % self.zero_group:
            raise RecipeError(
                f"zero_group={self.zero_group} must divide data={self.data} x context={self.context}, over which ZeRO "
                "shards."
            )
        if self.offload in ("optimizer", "parameters") and self.zero == 0:
            raise RecipeError(f"offload={self.offload!r} needs zero of at least 1: what is offloaded is ZeRO's shard.")

    def _check_kernels(self) -> None:
        if self.kernels == TRITON and (self.unfused or not self.fused):
            raise RecipeError(
                f"kernels='triton' says what is fused; leave out fused={self.fused} and unfused={self.unfused!r}."
            )

    def _check_stages(self) -> None:
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise RecipeError(f"virtual_stages={self.virtual_stages} needs a pipeline, but pipeline=1.")
        if self.schedule is not None and self.pipeline == 1:
            raise RecipeError(f"schedule={self.schedule!r} needs a pipeline, but pipeline=1.")
        refusal = SCHEDULES[self.chosen_schedule].refusal_of_stages(self.virtual_stages)
        if refusal is not None:
            raise RecipeError(f"schedule={self.schedule!r} {refusal}.")
        if self.stage_blocks is None:
            return
        object.__setattr__(self, "stage_blocks", _entries("stage_blocks", self.stage_blocks))
        if not all(isinstance(count, int) and count >= 0 for count in self.stage_blocks):
            raise RecipeError(f"stage_blocks={self.stage_blocks!r} must be whole numbers of at least 0, one a stage.")
        if len(self.stage_blocks) != self.stages:
            raise RecipeError(
                f"stage_blocks has {len(self.stage_blocks)} entries, but there are pipeline={self.pipeline} x "
                f"virtual_stages={self.virtual_stages} = {self.stages} stages."
            )


_COUNTS = (
    *("data", "tensor", "context", "expert", "expert_tensor", "pipeline", "virtual_stages", "micro_batch"),
    *("zero_group", "global_batch", "bucket_bytes"),
)
_CHOICES: dict[str, tuple[object, ...]] = {
    "zero": (0, 1, 2, 3),
    "schedule": (None, *SCHEDULES),
    "recompute": RECOMPUTE,
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "gradient_dtype": GRADIENT_DTYPES,
    "offload": OFFLOADS,
    "kernels": KERNELS,
}
_OPTIONAL = ("zero_group", "global_batch")
_FLAGS = tuple(item.name for item in fields(Recipe) if item.type in ("bool", "Flag"))

_counts_of = attrgetter(*_COUNTS)
_kinds_of = attrgetter(*_CHOICES, *_FLAGS)
_searched_of = attrgetter(*SEARCHED)


@lru_cache(maxsize=1024, typed=True)
def _check_kinds(*values: object) -> None:
    """Check the choices and flags of a recipe; many recipes of a search have the same."""
    for name, value in zip((*_CHOICES, *_FLAGS), values, strict=True):
        if value is not None or name not in SEARCHED:
            check_field(name, value)


def check_field(name: str, value: object) -> None:
    """Whether a field of a recipe may have a value, whatever the others are. Raises RecipeError if not."""
    if name in _COUNTS:
        _check_count(name, value)
    if name in _CHOICES and value not in _CHOICES[name]:
        raise _no_choice(name, value)
    if name in _FLAGS and not isinstance(value, bool):
        raise _no_flag(name, value)


def _entries(name: str, given: object) -> tuple[object, ...]:
    """The entries of a field that holds several."""
    if not isinstance(given, Iterable):
        raise RecipeError(f"{name}={given!r} is a {type(given).__name__}; pass a tuple of whole numbers.")
    return tuple(given)


def _no_choice(name: str, value: object) -> RecipeError:
    return RecipeError(f"{name}={value!r} is unknown; use one of {', '.join(map(str, _CHOICES[name]))}.")


def _no_flag(name: str, value: object) -> RecipeError:
    return RecipeError(f"{name}={value!r} must be True or False.")


_MAX_BITS = 63


def _check_count(name: str, value: object) -> None:
    if value is None and name in _OPTIONAL:
        return
    if type(value) is not int or value < 1:
        raise RecipeError(f"{name}={value!r} must be a whole number of at least 1.")
    if value.bit_length() > _MAX_BITS:
        raise RecipeError(
            f"{name} is a number of {value.bit_length()} bits; at most {_MAX_BITS} bits are counted with."
        )
