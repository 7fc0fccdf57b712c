"""The prediction of a plan, from one simulated step: times, memory, utilisation, interval and trace."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import NotAvailableError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import Prediction
from autoshard.ir.spec import P, PartitionSpec
from autoshard.tracing import trace
from cost_models.hardware import Cluster
from cost_models.intervals import Uncertainty
from cost_models.order_times import neighbours, order_times
from cost_models.schedule_orders import order_rows
from passes.driver.plan_and_lower import plan_program, planning_problem
from passes.driver.plan_options import PlanOptions
from passes.driver.planner import Planner
from passes.planning.build_assignment import PlanningProblem
from passes.planning.constraints import allowed_options
from passes.planning.search import Search
from passes.prediction import predict as predict_module
from passes.prediction.predict import HOST, trace_of
from tests.ir.test_trace import check_trace_events
from tests.passes.blocks import blocks_program, h100s
from tests.passes.drawn_choices import drawn_choice, predicted

DATA_PARALLEL = {"*.up.weight": P(), "*.down.weight": P(), "input:0": P("x")}
HIDDEN, LENGTH, BATCH, COUNT, RANKS = 1024, 512, 256, 4, 8


@cache
def planning_of() -> PlanningProblem:
    """Return the planning problem of four wide blocks on eight GPUs of one node."""
    mesh = Mesh({"x": RANKS})
    program = blocks_program(batch=BATCH, length=LENGTH, hidden=HIDDEN, count=COUNT)
    return planning_problem(program, mesh, h100s(mesh), PlanOptions(state_bytes_per_parameter_byte=2))


def choice_of(constraints: dict[str, PartitionSpec]) -> list[int]:
    """The best choice under constraints."""
    planning = planning_of()
    return list(Search(None, 30.0)(planning, allowed_options(planning, constraints)).choice)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
def test_breakdowns_add_up(seed: int) -> None:
    """For a drawn plan, the breakdowns sum to the step time and to the peak memory, eagerly and as a CUDA graph."""
    planning = planning_of()
    for dispatch in ("eager", "graph"):
        found = predicted(planning, drawn_choice(planning, seed), dispatch=dispatch)
        assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)
        assert sum(found.memory_breakdown.values()) == found.peak_memory_bytes


def test_fused_kernels_and_micro_batches_are_of_the_whole_step() -> None:
    """With Triton's kernels, a step of four micro-batches takes between 2 and 4.4 times the step of one."""
    mesh = Mesh({"x": 2})
    program = blocks_program(batch=8, length=64, hidden=64, count=2)
    one, four = (
        plan_program(program, mesh, h100s(mesh), PlanOptions(micro_batches=count, with_kernels=True)).predicted
        for count in (1, 4)
    )
    assert 2 < four.step_time_s / one.step_time_s < 4.4


def test_small_operators_wait_for_the_host() -> None:
    """Small operators wait for their launches by the host, and take less time as a CUDA graph.

    Large operators in a graph hardly wait.
    """
    mesh = Mesh({"x": 2})
    planning = planning_problem(blocks_program(), mesh, h100s(mesh), PlanOptions())
    choice = [0] * len(planning.members)
    eager, graph = (predicted(planning, choice, dispatch=dispatch) for dispatch in ("eager", "graph"))
    assert eager.breakdown[HOST] > 0.3 * eager.step_time_s
    assert graph.step_time_s < eager.step_time_s
    large = predicted(planning_of(), choice_of(DATA_PARALLEL), dispatch="graph")
    assert large.breakdown[HOST] < 1e-3 * large.step_time_s


def test_a_device_that_is_its_own_host_never_waits() -> None:
    """On a CPU, the prediction has no waits for the host."""
    mesh = Mesh({"x": 2})
    cluster = Cluster("cpu_laptop", nodes=1, devices_per_node=2)
    planning = planning_problem(blocks_program(), mesh, cluster, PlanOptions())
    assert HOST not in predicted(planning, [0] * len(planning.members)).breakdown


def test_utilisation_counts_the_products_of_the_model() -> None:
    """MFU counts six FLOPs for each parameter and row, over the peak of all ranks.

    HFU is equal if no work is repeated.
    """
    found = predicted(planning_of(), choice_of(DATA_PARALLEL), dispatch="graph")
    flops = 6 * COUNT * 8 * HIDDEN**2 * BATCH * LENGTH
    expected = flops / (RANKS * h100s(Mesh({"x": RANKS})).device.peak("bf16") * found.step_time_s)
    assert found.mfu == pytest.approx(expected)
    assert found.hfu == pytest.approx(found.mfu)


def test_work_that_every_rank_repeats_counts_for_the_hardware_only() -> None:
    """If each of eight ranks runs the whole model, the HFU is eight times the MFU."""
    planning = planning_of()
    whole = [
        next(i for i, s in enumerate(planning.space.sites[group[0]].strategies) if not any(s.choices))
        for group in planning.members
    ]
    found = predicted(planning, whole, dispatch="graph")
    assert found.mfu is not None
    assert found.hfu == pytest.approx(RANKS * found.mfu)


def test_the_interval_is_about_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval contains the step time if the device's uncertainty is known. Otherwise the interval is None."""
    monkeypatch.setattr(predict_module, "step_time_uncertainty", lambda kind: Uncertainty(0.1, 0.9))
    found = predicted(planning_of(), choice_of(DATA_PARALLEL))
    assert found.step_time_interval_s is not None
    low, high = found.step_time_interval_s
    assert low < found.step_time_s < high
    assert found.interval_coverage == 0.9
    monkeypatch.setattr(predict_module, "step_time_uncertainty", lambda kind: None)
    assert predicted(planning_of(), choice_of(DATA_PARALLEL)).step_time_interval_s is None


def test_a_plan_writes_its_trace(tmp_path: Path) -> None:
    """The trace file of a plan has events of computation and of the node's links, which end with the step."""
    plan = _plan()
    plan.trace(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    check_trace_events(document)
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in complete} == {"compute", "node"}
    end_us = max(event["ts"] + event["dur"] for event in complete)
    assert end_us == pytest.approx(plan.predicted.step_time_s * 1e6, rel=1e-4)


def test_a_pipeline_is_traced_with_a_process_per_rank() -> None:
    """The trace of a pipeline has a process for each rank, with a stream for computation and one for each receiver."""
    sent, none = dict.fromkeys(neighbours(3), 1e-4), np.zeros(3)
    times, line = order_times(
        order_rows("1F1B", 3, 4), (0, 1, 2), np.full((3, 4), 1e-3), sent, once_s=none, update_s=none
    )
    trace = trace_of(line)
    check_trace_events({"traceEvents": trace.events(), "displayTimeUnit": "ms"})
    assert trace.processes == ("pipeline rank 0", "pipeline rank 1", "pipeline rank 2")
    assert {(span.process, span.stream) for span in trace.spans} == {
        *((rank, "compute") for rank in range(3)),
        *((0, "to rank 1"), (1, "to rank 0"), (1, "to rank 2"), (2, "to rank 1")),
    }
    assert max(span.start_ns + span.duration_ns for span in trace.spans) == round(times.total_s * 1e9)


def test_plans_keep_their_predictions(tmp_path: Path) -> None:
    """A loaded plan has the prediction of the saved plan. A plan without a timeline refuses to write a trace."""
    plan = _plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    data = json.loads((tmp_path / "plan.json").read_text())
    data["timeline"] = None
    loaded = Plan.from_json(data)
    assert loaded.predicted.step_time_s == plan.predicted.step_time_s
    with pytest.raises(NotAvailableError, match="has no timeline"):
        loaded.trace(tmp_path / "trace.json")


def _plan() -> Plan:
    mesh = Mesh({"x": 2})
    options = PlanOptions(with_baselines=False, constraints={"*.up.weight": P("x")})
    return plan_program(blocks_program(batch=16, length=64, hidden=64), mesh, h100s(mesh), options)


def test_the_utilisation_of_convolutions() -> None:
    """A model of convolutions, some of whose input gradients are not computed, has an MFU between 0 and 1."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    mesh = Mesh({"x": 2})
    plan = plan_program(trace(model, (torch.ones(4, 4, 8, 8),)), mesh, h100s(mesh), PlanOptions(with_baselines=False))
    assert plan.predicted.mfu is not None
    assert 0 < plan.predicted.mfu <= 1


class Wide(nn.Module):
    """Blocks whose weights take about as long to gather and reduce as to multiply by."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.GELU()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("weight", [P(), P("data")], ids=["data parallel", "ZeRO-3"])
def test_deep_models_are_predicted_as_they_run(weight: PartitionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without inner blocks has nearly the step time, hidden time and peak of a plan with all blocks."""
    with torch.device("meta"):
        model, x = Wide(10), torch.zeros(32768, 2048)
    cluster, mesh = autoshard.Cluster("h100_sxm", 1, 4), Mesh({"data": 4})
    asked = {"input:0": P("data"), "*.weight": weight}

    def predicted() -> Prediction:
        plan = autoshard.plan(model, cluster.mesh(mesh), example_inputs=(x,), optimizer="adamw", constraints=asked)
        return plan.predicted

    short = predicted()
    monkeypatch.setattr(Planner, "trace_with_gaps", lambda *_: None)
    whole = predicted()
    assert short.step_time_s == pytest.approx(whole.step_time_s, rel=0.1)
    hidden_s = [item.communication["data"].hidden_s for item in (short, whole)]
    assert hidden_s[0] == pytest.approx(hidden_s[1], rel=0.25)
    assert min(hidden_s) > 0.05 * whole.step_time_s
    assert sum(short.breakdown.values()) == pytest.approx(short.step_time_s)
    assert short.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=0.04)


class _Masked(nn.Module):
    """An embedding of tokens, and a mask of pairs of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        found = self.table(tokens)
        return torch.tanh((found @ found.mT).masked_fill(mask, 0.0) @ found).mean()


@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_a_mask_has_no_tokens(axis: str) -> None:
    """Tokens per second count the elements of the first input of integers, and not of a boolean mask before it."""
    inputs = {"mask": torch.zeros(4, 8, 8, dtype=torch.bool), "tokens": torch.zeros(4, 8, dtype=torch.int64)}
    plan = autoshard.plan(_Masked(), Mesh({axis: 2}), optimizer="sgd", example_inputs=inputs)
    assert plan.predicted.tokens_per_s == pytest.approx(4 * 8 / plan.predicted.step_time_s)
