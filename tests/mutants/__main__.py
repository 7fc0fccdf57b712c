"""Change the source on purpose, one place at a time, and see whether the tests notice.

Run: python -m tests.mutants [--count 200] [--seed 13] [--seconds 300] [--minutes 600] [--folder build/mutants]

Each change is made in a copy of the tracked files, with only the tests that can notice it (`near_tests`), without the
slow ones; it counts as noticed where one of them fails that passes without the change. Results are kept in FOLDER: a
change that is there is not run again, and a run goes on where the last one stopped. Once the minutes are over no
further change is run. The table is written behind each run, beside the other results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from tests.mutants.draw import Mutant, draw
from tests.mutants.near_tests import near_tests

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "benchmarks" / "results" / "mutants.md"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
_WAITING = 10
"""A run may take so many times its limit by the wall's clock: it may wait, and the machine may be busy."""

NOTICED, SURVIVED, OVERTIME, UNSOUND = "noticed", "survived", "over time", "fails without the change too"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a mutant: `verdict`, the test that failed, and the time that tests took."""

    mutant: Mutant
    verdict: str
    test: str
    seconds: float


def main(arguments: list[str]) -> int:
    """Run what has not been run, and write the table; 0 if nine of ten were noticed."""
    options = _parser().parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    tree, console = options.folder / "tree", Console(soft_wrap=True, highlight=False)
    commit = _git("rev-parse", "--short", "HEAD")
    kept = options.folder / f"{commit}-{options.seed}.jsonl"
    outcomes = _read(kept)
    known = {(item.mutant.path, item.mutant.operator, item.mutant.occurrence) for item in outcomes}
    _copy(tree)
    end = time.monotonic() + 60 * options.minutes
    for number, (mutant, text) in enumerate(draw(tree, options.count, options.seed), 1):
        if (mutant.path, mutant.operator, mutant.occurrence) in known:
            continue
        if time.monotonic() > end:
            break
        outcome = _try(tree, mutant, text, options.seconds)
        outcomes.append(outcome)
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        console.print(f"{number:4}/{options.count} {mutant.path}:{mutant.line} {outcome.verdict}", markup=False)
    if options.page:
        PAGE.write_text(_page(outcomes, options, commit), encoding="utf-8")
    noticed, judged = (sum(item.verdict in kinds for item in outcomes) for kinds in ((NOTICED,), (NOTICED, SURVIVED)))
    console.print(f"{noticed} of {judged} were noticed; {kept}")
    return 0 if judged and noticed >= 0.9 * judged else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Change the source on purpose, and see whether the tests notice.")
    parser.add_argument("--count", type=int, default=200, help="changes that are drawn")
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument(
        "--seconds", type=int, default=300, help="limit of each run of a change's tests, by the processor's clock"
    )
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no further change is run")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--no-page", dest="page", action="store_false", help="leave the table as it is")
    return parser


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _read(kept: Path) -> list[Outcome]:
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    return [Outcome(**{**data, "mutant": Mutant(**data["mutant"])}) for data in map(json.loads, lines)]


def _copy(tree: Path) -> None:
    """The committed files: what is changed meanwhile changes no result."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)


def _try(tree: Path, mutant: Mutant, text: str, limit_s: int) -> Outcome:
    """Run the tests near a change, and those behind them where these notice nothing."""
    file, start = tree / mutant.path, time.monotonic()
    right = file.read_text(encoding="utf-8")
    verdict, test = SURVIVED, ""
    for tests in near_tests(tree, mutant.path):
        if verdict != SURVIVED or not tests:
            continue
        try:
            file.write_text(text, encoding="utf-8")
            verdict, test = _run(tree, tests, limit_s)
        finally:
            file.write_text(right, encoding="utf-8")
        if verdict == NOTICED and _run(tree, [test], limit_s)[0] != SURVIVED:
            verdict = UNSOUND
    return Outcome(mutant, verdict, test, round(time.monotonic() - start, 1))


def _run(tree: Path, tests: Sequence[str], limit_s: int) -> tuple[str, str]:
    """Whether one of the tests fails, and which. The limit is of processor time: a busy machine decides nothing."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": "ci", "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    process = subprocess.Popen(
        command, cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=partial(resource.setrlimit, resource.RLIMIT_CPU, (limit_s, limit_s)),
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=_WAITING * limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return OVERTIME, ""
    if process.returncode in (0, 5):
        return SURVIVED, ""
    if process.returncode < 0 and not _FAILED.search(output):
        return OVERTIME, ""
    found = _FAILED.search(output)
    return NOTICED, found.group(1) if found else tests[0]


def _page(outcomes: Sequence[Outcome], options: argparse.Namespace, commit: str) -> str:
    by_verdict = {name: [item for item in outcomes if item.verdict == name] for name in (NOTICED, OVERTIME, SURVIVED)}
    noticed, survived = len(by_verdict[NOTICED]), len(by_verdict[SURVIVED])
    late = len(by_verdict[OVERTIME])
    unsound = len(outcomes) - noticed - survived - late
    rows = [
        "# Changes of the source, beside the tests",
        "",
        f"`python -m tests.mutants --count {options.count} --seed {options.seed} --seconds {options.seconds:g}`, "
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, Cosmic Ray {version('cosmic-ray')}, torch {version('torch')}, "
        f"Python {platform.python_version()}.",
        "",
        f"{len(outcomes)} of {options.count} drawn changes were run: "
        f"**{noticed} of {noticed + survived} were noticed**. "
        f"{late} more ran over time, and {unsound} met a test that fails without the change too: they say "
        f"nothing. Tests took {sum(item.seconds for item in outcomes):.0f} s. Without the slow tests, and only "
        "with those near each change: the whole suite notices no fewer.",
        "",
        "| package | run | noticed | not noticed |",
        "|---|---|---|---|",
    ]
    for package in ("autoshard", "passes", "cost_models"):
        own = [item for item in outcomes if item.mutant.path.startswith(package + "/")]
        kinds = [item.verdict == NOTICED for item in own if item.verdict in (NOTICED, SURVIVED)]
        rows.append(f"| {package} | {len(kinds)} | {sum(kinds)} | {len(kinds) - sum(kinds)} |")
    rows += ["", "Not noticed:", "", "| where | before | after |", "|---|---|---|"]
    for item in by_verdict[SURVIVED]:
        cells = (f"`{text.replace('|', chr(92) + '|')}`" for text in (item.mutant.before, item.mutant.after))
        rows.append(f"| {item.mutant.path}:{item.mutant.line} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
