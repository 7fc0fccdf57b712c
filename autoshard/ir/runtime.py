"""Runtimes: what executes a training step. Ours is `compile`; those of others have profiles that price their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from autoshard.errors import NotAvailableError
from autoshard.ir.recipe import Recipe

AUTOSHARD = "autoshard"
"""The runtime of `autoshard.compile`: what it does is read off the lowered program, not said by a profile."""

MEGATRON = "megatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How another framework executes a recipe.

    Args:
        name: of the framework.
        early_stop, gradient_dtype, separate_sum, master_weights, overlap_gradients, overlap_parameters, overlap_tensor,
        overlap_pipeline, bucket_bytes, separate_experts, fused, compiled: see `Recipe`.

    Example:
        >>> RUNTIMES["fsdp2"].executes(Recipe(data=8, zero=3)).fused
        False
    """

    name: str
    early_stop: bool = False
    gradient_dtype: str = "f32"
    separate_sum: bool = False
    master_weights: bool = True
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tensor: bool = True
    overlap_pipeline: bool = False
    bucket_bytes: int = 200_000_000
    separate_experts: bool = False
    fused: bool = True
    compiled: bool = False

    def executes(self, recipe: Recipe) -> Recipe:
        """The recipe as this runtime executes it."""
        fields = asdict(self)
        del fields["name"]
        return replace(recipe, **fields)


RUNTIMES: Mapping[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        # Megatron Core 0.15: p2p overlap, a product of cuBLAS for each expert
        Runtime(name=MEGATRON, overlap_pipeline=True, separate_experts=True),
        # torch 2.13, torch/distributed/fsdp: a block's parameters at a time, checkpoints that are not reentrant, eager
        Runtime(name="fsdp2", early_stop=True, bucket_bytes=10**12, fused=False),
        # DeepSpeed 0.17, runtime/bf16_optimizer.py and runtime/zero/config.py: gradients beside their sum, 5e8 elements
        Runtime(name="deepspeed", separate_sum=True, overlap_tensor=False, bucket_bytes=10**9, fused=False),
    )
}
"""Runtimes by name, as their defaults are; sources beside each."""


def runtime_named(given: str | Runtime | None) -> Runtime | None:
    """The profile of another framework; None for our own runtime.

    Raises:
        NotAvailableError: no such runtime; lists those that there are.
    """
    if given in (None, AUTOSHARD) or isinstance(given, Runtime):
        return given if isinstance(given, Runtime) else None
    if given not in RUNTIMES:
        known = ", ".join(map(repr, (AUTOSHARD, *RUNTIMES)))
        raise NotAvailableError(f"runtime={given!r} is unknown; use one of {known}, or an autoshard.Runtime.")
    return RUNTIMES[given]
