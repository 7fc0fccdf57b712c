"""The features that `why_not` knows: their names and synonyms, and the values of recipe fields that express them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from autoshard.errors import InvalidSpecError
from autoshard.ir.recipe import Recipe
from passes.questions.change import Fields

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
"""Feature → its synonyms. Case, `_`, spaces, the word "parallel", and the dash of ZeRO's stages are ignored."""

_OWN = {other: name for name, others in NAMES.items() for other in (name, *others)}


def feature_named(text: object) -> str:
    """Return the feature that a text names, by the feature's own name or a synonym.

    Raises:
        InvalidSpecError: no feature has this name. The message lists the features.

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


@dataclass(frozen=True, slots=True)
class Feature:
    """The values of recipe fields with which a recipe has a feature.

    Args:
        ways: name of a way to have the feature → the allowed values of recipe fields.
        without: for each way to lack the feature, the allowed values of recipe fields.
    """

    ways: Mapping[str, Fields]
    without: tuple[Fields, ...]

    def is_used(self, recipe: Recipe) -> bool:
        """Whether a recipe satisfies one of the ways to have the feature."""
        return any(all(getattr(recipe, name) in values for name, values in way.items()) for way in self.ways.values())


class _Several(Collection[object]):
    """The collection of all integers above one, for allowed sizes of an axis.

    A `range` would search its elements one by one for a value that is no integer, e.g. None.
    """

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and value in self._sizes

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    _sizes = range(2, 2**31)


_MANY = _Several()


def _axis(name: str) -> Feature:
    return Feature({name: {name: _MANY}}, ({name: (1,)},))


def _sharding(name: str, zero: int) -> Feature:
    others = tuple(stage for stage in range(4) if stage != zero)
    return Feature({name: {"zero": (zero,), **({} if zero else {"data": _MANY})}}, ({"zero": others},))


FEATURES: Mapping[str, Feature] = {
    "data": _sharding("data", 0),
    "zero-1": _sharding("zero-1", 1),
    "zero-2": _sharding("zero-2", 2),
    "fsdp": _sharding("fsdp", 3),
    "hsdp": Feature({"hsdp": {"zero": (3,), "zero_group": _MANY}}, ({"zero": (0, 1, 2)}, {"zero_group": (None,)})),
    **{name: _axis(name) for name in ("tensor", "context", "expert", "pipeline")},
    "sequence": Feature({"sequence": {"sequence_parallel": (True,)}}, ({"sequence_parallel": (False,)},)),
    "recompute": Feature(
        {
            "recompute of attention's core": {"recompute": ("selective",)},
            "recompute of blocks": {"recompute": ("full",)},
        },
        ({"recompute": ("none",)},),
    ),
    "offload": Feature({"offload of activations": {"offload": ("activations",)}}, ({"offload": ("none",)},)),
}
"""Name of a feature → the recipe fields that express it."""
