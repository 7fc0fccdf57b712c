"""Models with adapters of peft are not exported under names that load as random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autoshard


class Adapted(nn.Module):
    """A layer as peft replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("inner", [True, False])
def test_a_model_of_peft_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: bool) -> None:
    """By the name of its first such layer, and nothing is written."""
    monkeypatch.setattr(Adapted, "__module__", "peft.tuners.lora.layer")
    model = nn.Sequential(nn.Linear(4, 4), Adapted()) if inner else Adapted()
    sharded = autoshard.compile(model, autoshard.Mesh({"data": 2}), example_inputs=(torch.ones(2, 4),))
    with pytest.raises(autoshard.AutoshardError, match=r"is a Adapted of peft.*merge_and_unload\(\)"):
        sharded.export(tmp_path / "out")
    assert not [*tmp_path.iterdir()]
