"""Compare tens of thousands of drawn programs and plans with one device, in parts of a night's work.

Run: python -m tests.nightly [--first 0] [--shards 300] [--examples 40] [--jobs 2] [--minutes 480] [--folder FOLDER]

A shard is a property (`tests.end_to_end.drawn_pairs`) with the seed of its number and a number of examples. An example
is a program with up to eight plans, because tracing takes longer than lowering. FOLDER keeps each shard's result, and
only missing shards run. No shard begins after the minutes are over.

The exit status is 1 if an example differs. The report names the files with the smallest examples, as code to run. Each
failure becomes a test of its own (`tests/end_to_end/test_found_by_drawing.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.end_to_end.drawn_pairs import PROPERTIES

_MOST_PLANS = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """The result of one shard.

    Args:
        number: its seed.
        name: the property.
        pairs: number of pairs that computed one device's numbers, with the pairs of shrinking.
        seconds: seconds on one core.
        failure: the smallest failing example and its error, or "".
    """

    number: int
    name: str
    pairs: int
    seconds: float
    failure: str = ""


def run_shard(number: int, examples: int) -> Shard:
    """Run the examples of one shard, whose number selects the property."""
    name = list(PROPERTIES)[number % len(PROPERTIES)]
    start, passed, failure = time.process_time(), [0], ""
    try:
        _drawing(PROPERTIES[name], number, examples, passed)()
    except Exception as error:  # noqa: BLE001  (whatever a drawn program raises is what is looked for)
        failure = "".join(traceback.format_exception(error))
    return Shard(number, name, passed[0], round(time.process_time() - start, 1), failure)


def _drawing(
    check: Callable[[st.DataObject, int], int], number: int, examples: int, passed: list[int]
) -> Callable[[], None]:
    """The property as a Hypothesis test. The pairs that pass are added to `passed`."""

    @seed(number)
    @settings(
        settings.get_profile("default"),
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        passed[0] += check(data, _MOST_PLANS)

    return run


def main(arguments: Sequence[str]) -> int:
    """Run the missing shards, and return 0 if every example passed."""
    options = _parser().parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=120, highlight=False)
    deadline = time.time() + 60 * options.minutes
    work = partial(_run_or_read, examples=options.examples, folder=options.folder, deadline=deadline)
    found = []
    for shard in _map(work, range(options.first, options.first + options.shards), options.jobs):
        if shard is not None:
            found.append(shard)
            verdict = "FAILED" if shard.failure else "passed"
            console.print(f"{shard.number:5} {shard.name}: {shard.pairs} pairs in {shard.seconds} s, {verdict}")
    failed = [shard for shard in found if shard.failure]
    console.print(
        f"{sum(shard.pairs for shard in found)} pairs in {len(found)} of {options.shards} shards equal one device."
    )
    for shard in failed:
        console.print(f"{_path(options.folder, shard.number, options.examples).with_suffix('.txt')}: {shard.name}")
    return int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first shard")
    parser.add_argument("--examples", type=int, default=40, help="programs of each shard")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=480.0, help="when no further shard begins")
    parser.add_argument("--folder", type=Path, default=Path("build/nightly"), help="where shards are kept")
    return parser


def _map(work: Callable[[int], Shard | None], numbers: Sequence[int], jobs: int) -> Iterator[Shard | None]:
    if jobs == 1:
        yield from map(work, numbers)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, numbers)


def _path(folder: Path, number: int, examples: int) -> Path:
    return folder / f"{number:05} {examples}.json"


def _run_or_read(number: int, *, examples: int, folder: Path, deadline: float) -> Shard | None:
    """The stored result of a shard, or the result of running it. None if it would begin after the deadline."""
    path = _path(folder, number, examples)
    if not path.exists():
        if time.time() > deadline:
            return None
        torch.set_num_threads(1)
        shard = run_shard(number, examples)
        if shard.failure:
            path.with_suffix(".txt").write_text(shard.failure)
        path.write_text(json.dumps(asdict(shard), indent=1))
    return Shard(**json.loads(path.read_text()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
