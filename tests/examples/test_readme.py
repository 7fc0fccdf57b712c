"""The README runs as printed, in a clean folder."""

import re
import shlex
from pathlib import Path

from transformers import LlamaConfig

from tests.examples.scripts import ROOT, run_python

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = re.findall(r"^\.venv/bin/autoshard (.+)$", README, re.MULTILINE)

_READERS_OWN = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.layers(tokens).flatten(0, 1), targets.flatten())

model = Words()
tokens, targets = torch.randint(64, (2, 8, 4)).unbind()
dataset = torch.utils.data.TensorDataset(*torch.randint(64, (2, 20, 4)).unbind())
"""
"""Definitions that the first blocks use: a model with a loss, a batch and a dataset."""


def test_the_first_blocks_train(tmp_path: Path) -> None:
    """A loop with an optimizer, then batches from a sampler."""
    loop, data, processes, *_ = PYTHON
    assert "sampler(" in data
    assert "init_device_mesh" in processes
    checked = f"before = [p.detach().clone() for p in model.parameters()]\n{loop}\n{data}"
    moved = "assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters()))"
    (tmp_path / "loop.py").write_text(f"{_READERS_OWN}\n{checked}\n{moved}\nprint(len(loader))\n")
    assert run_python("loop.py", folder=tmp_path).split() == ["2"]


def test_the_readers_own_file_is_planned(tmp_path: Path) -> None:
    """`mine.py` prints a plan and trains, and is planned for a cluster without memory for the model."""
    mine, planned = PYTHON[3:5]
    (tmp_path / "mine.py").write_text(mine)
    assert "Plan on Mesh(data=2, model=2)" in run_python("mine.py", folder=tmp_path)
    (tmp_path / "planned.py").write_text(f"import torch\nimport autoshard\nfrom mine import build\n{planned}")
    assert "priced for h100_sxm:8x8" in run_python("planned.py", folder=tmp_path)


def test_the_commands_plan_and_price(tmp_path: Path) -> None:
    """The printed commands run, for the file above them and for a small config."""
    (tmp_path / "mine.py").write_text(PYTHON[3])
    small = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=8
    )
    small.architectures = ["LlamaForCausalLM"]
    small.save_pretrained(tmp_path / "path" / "to")
    found = [run_python("-m", "autoshard", *shlex.split(command), folder=tmp_path) for command in COMMANDS]
    assert len(found) == 4
    assert all("Cost of one step" in text for text in found[:3])
    assert "Commands" in found[3]
