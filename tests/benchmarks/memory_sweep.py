"""Plans from too little to plentiful memory: Llama-3-8B's width, 4 layers, AdamW in bf16, 8 H100s.

Run: python -m tests.benchmarks.memory_sweep [--time-budget 20] [--shares 0.2 0.3 ...] [--layers 4] [--apart] [--json]
     python -m tests.benchmarks.memory_sweep --recipes [--limits 20] [--sequence 4096] [--json]

Limits are shares of the memory of the fastest plan without a limit. The program with all its blocks is traced and
enumerated once. Each search begins with the plan of the previous limit, so no row is slower than the row above. With
--apart each search is independent, and the gap explains a slower row.

With --recipes the recipes of Llama-3 8B for 64 sequences a step are searched. Limits range evenly by ratio from nine
tenths of the least need to the fastest recipe's need. Each search is proven, so no row is slower than the row above.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from autoshard import Cluster, DoesNotFitError, Mesh
from autoshard.ir.execution import Execution
from autoshard.ir.plan import Plan
from autoshard.ir.request import Request
from autoshard.ir.text import format_bytes, format_time
from autoshard.runtime.optimizer_state import named_optimizer
from autoshard.runtime.traced_optimizer import update_of
from passes.driver.fastest_choice import Decision
from passes.driver.plan_and_lower import planning_problem, solve
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.driver.planner import Planner
from passes.planning.build_assignment import PlanningProblem
from passes.solver.search_control import SearchControl
from tests.benchmarks.decoder import Decoder, DecoderShape
from tests.passes.search.problems import recipe_problem

MESH = Mesh({"data": 8})
SHARES = (0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One limit in bytes, with its plan; seconds are None without a plan.

    Args:
        smallest_bytes: the memory that would fit, without a plan.
        gap: largest distance of the objective from its minimum.
        layouts: names of the parameters' layouts, with their shares.
        recomputed, offloaded: numbers of nodes, beside the numbers of candidates.
    """

    limit_bytes: float
    smallest_bytes: int = 0
    step_s: float | None = None
    objective_s: float | None = None
    gap: float | None = None
    peak_bytes: int = 0
    layouts: str = ""
    recomputed: str = ""
    offloaded: str = ""


def llama(layers: int, sequence: int, batch: int) -> tuple[Decoder, torch.Tensor]:
    """Return a decoder as wide as Llama-3 8B and its tokens, on meta."""
    shape = DecoderShape(
        layers=layers, hidden=4096, heads=32, kv_heads=8, head_size=128, ffn=14336, gated=True, vocab=128256,
        sequence=sequence, tied=False, learned_positions=False, norm_bias=False, bias=False, dropout=0.0,
        fused_attention=True,
    )  # fmt: skip
    with torch.device("meta"):
        return Decoder(shape), torch.zeros(batch, sequence, dtype=torch.int64)


def model_problem(cluster: Cluster, sequence: int, layers: int) -> PlanningProblem:
    """The planning problem of a training step."""
    model, tokens = llama(layers, sequence, MESH.size)
    update = update_of(named_optimizer("adamw", model.parameters()), model, None, strict=True)
    planner = Planner(cluster=cluster, precision="bf16")
    program = planner.trace(Request(model, (tokens, tokens), {}, True, update=update))
    return planning_problem(program, MESH, cluster, PlanOptions())


def sweep(
    planning: PlanningProblem, shares: Sequence[float], time_budget_s: float, *, apart: bool = False
) -> Iterator[Row]:
    """A row for each share of the fastest plan's memory, smallest first. With `apart`, each search is independent."""
    options = PlanOptions()
    largest = float(planning.usage(solve(planning, options, {}).solution.choice).max())
    for share in sorted(shares):
        within = replace(options, memory_budget=share * largest, control=SearchControl.within(time_budget_s))
        try:
            found = solve(planning, within, {})
        except DoesNotFitError as error:
            yield Row(share * largest, smallest_bytes=error.smallest_bytes)
        else:
            plan = _plan_of(found, within)
            yield _row(plan, found, within)
            options = options if apart else replace(options, before=plan)


def _plan_of(found: Decision, options: PlanOptions) -> Plan:
    solution, cluster = found.solution, found.planning.prices.cluster
    plan = lowered_plan(found.planning, solution.choice, solution.cost, solution.lower_bound, cluster, options).plan
    return replace(plan, recompute=found.recompute, offload=found.offload)


def _row(plan: Plan, found: Decision, options: PlanOptions) -> Row:
    return Row(
        limit_bytes=options.memory_budget or 0.0,
        step_s=plan.predicted.step_time_s,
        objective_s=plan.objective,
        gap=plan.gap,
        peak_bytes=plan.predicted.peak_memory_bytes,
        layouts=_layouts(plan),
        recomputed=f"{len(found.recompute.nodes)} of {found.recompute.candidates}" if found.recompute.nodes else "",
        offloaded=f"{len(found.offload.nodes)} of {found.offload.candidates}" if found.offload.nodes else "",
    )


def _layouts(plan: Plan) -> str:
    total = sum(plan.layouts.values())
    return ", ".join(f"{count / total:.0%} {words}" for words, count in list(plan.layouts.items())[:3])


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table for the terminal."""
    found = Table("limit", "peak", "step", "objective", "gap", "layouts", "recomputed", "offloaded")
    for row in rows:
        if row.step_s is None or row.objective_s is None:
            least = format_bytes(row.smallest_bytes)
            found.add_row(format_bytes(row.limit_bytes), "-", f"does not fit, the least is {least}")
            continue
        times = (format_time(row.step_s), format_time(row.objective_s))
        gap = "" if row.gap is None else f"{row.gap:.1%}"
        sizes = (format_bytes(row.limit_bytes), format_bytes(row.peak_bytes))
        found.add_row(*sizes, *times, gap, row.layouts, row.recomputed, row.offloaded)
    return found


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """One limit in bytes and the fastest fitting recipe in words; seconds are None without a recipe."""

    limit_bytes: float
    step_s: float | None = None
    peak_bytes: int = 0
    words: str = ""


def sweep_recipes(cluster: Cluster, sequence: int, limits: int) -> Iterator[RecipeRow]:
    """A row for a limit that is too small, and rows for limits from the least need to the fastest recipe's need."""
    model, tokens = llama(32, sequence, 1)
    base = Execution(global_batch=8 * cluster.size)
    problem = recipe_problem(
        model.bfloat16(), cluster, base, example_inputs=(tokens, tokens), memory_limit=math.inf
    )  # fmt: skip
    fastest = problem.best().recipe
    assert fastest is not None, "without a limit something fits"
    least, most = problem.smallest().objective, problem.pricer.memory_bytes(fastest)
    ratio = (most / least) ** (1 / (limits - 1))
    for limit in (_TOO_SMALL * least, *(least * ratio**step for step in range(limits - 1)), float(most)):
        found = problem.within(limit).best()
        if found.recipe is None:
            yield RecipeRow(limit)
        else:
            peak = problem.pricer.memory_bytes(found.recipe)
            yield RecipeRow(limit, found.objective, peak, found.recipe.words)


_TOO_SMALL = 0.9


def recipe_table(rows: Sequence[RecipeRow]) -> Table:
    """The rows of recipes as a table for the terminal."""
    found = Table("limit", "peak", "step", "recipe")
    for row in rows:
        if row.step_s is None:
            found.add_row(format_bytes(row.limit_bytes), "-", "-", "does not fit")
        else:
            sizes = (format_bytes(row.limit_bytes), format_bytes(row.peak_bytes))
            found.add_row(*sizes, format_time(row.step_s), row.words)
    return found


def main() -> None:
    """Sweep and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-budget", type=float, default=20.0)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--recipes", action="store_true")
    parser.add_argument("--limits", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    console, cluster = Console(), Cluster("h100_sxm")
    if asked.recipes:
        found = list(sweep_recipes(cluster, asked.sequence, asked.limits))
        shown = recipe_table(found)
    else:
        planning = model_problem(cluster, asked.sequence, asked.layers)
        found = list(sweep(planning, asked.shares, asked.time_budget, apart=asked.apart))
        shown = table(found)
    if asked.json:
        console.print_json(json.dumps([asdict(row) for row in found]))
    else:
        console.print(shown)


if __name__ == "__main__":
    main()
