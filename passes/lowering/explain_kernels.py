"""Say which generated kernels compute or read a value of a program; nothing is written for it."""

from __future__ import annotations

from torch import fx

from autoshard.ir.lowered import LoweredProgram
from autoshard.ir.printer import format_bytes
from cost_models.device import Device
from passes.lowering.choose_groups import ChosenGroup, choose_groups
from passes.lowering.fuse_kernels import FuseKernels
from passes.lowering.split_phases import SplitPhases


def explain_kernels(lowered: LoweredProgram, device: Device, name: str) -> tuple[str, ...]:
    """One sentence for each kernel that would be generated for a group with the traced node `name`.

    Args:
        lowered: the lowered program, without kernels.
        device: what it runs on.
        name: of a node of the traced program: one that a group computes, or a placeholder that it reads.
    """
    phased = SplitPhases()(FuseKernels()(lowered))
    phases = {"forward": phased.forward, "backward": phased.backward, "update": phased.update}
    return tuple(
        _sentence(chosen, phase)
        for phase, graph_module in phases.items()
        if graph_module is not None
        for chosen in choose_groups(graph_module.graph, device)
        if any(_stands_for(node, name) for node in (*chosen.members, *chosen.operands))
    )


def _stands_for(node: fx.Node, name: str) -> bool:
    """Whether a local node holds a value of a traced one."""
    return name in (node.meta.get("global"), node.name if node.op == "placeholder" else None)


def _sentence(chosen: ChosenGroup, phase: str) -> str:
    members = ", ".join(str(node.meta.get("global", node.name)) for node in chosen.members)
    saved = f"{chosen.saved_launches} fewer to launch, {format_bytes(chosen.saved_bytes)} less to move"
    return f"{chosen.group.name} for {members} ({phase}): {saved}."
