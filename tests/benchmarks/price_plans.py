"""Price saved plans of `plan_cases` by this tree: step and memory of the lowered programs.

Run: python -m tests.benchmarks.price_plans FOLDER --out priced.jsonl [--only llama3-8b ...]

The folder has files of `plan_cases --plans FOLDER` from this or an older tree. Nothing is searched: the file gives
specs, recomputation, stages and order. One composition thus prices the choices of two trees; pass the file to
`plan_cases --beside`. A plan of another tree may need more memory here than its limit there.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from autoshard import AutoshardError
from autoshard.call import Call
from autoshard.ir.plan import SCHEMA_VERSION, Plan
from autoshard.ir.plan_parts import UNKNOWN
from autoshard.ir.request import Request
from autoshard.runtime.optimizer_state import named_optimizer
from autoshard.runtime.traced_optimizer import update_of
from autoshard.tracing import without
from cost_models.streams import overlap_of, simulate_streams
from passes.driver.candidates import with_batch
from passes.driver.pipelines import pipeline_of
from passes.driver.planner import Planner
from passes.driver.planner_for import planner_for
from passes.driver.stage_plans import StagePlans
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.memory.lowered_memory import peak_bytes
from passes.prediction.predict_pipeline import predict_pipeline
from passes.prediction.walk_program import walk_program
from passes.strategies.price_nodes import NodePrices
from tests.benchmarks.plan_cases import PlanCase, PlannedCase, cases

_GONE = ("forecast",)
"""Fields of plans in files of older trees."""


def read_plan(path: Path) -> Plan:
    """The plan of a file, without its prediction. The file may be from an older tree."""
    return Plan.from_json(_of_this_tree(json.loads(path.read_text())))


def _of_this_tree(data: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in data.items() if name not in _GONE}
    stages = [_of_this_tree(stage) for stage in data["stages"]]
    return {
        **found,
        "autoshard_plan": SCHEMA_VERSION,
        "predicted": UNKNOWN.to_json(),
        "timeline": None,
        "stages": stages,
    }


def priced(case: PlanCase, plan: Plan) -> tuple[float, int]:
    """Seconds of the step and bytes of the fullest rank of a case's plan, as its programs are lowered here."""
    model, inputs = case.built()
    optimizer = named_optimizer("adamw", model.parameters())
    call = Call(
        model=model, target=case.cluster, example_inputs=inputs, optimizer=optimizer, precision="bf16", verify=False,
        cluster=case.cluster, memory_budget=plan.memory_budget,
    )  # fmt: skip
    update = update_of(optimizer, model, None, strict=False)
    planner = replace(planner_for(call, update, torch.device("cpu")), micro_batches=plan.micro_batches)
    args, kwargs = call.inputs
    whole = Request(model, args, kwargs, call.grad, update=update, outputs=call.outputs)
    request = with_batch(whole, case.batch // plan.micro_batches)
    return _priced_stages(planner, request, plan) if plan.stages else _priced_program(planner, request, plan)


def _priced_program(planner: Planner, request: Request, plan: Plan) -> tuple[float, int]:
    program = planner.trace(replace(request, model=without(request.model, plan.repeats)))
    program = replace(program, repeats=plan.repeats)
    cluster, parts = planner.cluster_for(plan.mesh), plan.micro_batches
    phased = lower_program(program, plan, cluster, LoweringOptions(micro_batches=parts))
    walked = walk_program(phased, NodePrices(cluster, plan.mesh), parts)
    times = simulate_streams(walked.segments, overlap_of(cluster), dispatch_s=cluster.device.dispatch("eager"))
    return times.total_s, peak_bytes(phased, parts)


def _priced_stages(planner: Planner, request: Request, plan: Plan) -> tuple[float, int]:
    assert plan.order is not None, "it is a plan of stages"
    pipeline = pipeline_of(plan.mesh, plan.schedule, plan.order.virtual_stages, plan.micro_batches)
    assert pipeline is not None, "an axis carries stages"
    program = planner.trace(replace(request, update=None))
    staged = StagePlans(planner, pipeline).lower(program, plan, request)[0]
    found = predict_pipeline(staged, plan.mesh, planner.cluster_for(plan.mesh), clips_norm=False).whole
    return found.step_time_s, found.peak_memory_bytes


def priced_case(case: PlanCase, plan: Plan) -> PlannedCase:
    """The price of a case's plan as a row of `plan_cases`."""
    start, words, step_s, peak = time.process_time(), f"{plan.mesh}", math.inf, 0
    try:
        step_s, peak = priced(case, plan)
        limit = plan.memory_budget
        words += f"; {plan.recipe.words}" if plan.recipe is not None else ""
        words += f"; {peak / limit:.3f} of its memory" if limit is not None and peak > limit else ""
    except AutoshardError as error:
        words = f"{type(error).__name__}: {error}"
    return PlannedCase(case.name, step_s, peak, time.process_time() - start, 0, 0.0, len(plan.stages), words)


def main() -> None:
    """Price the plans of a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.price_plans")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file to which a line of JSON is added for each plan")
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in cases():
        path = options.folder / case.file
        if path.exists() and case.name.startswith(tuple(options.only)):
            row = priced_case(case, read_plan(path))
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
