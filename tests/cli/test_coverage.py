"""`autoshard doctor MODEL` lists operators that run whole on every device, with their places and costs."""

import json
import sys
from pathlib import Path

import pytest

from autoshard import cli

_FILE = """
import torch
from torch import nn

@torch.library.custom_op("autoshard_test_coverage::{name}", mutates_args=())
def twist(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()

@twist.register_fake
def _(x):
    return torch.empty_like(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 256)

    def forward(self, x):
        return self.up(twist(x)).square().mean()

def build(batch, seq):
    return Model(), (torch.randn(batch, seq, 64),)

def build_inferred(batch, seq):
    import autoshard
    autoshard.infer_rule(twist, (torch.randn(2, 4, 6, device="cpu"),))
    return build(batch, seq)
"""


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest, own_rules: None) -> Path:
    """A file of a model with a custom operator that has no sharding rule."""
    path = tmp_path / "covered_model.py"
    path.write_text(_FILE.replace("{name}", request.node.name))
    return path


def _doctor(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    options = ("--mesh", "data=4", "--batch", "8", "--seq", "16")
    monkeypatch.setattr(sys, "argv", ["autoshard", "doctor", *arguments, *options])
    cli.main()


def test_operators_without_a_rule_are_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """An operator without a rule is named with its line in the model and its share of the step."""
    _doctor(monkeypatch, f"{model}:build", "--json")
    report = json.loads(capsys.readouterr().out)
    (found,) = [row for row in report["operators"] if row["kind"] == "without rule"]
    assert "autoshard_test_coverage" in found["operator"]
    assert "covered_model.py:19 in forward" in found["source"]
    assert 0 < found["share"] < 1
    assert report["calls_without_rule"] == 1
    assert report["split_calls"] + report["replicated_calls"] > 3


def test_the_report_is_a_sentence_and_a_table(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Without `--json`, the report has a sentence on operators without a rule, and a table."""
    _doctor(monkeypatch, f"{model}:build")
    text = capsys.readouterr().out
    assert "1 for want of a sharding rule" in text
    assert "without rule" in text


def test_inferred_rules_are_assumptions_to_know_of(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """An operator with an inferred rule is listed as an assumption."""
    _doctor(monkeypatch, f"{model}:build_inferred", "--json")
    report = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in report["operators"]} >= {"inferred rule"}
    assert report["calls_without_rule"] == 0
