"""Ranks that would run different programs all raise, and no rank waits forever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import autoshard
from autoshard import LostRankError, Mesh, PlanMismatchError, RankMismatchError
from autoshard.ir.lowered import PhasedProgram
from autoshard.runtime.agreement.control_group import ControlGroup
from autoshard.runtime.engine import SimulatorEngine
from autoshard.tracing import trace
from passes.driver.planner import Planner
from passes.lowering import lower_program
from passes.lowering.lower import Lower
from passes.verification.verify_phases import verify_phases
from tests.end_to_end.training import assert_equal, train
from tests.models import Perceptron
from tests.passes.greedy_plans import most_recomputed_plan, most_split_plan
from tests.passes.mutations import copy_of, scale_value
from tests.passes.overlap_mutants import start_earlier
from tests.runtime.processes import report, run_checks

PAIR = Mesh({"data": 2})
NAMES = ("recomputed in bf16", "bf16", "f32")
small = partial(Perceptron, activation=nn.functional.gelu)


INPUTS = {"x": torch.linspace(-1, 1, 32).view(4, 8)}


def make_plans(folder: Path) -> None:
    """Save three plans: bfloat16 with recomputation, bfloat16 without recomputation, and float32."""
    narrow = trace(small(), (), INPUTS, compute_dtype=torch.bfloat16)
    tight = most_recomputed_plan(narrow, PAIR)
    assert tight.recompute.nodes
    plans = (
        tight,
        most_split_plan(narrow, PAIR),
        most_split_plan(trace(small(), (), INPUTS), PAIR),
    )
    for name, plan, precision in zip(NAMES, plans, ("bf16", "bf16", None), strict=True):
        replace(plan, precision=precision).save(folder / name)


def compile_with(folder: Path, *names: str, verify: bool = True) -> Any:
    """Compile the model on each rank with the saved plan of that rank's name."""
    name = names[dist.get_rank() % len(names)]
    return autoshard.compile(small(), PAIR, plan=folder / name, example_inputs=INPUTS, verify=verify)


def check_training(folder: Path) -> None:
    """Two ranks that recompute in bfloat16 compute the numbers of the simulator under the same plan."""
    found = train(compile_with(folder, NAMES[0]), INPUTS)
    planner = Planner(fixed=autoshard.Plan.load(folder / NAMES[0]), precision="bf16")
    simulated = autoshard.ShardedModule(small(), SimulatorEngine(PAIR), planner)
    assert_equal(found, train(simulated, INPUTS))


def check_plans_in_other_precisions(folder: Path) -> None:
    """Ranks with plans in different precisions both raise, because their traced programs differ."""
    with pytest.raises(RankMismatchError, match="Ranks disagree about traced program"):
        compile_with(folder, NAMES[0], "f32")


def check_the_first_plan_is_everyones(folder: Path) -> None:
    """Ranks with different plans of one program all follow the first rank's plan, including its recomputation."""
    sharded = compile_with(folder, NAMES[0], "bf16")
    assert sharded.plan.recompute.nodes == autoshard.Plan.load(folder / NAMES[0]).recompute.nodes


def check_a_rank_that_cannot_lower(folder: Path) -> None:
    """If lowering fails on one rank, both ranks raise with the message of that failure."""

    def refuse(self: Lower, program: Any) -> Any:
        raise PlanMismatchError("not here")

    with pytest.raises(
        RankMismatchError, match=r"lowering: succeeded on ranks \[0\], failed \(not here\) on ranks \[1\]"
    ):
        with_lowering(refuse, partial(compile_with, folder, NAMES[0]))


def check_programs_that_differ(folder: Path) -> None:
    """Both ranks raise if one rank's lowering scales a value, although that rank does not verify its program."""
    right = Lower.__call__

    def scaled(self: Lower, program: Any) -> Any:
        lowered = right(self, program)
        module = copy_of(lowered.graph_module)
        assert scale_value(module.graph, Random(0), lowered.mesh)
        return replace(lowered, graph_module=module)

    with pytest.raises(RankMismatchError, match="Ranks disagree about compiled program"):
        with_lowering(scaled, partial(compile_with, folder, NAMES[0], verify=False))


def check_collectives_in_another_order(folder: Path) -> None:
    """Both ranks raise if one rank's collectives have another order, although each program verifies."""
    right = lower_program.overlapped

    def reordered(phased: PhasedProgram, options: Any) -> PhasedProgram:
        made = right(phased, options)
        module = copy_of(made.backward)
        assert any(start_earlier(module.graph, Random(seed), PAIR) for seed in range(9))
        wrong = replace(made, backward=fx.GraphModule(module, module.graph))
        verify_phases(wrong)
        return wrong

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(lower_program, "overlapped", reordered)
        with pytest.raises(RankMismatchError, match="Ranks disagree about compiled program"):
            compile_with(folder, NAMES[2])


def with_lowering(lower: Callable[[Lower, Any], Any], run: Callable[[], Any]) -> None:
    """Call `run`; on the last rank, `lower` replaces the lowering."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Lower, "__call__", lower)
        run()


def check_a_rank_that_never_comes() -> None:
    """A rank that waits for a missing rank raises after the time limit."""
    group = ControlGroup([0, 1], timeout_s=2)
    if dist.get_rank() == 0:
        with pytest.raises(
            LostRankError, match=r"Ranks \[1\] did not come within 2 s.*, while ranks \[0\] waited to compile"
        ):
            group.agree(lambda: {"compiled program": "mine"})


CHECKS = {
    "training": check_training,
    "other precisions": check_plans_in_other_precisions,
    "the first plan": check_the_first_plan_is_everyones,
    "cannot lower": check_a_rank_that_cannot_lower,
    "programs differ": check_programs_that_differ,
    "orders differ": check_collectives_in_another_order,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    make_plans(folder)
    checks = {name: partial(check, folder) for name, check in CHECKS.items()}
    return run_checks({**checks, "never comes": check_a_rank_that_never_comes}, ranks=2, deadline_s=300)


@pytest.mark.parametrize("name", [*CHECKS, "never comes"])
def test_on_two_processes(outcomes: dict[str, str], name: str) -> None:
    """The check passes on every rank."""
    report(outcomes, name)
