"""A few small architectures of each kind run as tests; `make zoo` runs all architectures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.zoo.__main__ import sample
from tests.zoo.architecture import Library, WithTargets
from tests.zoo.check import Result, check, largest_error, train_and_evaluate
from tests.zoo.report import markdown
from tests.zoo.table import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's models

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
    "dit": {"num_layers": 1},
    "pna": {},
}
"""Architectures of this test, and the options that make each smaller than in the table."""


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_sharded_architecture_equals_one_device(name: str) -> None:
    """Training and evaluation of a proven plan near the smallest memory equal one device's."""
    architecture = ARCHITECTURES[name]
    if not architecture.library.is_installed:
        pytest.skip(f"{architecture.library} is not installed; `make zoo` installs it")
    smaller = replace(architecture, config={**architecture.config, **QUICK[name]})
    result = check(smaller, time_budget_s=1.0)
    assert result.passed, result
    assert result.programs == 2, "batches of the same shapes run one program"


def test_a_wrong_step_is_noticed() -> None:
    """A model that is wrong after the first step, in a buffer and in later losses, is found."""
    batches = [{"x": torch.randn(4, 3)} for _ in range(3)]
    torch.manual_seed(0)
    right, wrong = Counts(by=1.0), Counts(by=1.5)
    wrong.load_state_dict(right.state_dict())
    found, expected = (train_and_evaluate(model, batches, 1e-2) for model in (wrong, right))
    assert torch.equal(found["step 0: loss"], expected["step 0: loss"])
    assert not torch.equal(found["step 1: loss"], expected["step 1: loss"])
    assert largest_error(found, expected)[1] > 1e-2


def test_the_sample_of_a_day() -> None:
    """The sample is the same for equal dates, and another for the next day."""
    first, again, other = (sample(list(ARCHITECTURES), 12, date) for date in ("2026-01-01", "2026-01-01", "2026-01-02"))
    assert len(first) == 12
    assert set(first) <= set(ARCHITECTURES)
    assert first == again != other


@pytest.mark.parametrize("library", Library)
def test_building_twice_gives_the_same(library: Library) -> None:
    """Two builds of an architecture have equal weights, inputs and targets bit for bit."""
    if not library.is_installed:
        pytest.skip(f"{library} is not installed; `make zoo` installs it")
    architecture = next(item for item in ARCHITECTURES.values() if item.library is library)
    (model, inputs), (again, same_inputs) = architecture.build(), architecture.build()
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(same_inputs, inputs, rtol=0, atol=0)


def test_a_model_without_a_loss_gets_one() -> None:
    """The loss of a wrapped model is the sum of its floating outputs' mean squared errors to the targets."""
    model = WithTargets(Outputs())
    x = torch.tensor([1.0, 3.0])
    loss = model([torch.zeros(2), torch.ones(2)], x=x)
    assert loss.item() == (1 + 9) / 2 + (1 + 25) / 2


def test_the_page_lists_what_failed_and_what_was_not_run() -> None:
    """The page lists the failed architectures, the architectures that did not run, and the passes of each library."""
    passed = Result("gcn", "graph", stage="done", library="torch_geometric 2.8.1")
    failed = replace(passed, name="gat", stage="plan", reason="it is too large")
    page = markdown([passed, failed], ["gcn", "gat", "pna"])
    assert "* **gat** (plan): it is too large" in page
    assert "Not run yet: pna." in page
    assert "* torch_geometric 2.8.1: 1 of 2 pass" in page


class Counts(nn.Module):
    """A model that multiplies its output by its number of calls in training."""

    calls: torch.Tensor

    def __init__(self, by: float) -> None:
        super().__init__()
        self.layer, self.by = nn.Linear(3, 3), by
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.layer(x) * self.calls.clone()).square().mean()
        if self.training:
            self.calls += self.by
        return loss


class Outputs(nn.Module):
    """A model with two floating outputs, and one integer output."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return x, {"count": torch.tensor(2), "twice": 2 * x}


def test_names_are_unique_and_families_are_covered() -> None:
    """Names are unique, and at least sixty architectures cover every family."""
    families = {architecture.family for architecture in ARCHITECTURES.values()}
    assert len(ARCHITECTURES) >= 60
    assert families == set(type(next(iter(families))))
