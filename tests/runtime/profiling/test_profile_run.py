"""`step.profile` measures the next steps, on the simulator and on Gloo processes, and changes no result."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard import Mesh, NotAvailableError, Options, P
from autoshard.graphs.name_ranges import range_name
from autoshard.ir.profile import Profile
from autoshard.ir.range_names import is_start
from cost_models.errors import UnknownOperatorError
from passes.driver import compile_model
from tests.runtime.processes import checked_once, report

X = torch.linspace(-1, 1, 16 * 8).view(16, 8)
SPLIT = {"input:0": P("data"), "*.weight": P()}  # such a small model would run whole on every rank


class Plain(nn.Module):
    """A model of one layer, which returns its mean square."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean()


def plain_step(**options: Any) -> autoshard.TrainStep:
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = autoshard.compile(model, Mesh({"data": 2}), optimizer=optimizer, constraints=SPLIT, **options)
    assert isinstance(step, autoshard.TrainStep)
    return step


def test_a_profile_changes_no_step(tmp_path: Path) -> None:
    """Losses within a profile equal those without one, and the two steps after the first are measured."""
    step, other = plain_step(), plain_step()
    with step.profile(steps=2, path=tmp_path / "trace.json") as found:
        losses = [float(step(X)) for _ in range(4)]
    assert losses == [float(other(X)) for _ in range(4)]
    assert step.last_profile is found.result
    assert found.result.steps == 2
    assert found.result.is_simulated
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert not step.sharded.engine.ranges.are_on
    check_profile(found.result, step)


def test_too_few_steps_are_named() -> None:
    """The first step, which warms up, and a step that compiles a new shape are not measured."""
    step = plain_step()
    run = step.profile(steps=1)
    step(X)
    with pytest.raises(NotAvailableError, match=r"has measured 0 steps so far. The first step warms up"):
        str(run)
    step(torch.cat([X, X]))
    step(X)
    assert run.result.steps == 1
    with step.profile(steps=3):
        step(X)
    assert step.last_profile is run.result


def test_a_step_that_replaces_a_program_is_not_measured() -> None:
    """With room for one program, a step that compiles and replaces it is not measured."""
    step = plain_step(options=Options(max_programs=1))
    step(X)
    with step.profile(steps=1) as run:
        step(X)
        step(torch.cat([X, X]))
        with pytest.raises(NotAvailableError, match="has measured 0 steps so far"):
            str(run)
        step(torch.cat([X, X]))
    assert run.result.steps == 1


def test_an_error_drops_the_profile() -> None:
    """A step that raises is not measured and leaves ranges off, also in the warm-up."""
    step = plain_step(options=Options(on_nonfinite="raise"))
    with pytest.raises(autoshard.NonFiniteError), step.profile():
        step(X * torch.nan)
    assert not step.sharded.engine.ranges.are_on
    found = step.profile()
    step(X)
    step(X)
    with pytest.raises(autoshard.NonFiniteError), found:
        step(X * torch.nan)
    assert not step.sharded.engine.ranges.are_on
    with pytest.raises(NotAvailableError):
        _ = found.result
    step(X)


def test_wrong_arguments_are_refused() -> None:
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(NotAvailableError, match="pass a whole number of steps, at least 1"):
            plain_step().profile(steps=wrong)  # type: ignore[arg-type]
    with pytest.raises(NotAvailableError, match=r"'/no/such/trace\.json' cannot be written: No such file"):
        plain_step().profile(path="/no/such/trace.json")


def test_graphs_and_unknown_operators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile is refused with CUDA graphs, and ends at an operator without a cost formula; training goes on."""
    step = plain_step()
    step._has_graphs = True
    with pytest.raises(NotAvailableError, match=r"with Options\(cuda_graph=True\), a step is one launch"):
        step.profile()

    def predict(*_: Any) -> None:
        raise UnknownOperatorError("mine.op has no cost formula.")

    monkeypatch.setattr(compile_model, "predict_steps", predict)
    step = plain_step()
    step.profile(steps=1)
    step(X)
    with pytest.raises(NotAvailableError, match=r"step\.profile prices each operator, and mine.op has no cost formula"):
        step(X)
    step(X)


def test_ranges_for_a_profiler_of_the_user() -> None:
    """With `Options(name_ranges=True)`, torch's profiler sees the names of modules and operators."""
    step = plain_step(options=Options(name_ranges=True))
    step(X)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        step(X)
    names = {event.name for event in found.events() or ()}
    assert "autoshard forward: up addmm" in names or "autoshard forward: up mm" in names


def check_profile(found: Profile, step: autoshard.TrainStep) -> None:
    """Check that a profile has each collective of the program, and that its measured and predicted parts add up."""
    program = step.sharded.program
    assert program is not None
    graphs = [module.graph for part in program.parts for module in part.phases.values()]
    collectives = {name for graph in graphs for node in graph.nodes if is_start(name := range_name(node))}
    assert collectives
    for steps in found.ranks:
        for each in steps:
            names = {span.name for span in each.spans}
            assert collectives <= names or program.staged is not None
            assert sum(each.parts.values()) == pytest.approx(each.duration_ns / 1e9)
    assert any("up" in item.name and item.predicted_s for item in found.differences)
    measured, predicted = (sum(each) for each in zip(*found.parts.values(), strict=True))
    assert measured == pytest.approx(found.step_time_s)
    assert predicted == pytest.approx(found.predicted_step_time_s)
    assert {"forward", "backward", "update"} <= found.parts.keys()
    assert step.plan is not None
    assert found.predicted_step_time_s == pytest.approx(step.plan.predicted.step_time_s, rel=1e-3)


# On processes.


def plain_net(mesh: Any, **options: Any) -> autoshard.TrainStep:
    model = nn.Sequential()
    model.add_module("up", nn.Linear(8, 32))
    model.add_module("down", nn.Linear(32, 8))
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = autoshard.compile(
        model, mesh, optimizer=optimizer, loss_fn=lambda outputs: outputs.square().mean(), **options
    )
    assert isinstance(step, autoshard.TrainStep)
    return step


def check_two_ranks() -> None:
    """Both ranks have the spans of both, rank 0 writes one file with both, and `calibrate` uses the profile."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    step = plain_net(mesh, constraints=SPLIT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with step.profile(steps=2, path=path) as found:
            for _ in range(3):
                step(X)
        assert path.exists() == (dist.get_rank() == 0)
        if path.exists():
            events = json.loads(path.read_text())["traceEvents"]
            names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
            assert names == {"rank 0", "rank 1"}
    assert len(found.result.ranks) == 2
    check_profile(found.result, step)
    assert all(item.measured_s > 0 for item in found.result.differences if item.name.startswith("communication"))
    calibrated = autoshard.calibrate(step)
    assert calibrated.cluster.size == 2
    assert any(name.startswith("link.intra") for name in calibrated.ratios)


def check_stages() -> None:
    """Each pipeline rank has the measured and predicted spans of its own stage."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("pipeline",))
    step = plain_net(mesh, micro_batches=4)
    with step.profile(steps=2) as found:
        for _ in range(3):
            step(X)
    result = found.result
    assert result.pipeline_ranks == (0, 1)
    forwards = [
        {span.name for span in spans if span.name.startswith("forward: ")}
        for rank in (0, 1)
        for spans in (result.ranks[rank][0].spans, result.predicted.steps[rank].spans)
    ]
    assert forwards[0] >= forwards[1] > set()
    assert forwards[2] >= forwards[3] > set()
    assert forwards[1] != forwards[3]
    measured, predicted = result.parts["communication over pipeline"]
    assert measured > 0
    assert predicted > 0
    assert step.plan is not None
    assert result.predicted_step_time_s == pytest.approx(step.plan.predicted.step_time_s, rel=1e-3)


CHECKS = {"two ranks": check_two_ranks, "stages": check_stages}
outcomes = checked_once(CHECKS, ranks=2)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(outcomes: dict[str, str], name: str) -> None:
    report(outcomes, name)
