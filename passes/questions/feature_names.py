"""What plans are asked about by `why_not`: one name for each thing that a plan can do, and what else people call it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autoshard.errors import InvalidSpecError

NAMES: Mapping[str, tuple[str, ...]] = {
    "data": ("ddp", "dp", "replicated"),
    "zero-1": (),
    "zero-2": (),
    "fsdp": ("zero-3", "fsdp2", "fully-sharded"),
    "hsdp": ("hybrid-sharded", "hybrid-shard"),
    "tensor": ("tp", "model", "megatron"),
    "sequence": ("sp",),
    "context": ("cp", "ring-attention"),
    "expert": ("ep", "experts", "moe"),
    "pipeline": ("pp", "pipelining"),
    "recompute": ("recomputation", "checkpoint", "checkpointing", "activation-checkpointing", "remat"),
    "offload": ("offloading", "cpu-offload", "activation-offloading"),
}
"""Feature to its other names; case, `_`, spaces and the word "parallel" do not count, nor the dash of ZeRO's stages."""

_OWN = {other: name for name, others in NAMES.items() for other in (name, *others)}


def feature_named(text: object) -> str:
    """The feature that a name stands for.

    Raises:
        InvalidSpecError: none; lists those that there are.

    Example:
        >>> feature_named("ZeRO3"), feature_named("tensor_parallel"), feature_named("PP")
        ('fsdp', 'tensor', 'pipeline')
    """
    plain = re.sub(r"[_\s]+", "-", text.strip().lower()) if isinstance(text, str) else ""
    plain = re.sub(r"^zero(\d)$", r"zero-\1", re.sub(r"-?parallel(ism)?$", "", plain))
    if plain not in _OWN:
        known = ", ".join(f"{name} ({', '.join(others)})" if others else name for name, others in NAMES.items())
        raise InvalidSpecError(f"why_not({text!r}): unknown; ask for one of {known}.")
    return _OWN[plain]
