"""The error messages in docs/reference/messages.md are those that the mistakes raise.

Each heading of the page names a mistake. A block of Python or of a shell makes the mistake. A block of text has the
class of the error and the whole message.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autoshard
from autoshard import RankMismatchError
from autoshard.cli.app import main
from autoshard.runtime.agreement.control_group import ControlGroup
from cost_models.errors import CostModelError
from tests.examples.scripts import ROOT

PAGE = (ROOT / "docs" / "reference" / "messages.md").read_text()
NAMES = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
_ROW = re.compile(
    r"### ([^\n]+)\n\n(?:<!-- example -->\n)?```(python|console)\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL
)


_MODEL = """
from torch import nn, ones


def build(batch=8):
    return nn.Linear(6, 2), (ones(batch, 6),)
"""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A heading of the page.

    Args:
        words: the heading.
        language: "python" or "console".
        code: the lines that make the mistake.
        message: `ErrorClass: sentences`, on one line.
    """

    words: str
    language: str
    code: str
    message: str


MISTAKES = [
    Mistake(words, language, code, " ".join(text.split())) for words, language, code, text in _ROW.findall(PAGE)
]


def of(language: str) -> list[Any]:
    return [pytest.param(row, id=row.words) for row in MISTAKES if row.language == language]


def test_the_table_is_whole() -> None:
    """Each heading of the third level is followed by code and a message in the form that these tests read."""
    assert [row.words for row in MISTAKES] == re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert len(MISTAKES) >= 40


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize("mistake", of("python"))
def test_python(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the page, as the file train.py, raise the error with the whole message of the page."""
    monkeypatch.chdir(tmp_path)
    assert NAMES is not None
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(NAMES[1], "names.py", "exec"), names)
    with pytest.raises((autoshard.AutoshardError, CostModelError)) as caught:
        exec(compile(mistake.code, "/home/me/train.py", "exec"), names)
    assert f"{type(caught.value).__name__}: {caught.value}" == mistake.message


@pytest.mark.parametrize("mistake", of("console"))
def test_command_line(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The command on the page ends with the page's message and exit status 1."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(_MODEL)
    monkeypatch.setattr(sys, "argv", shlex.split(mistake.code.removeprefix("$ ")))
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err.strip()) == (1, mistake.message)


def test_ranks_that_differ() -> None:
    """The error of ranks that disagree names each differing fact with its value on each rank."""
    facts = [{"precision": "bf16", "seed": "0"}, {"precision": "f32", "seed": "0"}]
    group = SimpleNamespace(gather=lambda _, __: facts, channel=SimpleNamespace(ranks=(0, 1)))
    group._describe = partial(ControlGroup._describe, group)
    with pytest.raises(RankMismatchError) as caught:
        ControlGroup.agree(group, lambda: facts[0])  # type: ignore[arg-type]
    assert str(caught.value) == (
        "Ranks disagree about precision. precision: bf16 on ranks [0], f32 on ranks [1]. Every rank must build the "
        "same model (same seed, or the same checkpoint). It must call the model in the same mode, with the same inputs "
        "(seed the shuffle alike) and hyperparameters. If ranks may differ in their last digits, pass "
        "Options(check='first')."
    )
