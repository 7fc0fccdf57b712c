"""Pages of the documentation: their Python runs, their quotations are in the sources, and their links have targets."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.docs.page_names import names
from tests.examples.scripts import ROOT, run_python

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>python|text)[^\n]*\n(?P<code>.*?)```", re.DOTALL)
_NEEDS = re.compile(r"<!-- needs: (.*) -->")
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]+)?(?:#([\w-]+))?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of Python on a page, and the comment before it, such as "ranks: 2"."""

    code: str
    note: str

    def value(self, key: str) -> str | None:
        """The comment's value for a key, or None if the comment has another key."""
        return self.note.removeprefix(f"{key}: ") if self.note.startswith(f"{key}: ") else None


def _blocks(page: Path) -> Iterator[Block]:
    for found in _BLOCK.finditer(page.read_text()):
        block = Block(found["code"], found["note"] or "")
        if found["language"] == "python" or block.value("from"):
            yield block


def _with_code() -> list[Path]:
    return [page for page in PAGES if any(_blocks(page))]


SLOW = {
    *("why_this_plan", "how_plans_are_found", "plans", "pipelines_and_experts"),  # plan many times
    *("accelerate", "adapters", "lightning", "transformers_trainer"),  # as tests/integrations and test_adapters
    *("profile_a_step", "test_your_plans", "formulas", "watch_a_run"),  # as the tests of what they show
    *("stop_and_resume", "from_ddp_fsdp_accelerate"),  # as tests/checkpoints and tests/examples/test_ddp.py
}


def _marked(page: Path) -> ParameterSet:
    return pytest.param(page, id=_name(page), marks=[pytest.mark.slow] if page.stem in SLOW else [])


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [_marked(page) for page in _with_code()])
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of a page runs in order with the names of `page_names`. Blocks for several ranks run
    under torchrun."""
    monkeypatch.chdir(tmp_path)
    needs = _NEEDS.search(page.read_text())
    known = names(needs[1] if needs else "")
    for block in _blocks(page):
        if block.code.startswith(">>>") or block.note == "example":
            continue
        if source := block.value("from"):
            assert block.code.strip("\n") in (ROOT / source).read_text()
        elif ranks := block.value("ranks"):
            (tmp_path / "train.py").write_text(block.code)
            run_python(*_torchrun(ranks), str(tmp_path / "train.py"), folder=tmp_path)
        else:
            exec(compile(block.code, _name(page), "exec"), known)


def _torchrun(ranks: str) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize("page", [page for page in PAGES if ">>>" in page.read_text()], ids=_name)
def test_the_sessions_of_a_page_run(page: Path) -> None:
    """The doctests of a page pass."""
    result = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Each link within the repository leads to an existing file and heading."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for path, anchor in _LINK.findall(text):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} does not exist"
        if anchor:
            anchors = [
                re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
                for title in _HEADING.findall(target.read_text())
            ]
            assert anchor in anchors, f"{path}#{anchor}: no such heading"


def test_every_page_is_in_the_menu() -> None:
    """mkdocs.yml names each page of docs."""
    menu = (ROOT / "mkdocs.yml").read_text()
    missing = [_name(page) for page in PAGES[1:] if str(page.relative_to(ROOT / "docs")) not in menu]
    assert not missing


def test_pages_that_the_code_names_exist() -> None:
    """Pages that the packages' docstrings and messages name exist."""
    sources = [path for folder in ("autoshard", "passes", "cost_models") for path in (ROOT / folder).rglob("*.py")]
    named = {page for path in sources for page in re.findall(r"\bdocs/[\w/]+\.md", path.read_text())}
    assert named
    assert not [page for page in named if not (ROOT / page).exists()]
