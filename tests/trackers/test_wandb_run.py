"""`WandB` imports the package and begins a run at the first step, and `close` finishes the run."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autoshard import NotAvailableError
from autoshard.trackers import WandB


def test_numbers_are_logged_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings go to `wandb.init`, and the numbers of each step to the run, under the step's number."""
    said: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: said.append((step, values)), finish=lambda: said.append("finished"))
    fake = ModuleType("wandb")
    fake.init = lambda **settings: said.append(settings) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = WandB(project="gpt", mode="offline")
    assert not said
    writer.log(5, {"loss": 1.0})
    writer.log(6, {"loss": 0.5})
    writer.close()
    writer.close()
    assert said == [{"project": "gpt", "mode": "offline"}, (5, {"loss": 1.0}), (6, {"loss": 0.5}), "finished"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package wandb, the first step is refused with the command that installs it, and `close` without
    a step works."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    writer = WandB()
    with pytest.raises(NotAvailableError, match="pip install wandb"):
        writer.log(1, {"loss": 1.0})
    WandB().close()
