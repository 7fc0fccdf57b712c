"""Wrong pipeline orders for the check of schedules: how many are drawn, refused and harmful.

Run: python -m tests.benchmarks.schedule_campaign [--count 400] [--seed 7]

Every kind of mutation (`tests.passes.schedule_mutations`) is drawn COUNT times, from all schedules of torch in
turn. The orders have two to four ranks with 4 to 12 micro-batches, and run in numbers
(`tests.passes.pipeline_numbers`). The exit status is 1 if a harmful order is accepted, or a right order refused.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from random import Random

from rich.console import Console

from autoshard.ir.pipeline_order import PipelineOrder
from cost_models.schedule_orders import SCHEDULES, admits
from passes.lowering.order_pipeline import order_pipeline
from tests.passes.pipeline_numbers import compute
from tests.passes.schedule_mutations import SCHEDULE_MUTATIONS, is_refused


def draw_order(schedule: str, random: Random) -> PipelineOrder:
    """A right order of the schedule, with a random number of ranks, micro-batches and stages that the
    schedule admits."""
    while True:
        shape = (schedule, random.randint(2, 4), random.randint(4, 12), random.randint(1, 3))
        if admits(*shape):
            return order_pipeline(*shape)


def main(arguments: list[str]) -> int:
    """Print a table, and return 0 if no harmful order was accepted and no right order refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="mutants of each kind")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(arguments)
    console, random, faults = Console(width=120, highlight=False), Random(options.seed), 0
    names = list(SCHEDULES)
    console.print("| mutation | drawn | refused | of these other numbers, or no end | accepted, same numbers |")
    console.print("|---|---|---|---|---|")
    for mutate in SCHEDULE_MUTATIONS:
        found: Counter[tuple[bool, bool]] = Counter()
        for number in range(options.count):
            order = draw_order(names[number % len(names)], random)
            faults += is_refused(order)
            mutant = mutate(order, random)
            found[is_refused(mutant), compute(mutant) != compute(order)] += 1
        faults += found[False, True]
        refused = found[True, True] + found[True, False]
        name = mutate.__name__.replace("_", " ")
        console.print(f"| {name} | {options.count} | {refused} | {found[True, True]} | {found[False, False]} |")
    console.print(f"{faults} wrong orders accepted or right ones refused.")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
