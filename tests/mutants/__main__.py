"""Change the source on purpose, one place at a time, and see whether the tests notice.

Run: python -m tests.mutants [--count 200] [--seed 13] [--seconds 90] [--minutes 600] [--folder build/mutants]

1. The first of all possible changes are drawn; a commit changes the draw only where it changes the source (`draw`).
2. Each is made in a copy of the committed files, with only the tests that can notice it (`near_tests`), without the
   slow ones. It counts as noticed where one of them fails, or hangs, that passes without the change.
3. Outcomes are kept beside the other results, and committed: what was noticed is not run again, what was not is where
   the tests near it have changed since. A run goes on where the last one stopped, and the table is made of all.
4. Changes in `equivalent.json` mean the same, so no test can notice them; it says why. The rate is given with them and
   without.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from rich.console import Console

from tests.mutants.draw import PACKAGES, Key, Mutant, draw
from tests.mutants.near_tests import near_tests
from tests.mutants.run_tests import failed_test, prepare

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
KEPT, PAGE = RESULTS / "mutants.jsonl", RESULTS / "mutants.md"
EQUIVALENT = Path(__file__).parent / "equivalent.json"

NOTICED, SURVIVED, UNSOUND = "noticed", "survived", "fails without the change too"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a mutant.

    Args:
        first: the verdict of its first run, before tests were written for it.
        test: the one that failed.
        tests: a digest of the tests near it.
        seconds: by the wall's clock.
    """

    mutant: Mutant
    verdict: str
    first: str
    test: str
    tests: str
    commit: str
    seconds: float


def main(arguments: list[str]) -> int:
    """Run what must be, and write the table; 0 if nine of ten were noticed."""
    options = _parser().parse_args(arguments)
    tree, console = options.folder / "tree", Console(soft_wrap=True, highlight=False)
    commit = _copy(tree)
    known, same = read_outcomes(), read_equivalent()
    drawn = {mutant.key: (mutant, text) for mutant, text in draw(tree, options.count, options.seed)}
    waiting = [key for key in drawn if key not in known]
    waiting += [key for key in drawn if key in known and key not in same and _must_run_again(tree, known[key])]
    trial, end = Trial(tree, commit, options.seconds), time.monotonic() + 60 * options.minutes
    prepare()
    for number, key in enumerate(waiting, 1):
        if time.monotonic() > end:
            break
        outcome = trial.run(*drawn[key])
        known[key] = replace(outcome, first=known[key].first if key in known else outcome.verdict)
        _write(known.values())
        mutant = outcome.mutant
        console.print(f"{number}/{len(waiting)} {mutant.path}:{mutant.line} {outcome.verdict}", markup=False)
    outcomes = [replace(known[key], mutant=mutant) for key, (mutant, _) in drawn.items() if key in known]
    PAGE.write_text(_page(outcomes, same, options), encoding="utf-8")
    noticed, judged = _noticed(item.verdict for item in outcomes if not _means_the_same(item, same))
    console.print(f"{noticed} of {judged} were noticed")
    return 0 if judged and noticed >= 0.9 * judged else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Change the source on purpose, and see whether the tests notice.")
    parser.add_argument("--count", type=int, default=200, help="changes that are drawn")
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--seconds", type=float, default=90.0, help="of the processor, for the tests of each step")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no further change is run")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    return parser


def _copy(tree: Path) -> str:
    """Bring the tree to the last commit: what is changed meanwhile changes no result."""
    if not tree.exists():
        subprocess.run(["git", "clone", "-q", "--no-checkout", str(ROOT), str(tree)], check=True)
    _git(tree, "fetch", "-q", "origin", "HEAD")
    _git(tree, "checkout", "-q", "--force", "--detach", "FETCH_HEAD")
    return _git(tree, "rev-parse", "--short", "HEAD")


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def read_outcomes() -> dict[Key, Outcome]:
    """Read the outcomes of mutants so far."""
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    found = [Outcome(**{**data, "mutant": Mutant(**data["mutant"])}) for data in map(json.loads, lines)]
    return {item.mutant.key: item for item in found}


def read_equivalent() -> dict[Key, str]:
    """Mutants that no input tells from the source, each with the reason."""
    found = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return {(item["path"], item["operator"], item["place"]): item["reason"] for item in found}


def _means_the_same(outcome: Outcome, same: Mapping[Key, str]) -> bool:
    return outcome.verdict == SURVIVED and outcome.mutant.key in same


def _write(outcomes: Iterable[Outcome]) -> None:
    lines = sorted(json.dumps(asdict(item)) for item in outcomes)
    KEPT.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _must_run_again(tree: Path, outcome: Outcome) -> bool:
    return outcome.verdict != NOTICED and outcome.tests != _digest(tree, near_tests(tree, outcome.mutant.path))


def _digest(tree: Path, tests: Sequence[Sequence[str]]) -> str:
    texts = [name.encode() + (tree / name).read_bytes() for name in chain(*tests) if name.startswith("tests/")]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


class Trial:
    """Runs mutants in a tree, and remembers which tests pass without any."""

    def __init__(self, tree: Path, commit: str, limit_s: float) -> None:
        self.tree, self.commit, self.limit_s = tree, commit, limit_s
        self.right: set[str] = set()

    def run(self, mutant: Mutant, text: str) -> Outcome:
        """Run the tests near a change, and those behind them where these notice nothing."""
        start, tests = time.monotonic(), near_tests(self.tree, mutant.path)
        test = next(filter(None, (self._failed(mutant, text, step) for step in tests if step)), None)
        verdict = SURVIVED if test is None else NOTICED if self._passes(test) else UNSOUND
        seconds, digest = round(time.monotonic() - start, 1), _digest(self.tree, tests)
        return Outcome(mutant, verdict, verdict, test or "", digest, self.commit, seconds)

    def _failed(self, mutant: Mutant, text: str, tests: Sequence[str]) -> str | None:
        """Which of the tests fails. The file is put back as old as it was, so that compiled ones stay right."""
        file = self.tree / mutant.path
        right, stat = file.read_text(encoding="utf-8"), file.stat()
        try:
            file.write_text(text, encoding="utf-8")
            return failed_test(self.tree, tests, self.limit_s)
        finally:
            file.write_text(right, encoding="utf-8")
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def _passes(self, test: str) -> bool:
        if test not in self.right and failed_test(self.tree, [test], self.limit_s) is None:
            self.right.add(test)
        return test in self.right


def _noticed(verdicts: Iterable[str]) -> tuple[int, int]:
    """How many were noticed, of how many that say something."""
    kinds = [verdict == NOTICED for verdict in verdicts if verdict != UNSOUND]
    return sum(kinds), len(kinds)


def _page(outcomes: Sequence[Outcome], same: Mapping[Key, str], options: argparse.Namespace) -> str:
    noticed, judged = _noticed(item.verdict for item in outcomes)
    first, judged_first = _noticed(item.first for item in outcomes)
    equivalent = [item for item in outcomes if _means_the_same(item, same)]
    commits = list(dict.fromkeys(item.commit for item in outcomes))
    rows = [
        "# Changes of the source, beside the tests",
        "",
        f"`python -m tests.mutants --count {options.count} --seed {options.seed} --seconds {options.seconds:g}`, "
        f"{datetime.now(UTC):%Y-%m-%d}, Cosmic Ray {version('cosmic-ray')}, torch {version('torch')}, "
        f"Python {platform.python_version()}; each at one of the commits {', '.join(sorted(commits))} "
        "(`mutants.jsonl` says which, and which test failed).",
        "",
        f"{len(outcomes)} of {options.count} drawn changes were run: **{noticed} of {judged} were noticed "
        f"({_percent(noticed, judged)})**; {first} of {judged_first} at their first run, before tests were written for "
        f"what was not. {len(equivalent)} of those not noticed mean the same as the source; of the rest, {noticed} of "
        f"{judged - len(equivalent)} were noticed ({_percent(noticed, judged - len(equivalent))}). "
        f"{len(outcomes) - judged} more met a test that fails without the change too. "
        f"Tests took {sum(item.seconds for item in outcomes):.0f} s, without the slow ones, and only with those near "
        "each change: the whole suite notices no fewer.",
        "",
        "| package | run | noticed | not noticed |",
        "|---|---|---|---|",
    ]
    for package in PACKAGES:
        found, of = _noticed(item.verdict for item in outcomes if item.mutant.path.startswith(package + "/"))
        rows.append(f"| {package} | {of} | {found} | {of - found} |")
    rows += ["", "Not noticed:", "", "| where | before | after |", "|---|---|---|"]
    rows += [f"| {_cells(item)} |" for item in outcomes if item.verdict == SURVIVED and item not in equivalent]
    rows += ["", "Mean the same:", "", "| where | before | after | reason |", "|---|---|---|---|"]
    rows += [f"| {_cells(item)} | {same[item.mutant.key]} |" for item in equivalent]
    return "\n".join(rows) + "\n"


def _percent(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.1%}"


def _cells(outcome: Outcome) -> str:
    """The change's place, its text before, and its text after, as cells of a table."""
    mutant = outcome.mutant
    texts = (f"`{text.replace('|', chr(92) + '|')}`" for text in (mutant.before, mutant.after))
    return " | ".join((f"{mutant.path}:{mutant.line}", *texts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
