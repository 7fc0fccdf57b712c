"""Pipelines combined with every other mesh axis equal one device in losses, gradients and trained parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from autoshard import Mesh, P, Recipe
from tests.end_to_end.test_pipelines import MODELS as EVERY
from tests.end_to_end.test_pipelines import check_equal
from tests.runtime.processes import report, run_checks

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's models

MODELS = [name for name in EVERY if name != "skips"]
Constraints = Mapping[str, P]

ROWS, COLUMNS = P("model"), P(None, "model")
TENSOR: dict[str, Constraints] = {
    "gpt2": {
        "*c_attn.weight": COLUMNS,
        "*attn.c_proj.weight": ROWS,
        "*c_fc.weight": COLUMNS,
        "*mlp.c_proj.weight": ROWS,
    },
    "llama": {
        "*.[qkv]_proj.weight": ROWS,
        "*.o_proj.weight": COLUMNS,
        "*.up_proj.weight": ROWS,
        "*.down_proj.weight": COLUMNS,
    },
    "t5": {
        "*Attention.[qkv].weight": ROWS,
        "*Attention.o.weight": COLUMNS,
        "*.wi.weight": ROWS,
        "*.wo.weight": COLUMNS,
    },
    "vit": {"*.[qkv]_proj.weight": ROWS, "*.o_proj.weight": COLUMNS, "*.fc1.weight": ROWS, "*.fc2.weight": COLUMNS},
    "mixtral": {"*.[qkv]_proj.weight": ROWS, "*.o_proj.weight": COLUMNS},
    "deepseek_v3": {"*.kv_b_proj.weight": ROWS, "*.o_proj.weight": COLUMNS, "*_experts.up_proj.weight": ROWS},
}
"""For each model, the specs of the weights that tensor parallelism splits."""

EXPERTS: Constraints = {"*.experts.gate_up_proj": P("expert"), "*.experts.down_proj": P("expert")}
ZERO: tuple[Constraints, ...] = (
    {"*weight": P(), "*:*weight": P()},
    {"*weight": P(), "*:*weight": P("data")},
    {"*weight": P("data"), "*:*weight": P("data")},
)
"""Specs of weights and optimizer state, by name: both whole, state split (ZeRO-1 and 2), both split (ZeRO-3)."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a mesh, with constraints, a schedule and virtual stages."""

    name: str
    axes: Mapping[str, int]
    constraints: Constraints = field(default_factory=dict)
    schedule: str = "1F1B"
    virtual_stages: int | None = None

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
        return f"{self.name}, {axes}, {self.schedule}"


CUBE, FOUR_AXES = {"pipeline": 2, "data": 2, "model": 2}, {"pipeline": 2, "data": 2, "model": 2, "expert": 2}
WITH_DATA = {"pipeline": 2, "data": 2}
CHEAP = Case("mixtral", {"pipeline": 2, "data": 2, "expert": 2}, EXPERTS, "InterleavedZeroBubble")
CASES = [
    Case("llama", CUBE, {**TENSOR["llama"], "*:*weight": P("data")}),
    *(Case(name, WITH_DATA, ZERO[2]) for name in MODELS),
    *(Case(name, {"pipeline": 2, "model": 2}, TENSOR[name], "InterleavedZeroBubble") for name in MODELS),
    *(Case(name, CUBE, TENSOR[name], "ZBVZeroBubble") for name in MODELS),
    Case("gpt2", WITH_DATA, ZERO[0], "LoopedBFS", 2),
    Case("llama", WITH_DATA, ZERO[1], "DualPipeV"),
    Case("t5", {"data": 2, "pipeline": 4}, ZERO[1], "GPipe"),
    Case("vit", {"pipeline": 3, "data": 2}, ZERO[0]),
    Case("llama", {"pipeline": 2, "replica": 2, "data": 2, "model": 2}, {**TENSOR["llama"], "*:*weight": P("data")}),
    *(Case(name, {"pipeline": 2, "expert": 2}, EXPERTS) for name in ("mixtral", "deepseek_v3")),
    *(Case(name, FOUR_AXES, {**TENSOR[name], **EXPERTS}) for name in ("mixtral", "deepseek_v3")),
]
"""Every model with each other axis, under all schedules, ZeRO 0 to 3, and four axes on 16 ranks."""


def check(case: Case) -> None:
    recipe = Recipe(schedule=case.schedule, virtual_stages=case.virtual_stages)
    check_equal(case.name, Mesh(case.axes), constraints=case.constraints, recipe=recipe)


def test_stages_with_data_and_experts() -> None:
    """Mixtral on pipeline, data and expert axes equals one device, under a zero-bubble schedule."""
    check(CHEAP)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_with_any_other_axes(case: Case) -> None:
    """Pipeline stages combined with any other axes equal one device, on up to 16 simulated ranks."""
    check(case)


ON_PROCESSES: Mapping[int, Sequence[Case]] = {
    2: [
        Case("t5", {"pipeline": 2}, schedule="GPipe"),
        Case("llama", {"pipeline": 2}, schedule="LoopedBFS", virtual_stages=2),
        Case("mixtral", {"pipeline": 2}, schedule="DualPipeV"),
    ],
    4: [
        Case("gpt2", WITH_DATA, ZERO[2], "ZBVZeroBubble"),
        Case("llama", {"pipeline": 2, "model": 2}, TENSOR["llama"], "InterleavedZeroBubble", 2),
        Case("mixtral", {"pipeline": 2, "expert": 2}, EXPERTS),
        Case("vit", {"pipeline": 4}, schedule="InterleavedZeroBubble"),
    ],
    8: [
        Case("deepseek_v3", {"pipeline": 2, "data": 2, "expert": 2}, {**ZERO[1], **EXPERTS}),
        Case("llama", CUBE, TENSOR["llama"], "ZBVZeroBubble"),
        Case("gpt2", {"data": 2, "pipeline": 4}, ZERO[1], "GPipe"),
    ],
}
"""Cases by their number of processes."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ON_PROCESSES)
def test_processes(ranks: int) -> None:
    """On 2, 4 and 8 Gloo processes, each rank's part of the training equals one device."""
    checks = {str(case): partial(check, case) for case in ON_PROCESSES[ranks]}
    outcomes = run_checks(checks, ranks=ranks, deadline_s=540)
    for name in checks:
        report(outcomes, name)
