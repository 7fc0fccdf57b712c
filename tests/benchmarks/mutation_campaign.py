"""Wrong programs against the verifier: no program with other numbers is accepted, and no right program refused.

Run: python -m tests.benchmarks.mutation_campaign --count 5000 --seed 0 [--jobs 2] [--family gpt] [--layout tensor ...]
     [--folder FOLDER] [--out PAGE]

Programs are `tests.passes.families` under `tests.passes.layouts`, and `tests.passes.mutants` draws mutants. The
verifier judges first. An accepted mutant runs on the simulator beside the right program, in float64 on random inputs
with NaN in all padding. Mutants of phases run two micro-batches.

One in ten refused mutants runs, to count the harmful mutants. Programs with kernels or a precision run in float32 and
bfloat16, and any rounding counts as a change. A part is one program. FOLDER keeps its results, and finished parts do
not run. The page is printed, and written with --out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random

os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is decorated

import torch
from rich.console import Console
from rich.markdown import Markdown

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.program import Program
from passes.verification.local_forms import LocalForms
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_preparation import verify_preparation
from passes.verification.verify_program import verify_program
from tests.passes.families import FAMILIES
from tests.passes.layouts import LAYOUTS, phased_of, program_of
from tests.passes.mutant_runs import Run, run_of
from tests.passes.mutants import Mutant, draw_mutant, mutate_order

Proven = tuple[PhasedProgram, Program, Run]
"""A right program, its trace, and its results on random inputs."""

SAMPLED = 10
"""Refused mutants for each run mutant."""

ORDERS = 20
"""Mutants of a whole step for each mutant of the order of micro-batches."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """Programs, and the drawing of their mutants.

    Args:
        name: name of the running module, and of its page.
        title: title of the page.
        count: default number of mutants.
        sampled: one in this many refused mutants is run.
        families, layouts: each family under each layout is a program.
        prove: makes and proves a program.
        draw: a mutant of a family under a layout, and its number.
    """

    name: str
    title: str
    count: int
    sampled: int
    families: Sequence[str]
    layouts: Sequence[str]
    prove: Callable[[str, str], Proven]
    draw: Callable[[str, str, int, Random], Mutant]


@dataclass(slots=True)
class Part:
    """The outcome of the mutants of one program.

    Args:
        drawn, accepted, run, changing: numbers for each place and kind of mutants: drawn, accepted by the verifier, run
            although refused, and harmful among the run mutants.
        holes: accepted mutants that compute other numbers.
        seconds: seconds of verifying and running mutants, without making the program.
    """

    family: str
    layout: str
    nodes: int = 0
    drawn: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    run: Counter[str] = field(default_factory=Counter)
    changing: Counter[str] = field(default_factory=Counter)
    holes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, mutant: Mutant, name: str, refused: bool, changes: bool | None) -> None:
        """Count a mutant; `changes` is None for a mutant that was not run."""
        kind = f"{mutant.place} {mutant.kind}"
        self.drawn[kind] += 1
        self.accepted[kind] += not refused
        self.run[kind] += refused and changes is not None
        self.changing[kind] += refused and bool(changes)
        if changes and not refused:
            self.holes.append(f"{name}: {kind}: {mutant.what}")


def attack(
    family: str,
    layout: str,
    count: int,
    seed: int,
    *,
    first: int = 0,
    sampled: int | None = None,
    campaign: Campaign | None = None,
) -> Part:
    """Draw mutants `first` to `first + count` of one program; the right program must be accepted.

    One in `sampled` refused mutants runs, by default the campaign's number.

    Raises:
        VerificationError: the right program was refused.
    """
    campaign = campaign or OF_COMPILING
    sampled = sampled or campaign.sampled
    phased, traced, run = campaign.prove(family, layout)
    part, forms = Part(family, layout, len(phased.lowered.graph_module.graph.nodes)), LocalForms(phased.lowered.mesh)
    start = time.perf_counter()
    for number in range(first, first + count):
        name = f"{seed}, {family}, {layout}, {number}"
        mutant = campaign.draw(family, layout, number, Random(name))
        refused = mutant.is_refused(traced, forms)
        is_run = not refused or number % sampled == 0
        part.add(mutant, name, refused, run.is_changed_by(mutant) if is_run else None)
    part.seconds = time.perf_counter() - start
    return part


def _draw(family: str, layout: str, number: int, random: Random) -> Mutant:
    """Draw a mutant of a program; some mutants of programs with updates change the order of micro-batches."""
    phased = phased_of(family, layout)
    of_order = mutate_order(phased, random) if number % ORDERS == ORDERS - 1 else None
    return of_order or draw_mutant(phased, random)


def prove(family: str, layout: str) -> Proven:
    """Return a proven right program with its trace and its results on random inputs."""
    return proven(family, phased_of(family, layout), program_of(family, layout))


def proven(family: str, phased: PhasedProgram, traced: Program) -> Proven:
    """A proven program of a family, with its trace and its results on random inputs."""
    verify_preparation(traced, phased.lowered.traced)
    verify_program(phased.lowered.traced, phased.lowered, phased.carried)
    verify_phases(phased)
    torch.manual_seed(0)
    _, examples = FAMILIES[family]()
    return phased, traced, run_of(phased, examples)


OF_COMPILING = Campaign(
    name="mutation_campaign",
    title="Mutants beside the verifier",
    count=5000,
    sampled=SAMPLED,
    families=tuple(FAMILIES),
    layouts=tuple(LAYOUTS),
    prove=prove,
    draw=_draw,
)


def main(arguments: list[str], campaign: Campaign = OF_COMPILING) -> int:
    """Run a campaign, and return 0 if the verifier accepted no mutant that computes other numbers."""
    options = _parser(campaign).parse_args(arguments)
    families = [family for family in campaign.families if options.family in ("", family)]
    parts = list(product(families, options.layout or campaign.layouts))
    counts = [options.count // len(parts) + (index < options.count % len(parts)) for index in range(len(parts))]
    options.folder.mkdir(parents=True, exist_ok=True)
    work = partial(_attack_or_read, seed=options.seed, folder=options.folder, campaign=campaign)
    tasks = zip(*((*part, count) for part, count in zip(parts, counts, strict=True)), strict=True)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(work, *tasks))
    page = report(found, options.seed, campaign)
    Console(width=120).print(Markdown(page))
    if options.out is not None:
        options.out.write_text(page)
    return int(any(part.holes for part in found))


def _parser(campaign: Campaign) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    page = f"tests/benchmarks/results/{campaign.name}.md"
    folder = Path(f"build/{campaign.name}")
    parser.add_argument("--count", type=int, default=campaign.count, help="mutants in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--family", default="", choices=("", *campaign.families), help="only this one")
    parser.add_argument("--layout", nargs="*", choices=campaign.layouts, help="only these")
    parser.add_argument("--out", type=Path, help=f"write a page, e.g. {page}")
    parser.add_argument("--folder", type=Path, default=folder, help="where parts are kept")
    return parser


def _attack_or_read(
    family: str, layout: str, count: int, *, seed: int, folder: Path, campaign: Campaign = OF_COMPILING
) -> Part:
    torch.set_num_threads(1)
    path = folder / f"{family}, {layout}, {count}, {seed}.json"
    if not path.exists():
        part = attack(family, layout, count, seed, campaign=campaign)
        path.write_text(json.dumps({item.name: getattr(part, item.name) for item in fields(Part)}, indent=1))
    found = Part(**json.loads(path.read_text()))
    for name in _COUNTED:
        setattr(found, name, Counter(getattr(found, name)))
    Console().print(f"{family}, {layout}: {count} in {found.seconds:.0f} s, {len(found.holes)} holes")
    return found


_COUNTED = ("drawn", "accepted", "run", "changing")


def report(parts: list[Part], seed: int, campaign: Campaign) -> str:
    """The page of results in Markdown."""
    total = {name: sum((getattr(part, name) for part in parts), Counter()) for name in _COUNTED}
    sums = {name: sum(counts.values()) for name, counts in total.items()}
    holes = [hole for part in parts for hole in part.holes]
    lines = [
        f"# {campaign.title}",
        "",
        f"`python -m tests.benchmarks.{campaign.name}`, seed {seed}, {time.strftime('%Y-%m-%d')}, torch "
        f"{torch.__version__}.",
        "",
        f"{sums['drawn']} mutants of {len(parts)} programs ({len({part.family for part in parts})} families under "
        f"{len({part.layout for part in parts})} layouts); "
        f"**{len(holes)} that compute another number were accepted**, and none of the {len(parts)} right programs was "
        f"refused. {sums['accepted']} were accepted and compute the same numbers. Of {sums['run']} refused ones that "
        f"were run, {sums['changing']} compute another number, and {sums['run'] - sums['changing']} do not. "
        f"{sum(part.seconds for part in parts):.0f} s of one core that other work shared.",
        "",
        *(f"* accepted, and wrong: {hole}" for hole in holes),
        *([""] if holes else []),
        "| mutation of | kind | drawn | refused | accepted, same numbers | refused ones run | of these changing |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {kind.rpartition(' ')[0]} | {kind.rpartition(' ')[2].replace('_', ' ')} | {count} | "
            f"{count - total['accepted'][kind]} | {total['accepted'][kind]} | {total['run'][kind]} | "
            f"{total['changing'][kind]} |"
            for kind, count in sorted(total["drawn"].items())
        ),
        "",
        "| family | layout | nodes | drawn | accepted, same numbers |",
        "|---|---|---|---|---|",
        *(
            f"| {part.family} | {part.layout} | {part.nodes} | {sum(part.drawn.values())} | "
            f"{sum(part.accepted.values()) - len(part.holes)} |"
            for part in parts
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
