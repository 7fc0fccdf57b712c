"""The commands `autoshard ...` on the pages run as printed, in a folder with scripts and a small config."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from transformers import LlamaConfig

from autoshard import cli
from tests.docs.test_pages import PAGES, ROOT

_FENCE = re.compile(r"```bash\n(.*?)```", re.DOTALL)
_COMMAND = re.compile(r"^ *(?:\.venv/bin/)?autoshard ([^\n#]+)", re.MULTILINE)
_LONG = ("calibrate", "hf:", "--global-batch")
_PLACEHOLDERS = ("COMMAND", "my_node")


def _commands() -> list[str]:
    """Each command on the pages once, except commands with a placeholder."""
    texts = [block for page in PAGES for block in _FENCE.findall(page.read_text())]
    found = {command.strip() for text in texts for command in _COMMAND.findall(text)}
    return sorted(command for command in found if not any(word in command for word in _PLACEHOLDERS))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model of the first tutorial, a plan of it, and a config."""
    page = (ROOT / "docs" / "tutorials" / "ten_minutes.md").read_text()
    (tmp_path / "mine.py").write_text(page.split("```python\n", 1)[1].split("```", 1)[0])
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=256, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "path" / "to")
    (tmp_path / "hostfile").write_text("node1 slots=8\nnode2 slots=8\n")
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    _run(monkeypatch, "plan mine.py:build --cluster h100_sxm:1x2 --out plan.json")
    return tmp_path


def _run(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(sys, "argv", ["autoshard", *shlex.split(command)])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    try:
        cli.main()
    except SystemExit as exit_:
        assert not exit_.code, command  # noqa: PT017


def _marked(command: str) -> ParameterSet:
    is_long = any(word in command for word in _LONG)
    return pytest.param(command, marks=[pytest.mark.slow] if is_long else [])


@pytest.mark.parametrize("command", [_marked(command) for command in _commands()])
def test_a_command_of_a_page_runs(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command on a page ends with exit status 0."""
    _run(monkeypatch, command)
