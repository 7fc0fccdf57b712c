"""`python -m tests.zoo [--only PATTERN ...] [--sample COUNT]`: run architectures, and write
`tests/zoo/results.md`.

Each architecture runs in its own process with limits of time and memory. A process that hangs or is killed is a row
of the table. `results.json` keeps the results of architectures that do not run this time. A sample is drawn by the
date, and leaves the page unchanged.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from tests.zoo.check import Result
from tests.zoo.processes import Limits, run_all
from tests.zoo.report import markdown, rich_table
from tests.zoo.table import ARCHITECTURES

PAGE = Path(__file__).with_name("results.md")
KEPT = Path(__file__).with_name("results.json")


def main(arguments: list[str]) -> int:
    """Run the chosen architectures, and return 0 if all passed."""
    options = _parser().parse_args(arguments)
    names = [name for name in ARCHITECTURES if any(fnmatch.fnmatchcase(name, pattern) for pattern in options.only)]
    missing = {ARCHITECTURES[name].library for name in names if not ARCHITECTURES[name].library.is_installed}
    wanted, names = names, [name for name in names if ARCHITECTURES[name].library not in missing]
    if options.sample:
        names = sample(names, options.sample, time.strftime("%Y-%m-%d"))
    limits = Limits(options.seconds, options.search_seconds, options.gigabytes)
    console = Console(soft_wrap=True)
    results: list[Result] = []
    for result in run_all(names, limits, options.jobs):
        results.append(result)
        verdict = "passed" if result.passed else f"{result.stage}: {result.reason}"
        console.print(f"{len(results):4}/{len(names)} {result.name}: {verdict}", markup=False, highlight=False)
        if options.tracebacks and result.traceback:
            console.print(result.traceback, markup=False, highlight=False)
        if not options.sample:
            _write(result)
    results.sort(key=lambda result: names.index(result.name))
    console.print(rich_table(results))
    if missing:
        libraries = ", ".join(sorted(missing))
        console.print(f"not run, for want of {libraries} (`make zoo` installs them): {sorted({*wanted} - {*names})}")
    return 0 if not missing and all(result.passed for result in results) else 1


def sample(names: Sequence[str], count: int, date: str) -> list[str]:
    """Some of the names, in their order. A date always gives the same names."""
    drawn = set(random.Random(date).sample(list(names), min(count, len(names))))
    return [name for name in names if name in drawn]


def _write(result: Result) -> None:
    """Add a result to the kept results, and write the page. A lock keeps two runs at once from losing a result."""
    with PAGE.open("a") as page:
        fcntl.flock(page, fcntl.LOCK_EX)
        _write_locked(result)


def _write_locked(result: Result) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[result.name] = asdict(result) | {"traceback": "", "revision": _revision()}
    kept = {name: kept[name] for name in ARCHITECTURES if name in kept}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(markdown([Result(**fields) for fields in kept.values()], list(ARCHITECTURES)))


def _revision() -> str:
    """Return the commit of the checkout, or an empty string."""
    command = ["git", "-C", str(PAGE.parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", nargs="*", default=["*"], help="globs of names")
    parser.add_argument("--sample", type=int, default=0, help="how many of them to draw, by the date; 0: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each architecture")
    parser.add_argument("--search-seconds", type=float, default=5.0, help="of these, for the search")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="for each architecture")
    parser.add_argument("--tracebacks", action="store_true", help="print where each that failed did")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
