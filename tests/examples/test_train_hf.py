"""examples/train_hf.py has the losses of plain PyTorch, on any number of ranks and over restarts."""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import runpy
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.examples.curves import (
    PICTURE,
    RESULTS,
    SCRIPT,
    TWO_RANKS,
    Run,
    compare,
    largest_difference,
    losses_of,
    losses_of_plain_pytorch,
    save_model,
)
from tests.examples.scripts import ROOT, run_python

TOLERANCE = 1e-5
_CONFIG = {
    "model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small GPT-2 with weights, and pages of the documentation as text."""
    folder = tmp_path_factory.mktemp("hf")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    save_model(folder / "config.json", folder / "model")
    shutil.copytree(ROOT / "docs" / "tutorials", folder / "text")
    return Run(folder / "model", folder / "text", steps=12, batch=4, length=32, warmup=3)


def test_it_equals_plain_pytorch_and_goes_on_by_itself(run: Run, tmp_path: Path) -> None:
    """Two ranks have the losses of plain PyTorch, and so has one process that continues from their checkpoint."""
    plain, out = losses_of_plain_pytorch(run), tmp_path / "out"
    often = ("--save-every", "5", "--eval-every", "5", "--trackers", "csv", "tensorboard")
    text = run_python(*TWO_RANKS, *run.words(out, *often), folder=tmp_path)
    assert largest_difference(losses_of(out), plain) < TOLERANCE
    assert re.findall(r"step (\d+): held-out loss", text) == ["5", "10", "12"]
    assert list(out.glob("events.out.tfevents.*"))
    shutil.rmtree(out / "checkpoints" / "step-12")
    text = run_python(*run.words(out, *often), folder=tmp_path)
    assert largest_difference(losses_of(out), plain) < TOLERANCE
    assert re.findall(r"step (\d+): held-out loss", text) == ["12"]
    with (out / "steps.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    assert float(last["perplexity"]) == pytest.approx(math.exp(float(last["held_out_loss"])))
    trained = AutoModelForCausalLM.from_pretrained(out / "model")
    assert trained.config.model_type == "gpt2"


def test_wrong_sizes_are_named(run: Run) -> None:
    """Too little text, and a model for shorter sequences, are refused with the found and the needed size."""
    script = runpy.run_path(str(SCRIPT), run_name="train_hf")
    with pytest.raises(SystemExit, match=r"has text for \d+ documents of 100000 tokens; 20 are needed"):
        script["read_documents"](run.text, None, 100_000)
    options = argparse.Namespace(model=run.model, length=64)
    with pytest.raises(SystemExit, match="has max_position_embeddings=32, but the text and --length need 64"):
        script["make_model"](options, words=256)


def test_the_example_is_short() -> None:
    """The script has at most 150 lines."""
    assert len(SCRIPT.read_text().splitlines()) <= 150


@pytest.mark.slow
def test_two_hundred_steps_equal_plain_pytorch(tmp_path: Path) -> None:
    """Over 200 steps, the losses of two ranks equal plain PyTorch's, and the picture and the figures are there."""
    two_ranks, one_device = compare(200, tmp_path)
    assert len(two_ranks) == 200
    assert largest_difference(two_ranks, one_device) < TOLERANCE
    assert two_ranks[-1] < two_ranks[0] / 2
    assert "polyline" in PICTURE.read_text()
    assert "| 200 |" in RESULTS.read_text()
