"""Names by which users ask for features of plans."""

from __future__ import annotations

import pytest

from autoshard.errors import InvalidSpecError
from passes.planning.restrictions import ROLES
from passes.questions.features import FEATURES, NAMES, feature_named


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("zero-1", "zero-1"), ("ZeRO_2", "zero-2"), ("zero3", "fsdp"), ("zero-3", "fsdp"), ("FSDP", "fsdp"),
        ("hsdp", "hsdp"), ("ddp", "data"), ("data parallel", "data"), ("tp", "tensor"), ("tensor_parallel", "tensor"),
        ("sp", "sequence"), ("sequence parallelism", "sequence"), ("cp", "context"), ("ep", "expert"),
        ("pp", "pipeline"), ("pipeline-parallel", "pipeline"), ("activation checkpointing", "recompute"),
        ("checkpointing", "recompute"), ("CPU offload", "offload"),
    ],
)  # fmt: skip
def test_other_names(text: str, name: str) -> None:
    """Features have other names: abbreviations, stages of ZeRO, any case, and the suffix "parallel"."""
    assert feature_named(text) == name


@pytest.mark.parametrize("text", ["magic", "", "zero-4", "parallel", None, 3, ["fsdp"]])
def test_what_is_none_lists_all(text: object) -> None:
    """A text that names no feature, or another type, is refused with a list of all features."""
    with pytest.raises(InvalidSpecError) as caught:
        feature_named(text)
    assert all(name in str(caught.value) for name in NAMES)


def test_every_feature_has_a_name() -> None:
    """Every role and every feature has a name, and no name stands for two features."""
    assert {*ROLES, *FEATURES} <= NAMES.keys()
    assert len({other for name, others in NAMES.items() for other in (name, *others)}) == sum(
        1 + len(others) for others in NAMES.values()
    )
