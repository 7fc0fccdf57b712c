"""The order in which Inductor's overlap scheduling would run a lowered program, for comparison.

`torch._inductor.fx_passes.overlap_scheduling` is private and made for GPUs: its estimates are replaced by those of a
rig, and a group of processes stands for each of the program's axes, which its bookkeeping looks up. It moves what is
there; its buckets are left off, since on a link without latency they only expose more.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import fx

from autoshard.ir.collectives import is_collective
from autoshard.ir.lowered import PhasedProgram
from tests.end_to_end.work_clock import Rig


def in_inductors_order(plain: PhasedProgram, rig: Rig) -> PhasedProgram:
    """The phases of a program without overlap, each scheduled by Inductor; a process group must be there."""
    phases: dict[str, Any] = {name: _scheduled(phase, plain, rig) for name, phase in plain.phases.items()}
    return replace(plain, **phases)


def _scheduled(phase: fx.GraphModule, plain: PhasedProgram, rig: Rig) -> fx.GraphModule:
    from torch._inductor.fx_passes import overlap_scheduling

    made = fx.GraphModule(phase, copy.deepcopy(phase.graph))
    groups, took_ms = dict[fx.Node, Any](), dict[fx.Node, float]()
    for node in made.graph.nodes:
        if is_collective(node):
            groups[node], took_ms[node] = node.args[-1], 1e3 * rig.sent_s(node, plain)
        elif node.op == "call_function":
            took_ms[node] = 1e3 * rig.computed_s(node)
    for node in groups:
        node.update_arg(len(node.args) - 1, dist.group.WORLD.group_name)  # type: ignore[union-attr]

    def estimate(node: fx.Node, _: int | None = None) -> float:
        return took_ms.get(node, 0.0)

    with patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", estimate):
        made = overlap_scheduling.schedule_overlap_bucketing(
            made,
            custom_runtime_estimation=estimate,
            compute_estimator="analytical",
            pre_bucketing_fsdp_collectives=False,
        )
    for node, group in groups.items():
        node.update_arg(len(node.args) - 1, group)
    return made
