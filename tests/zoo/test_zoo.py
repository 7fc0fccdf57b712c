"""A few small architectures of each kind; `make zoo` runs all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.zoo.check import check
from tests.zoo.table import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' models

ONE_LAYER = {"num_hidden_layers": 1}
QUICK: dict[str, dict[str, Any]] = {
    "phi": ONE_LAYER,
    "albert": ONE_LAYER,
    "bart": {"encoder_layers": 1, "decoder_layers": 1},
    "mixtral": ONE_LAYER,
    "falcon_mamba": {**ONE_LAYER, "hidden_size": 16},
    "gpt_bigcode": {"n_layer": 1},
    "resnet-training": {},
    "vit": ONE_LAYER,
    "wav2vec2": ONE_LAYER,
    "patchtst": ONE_LAYER,
}
"""What is run here, and what makes it smaller than in the table."""


@pytest.mark.parametrize("name", QUICK)
def test_a_sharded_architecture_equals_one_device(name: str) -> None:
    """Planned near the smallest memory, proven, and run: loss and all gradients are those of one device."""
    architecture = ARCHITECTURES[name]
    smaller = replace(architecture, config={**architecture.config, **QUICK[name]})
    result = check(smaller, time_budget_s=1.0)
    assert result.passed, result


def test_names_are_unique_and_families_are_covered() -> None:
    """Sixty architectures at least, of each family one."""
    families = {architecture.family for architecture in ARCHITECTURES.values()}
    assert len(ARCHITECTURES) >= 60
    assert families == set(type(next(iter(families))))
