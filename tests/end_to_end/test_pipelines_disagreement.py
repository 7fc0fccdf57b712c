"""Pipeline ranks that disagree, or do not arrive, raise one error on every rank, for stages of one or two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard import LostRankError, Mesh, P, RankMismatchError
from autoshard.runtime.program_run import ProgramRun, StageRun
from autoshard.runtime.stages.stage_meshes import is_elsewhere
from tests.end_to_end.test_disagreement import assert_all_raise, on_second_rank
from tests.runtime.processes import on_processes

TIMEOUT_S = 3.0


class Layers(nn.Module):
    """A model with two layers, a buffer and a loss."""

    scale: torch.Tensor

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.second.weight.data.mul_(scale)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.tanh(self.first(x)) * self.scale) - y).square().mean()


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.linspace(-1, 1, rows * 16).view(rows, 16)
    return drawn[:, :8].clone(), drawn[:, 8:].clone()


def mesh_here() -> Mesh:
    """Return a mesh of two stages, with one rank each on two processes and two ranks each on four."""
    return Mesh({"pipeline": 2}) if dist.get_world_size() == 2 else Mesh({"pipeline": 2, "data": 2})


def compiled(steps: int = 4, scale: float = 1.0, **asked: Any) -> Any:
    """Return a step after `steps` calls on all ranks; after the default 4, calls are compared the fast way."""
    model = Layers(scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constraints = {"*weight": P("data"), "*bias": P()} if "data" in mesh_here().axis_names else {}
    settings = {
        "options": autoshard.Options(timeout_s=TIMEOUT_S),
        "constraints": constraints,
        "micro_batches": 2,
        **asked,
    }
    step = autoshard.compile(model, mesh_here(), optimizer=optimizer, **settings)
    for _ in range(steps):
        step(*batch())
    return step


def check_other_labels() -> None:
    """Ranks with unequal labels all raise, and the next step with equal labels runs."""
    step = compiled()
    x, y = batch()
    assert_all_raise(RankMismatchError, "Ranks disagree about input:1", lambda: step(x, y + on_second_rank()))
    step(x, y)


def check_other_inputs_when_it_compiles() -> None:
    """Unequal inputs of ranks raise at the first call."""
    step = compiled(steps=0)
    x, y = batch()
    assert_all_raise(RankMismatchError, "Ranks disagree about input:0", lambda: step(x * (1 + on_second_rank()), y))


def check_another_last_micro_batch() -> None:
    """If ranks differ in the last micro-batch alone, they raise before any parameter changes."""
    step = compiled()
    x, y = batch()
    before = state_of(step)
    x[-1] += on_second_rank()
    assert_all_raise(RankMismatchError, "Ranks disagree about input:0", lambda: step(x, y))
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(step), strict=True))


def state_of(step: Any) -> list[torch.Tensor]:
    parts = [item for item in step.sharded.parameters() if isinstance(item, DTensor) and not is_elsewhere(item)]
    return [item.to_local().detach().clone() for item in parts]


def check_another_learning_rate() -> None:
    """If one rank changes the learning rate, all ranks raise and name both rates."""
    step = compiled()
    step.optimizer.param_groups[0]["lr"] = 0.2 if on_second_rank() else 0.1
    match = r"hyperparameters: SGD\(.*lr=0.1,.* on ranks \[0(, 2, 3)?\], SGD\(.*lr=0.2,.* on ranks \[1\]"
    assert_all_raise(RankMismatchError, match, lambda: step(*batch()))


def check_another_norm() -> None:
    """If one rank changes the limit of the gradient norm, all ranks raise."""
    step = compiled(max_grad_norm=1.0)
    step.max_grad_norm = 0.5 if on_second_rank() else 1.0
    assert_all_raise(RankMismatchError, "Ranks disagree about", lambda: step(*batch()))


def check_another_shape() -> None:
    """If ranks call different batch sizes, all ranks raise and name both shapes."""
    step = compiled()
    match = r"Ranks disagree about call, .* call: .*float32\[2, 8\].*float32\[3, 8\]"
    assert_all_raise(RankMismatchError, match, lambda: step(*batch(6 if on_second_rank() else 4)))


def check_evaluation_beside_training() -> None:
    """All ranks raise if one rank evaluates while another trains, or if inputs of an evaluation differ."""
    step = compiled()
    x, y = batch()
    with torch.no_grad():
        step.sharded(x, y)
        assert_all_raise(
            RankMismatchError, "Ranks disagree about input:1", lambda: step.sharded(x, y + on_second_rank())
        )

    def run() -> None:
        with torch.no_grad():
            step.sharded(x, y) if on_second_rank() else step(x, y)

    assert_all_raise(RankMismatchError, "Ranks disagree about", run)


def check_other_parameters_when_it_compiles() -> None:
    """If one rank has other weights than another rank's stage, all raise when the step compiles."""
    match = "Ranks disagree about parameter 'second.weight'"
    assert_all_raise(RankMismatchError, match, lambda: compiled(scale=1.0 + (dist.get_rank() == 0)))


def check_a_late_rank() -> None:
    """If one rank comes late to a step, all ranks name it, although calls are compared the fast way."""
    step = compiled(options=autoshard.Options(timeout_s=1.0))
    if on_second_rank():
        time.sleep(4.0)
    assert_all_raise(LostRankError, r"Ranks \[1\] did not come", lambda: step(*batch()))


def check_a_rank_late_to_compile() -> None:
    """If one rank comes late to the first step, all ranks name it."""
    step = compiled(steps=0, options=autoshard.Options(timeout_s=1.0))
    if on_second_rank():
        time.sleep(2.5)
    assert_all_raise(LostRankError, r"Ranks \[1\] did not come within 1 s", lambda: step(*batch()))


def check_a_buffer_changed() -> None:
    """If one rank changes a buffer, which every stage holds whole, all ranks raise."""
    step = compiled()
    if on_second_rank():
        step.sharded.scale.mul_(2)
    assert_all_raise(RankMismatchError, "buffer 'scale'", lambda: step(*batch()))


def check_off() -> None:
    """With `check="off"`, ranks with unequal labels raise nothing."""
    step = compiled(options=autoshard.Options(check="off"))
    x, y = batch()
    step(x, y + on_second_rank())


def check_a_stage_asleep_amid_a_step() -> None:
    """If one stage sleeps within a step, both raise after `timeout_s`."""
    step, right = compiled(options=autoshard.Options(timeout_s=1.0)), ProgramRun._run_forward

    def slowly(run: ProgramRun, stage: StageRun, micro_batch: int) -> None:
        time.sleep(3.0 if on_second_rank() else 0.0)
        right(run, stage, micro_batch)

    with mock.patch.object(ProgramRun, "_run_forward", slowly):
        assert_all_raise(LostRankError, "stopped or did not answer in time", lambda: step(*batch()))


def check_a_parameter_changed() -> None:
    """If one rank writes to a parameter in place, all ranks raise, also those of a stage without it."""
    for name in ("first.weight", "first.bias", "second.bias"):
        step = compiled()
        if on_second_rank():
            with torch.no_grad():
                step.sharded.get_parameter(name).add_(1.0)
        assert_all_raise(RankMismatchError, f"parameter '{name}'", partial(step, *batch()))


def check_parameters_changed_by_all() -> None:
    """Equal changes of parameters on all ranks, also by `load_state_dict`, raise nothing."""
    step = compiled()
    with torch.no_grad():
        for parameter in step.sharded.parameters():
            parameter.mul_(0.5)
    step(*batch())
    step.load_state_dict(step.state_dict())
    step(*batch())


def check_a_parameter_changed_through_data() -> None:
    """If one rank of a stage writes to a parameter through `.data`, all ranks raise within four steps."""
    step = compiled()
    bias = step.sharded.first.bias
    if on_second_rank() and not is_elsewhere(bias):
        bias.to_local().data.mul_(2)
    assert_all_raise(RankMismatchError, "parameter 'first.bias'", lambda: [step(*batch()) for _ in range(4)])


def check_rows_of_its_own() -> None:
    """Rows that ranks of one stage loaded for themselves must equal the rows of the other stage."""
    step = compiled(micro_batches=1, constraints={"input:*": P("data")})
    mesh, (x, y) = step.sharded.engine.device_mesh, batch()
    place = mesh.get_coordinate()[0] * 2

    def own(x: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(x[place:][:2], mesh, [Shard(0)], run_check=False)

    step(own(x), own(y))
    match = r"Ranks disagree about input:1\. input:1: \w+ on ranks \[1\], \w+ on ranks \[3\]"
    assert_all_raise(RankMismatchError, match, lambda: step(own(x), own(y + on_second_rank())))


OF_FOUR = ("a_parameter_changed", "a_parameter_changed_through_data", "rows_of_its_own")
"""Checks for four processes alone, two in each stage; all other checks run on two processes."""

ALSO_OF_FOUR = ("other_labels", "another_learning_rate", "parameters_changed_by_all")

CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


ON_TWO = {name: check for name, check in CHECKS.items() if name not in OF_FOUR}
ON_FOUR = {name: CHECKS[name] for name in (*ALSO_OF_FOUR, *OF_FOUR)}


test_stages_of_one_rank = on_processes(ON_TWO, ranks=2, deadline_s=200, sample=5)

test_stages_of_two_ranks = on_processes(ON_FOUR, ranks=4, deadline_s=200, sample=2)
