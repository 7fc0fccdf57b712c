"""Training steps, and calls without gradients, cut into the stages of a pipeline, as data.

Each stage has a program of its own, on the mesh of the axes that the pipeline leaves. Values that cross stages are
results of one program and inputs of others, under one name; they go from the rank that makes them to the rank with the
same coordinates in the reading stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.ir.lowered import LocalSlot, PhasedProgram
from autoshard.ir.pipeline_order import PipelineOrder
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, OutputKind, Program

PIPELINE_AXIS = "pipeline"
"""The axis of a mesh that carries stages."""

ALONE = "data"
"""The axis, of one rank, of a stage that has no other."""

_CROSSING, _WEIGHTS = "<", "<weights "


def crossing_name(node: str, *, is_of_weights: bool) -> str:
    """The name of the slots of a value that crosses stages, by its node."""
    return f"{_WEIGHTS if is_of_weights else _CROSSING}{node}>"


def crosses_stages(name: str) -> bool:
    """Whether a slot's name is that of a value that crosses stages."""
    return name.startswith(_CROSSING)


def is_of_weights(name: str) -> bool:
    """Whether a slot's name is that of a value that crosses stages and is computed from parameters alone."""
    return name.startswith(_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one stage makes and another reads, for each micro-batch.

    Args:
        name: of its slots in both programs.
        maker: the stage whose forward (`is_forward`) or backward gives it.
        reader: the stage whose forward or backward takes it; after the maker in the forward, before it in the backward.
    """

    name: str
    maker: int
    reader: int
    is_forward: bool


@dataclass(frozen=True, slots=True)
class CutProgram:
    """A traced step cut into stages.

    Args:
        stages: the program of each, with global shapes: forward and backward, and gradients of its own parameters.
        crossings: the values that cross stages.
        cuts: names of the calls of the forward that the second stage and those behind it begin with.
    """

    stages: tuple[Program, ...]
    crossings: tuple[Crossing, ...]
    cuts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageProgram:
    """Program of a stage, and the plan that it was lowered from.

    Args:
        phased: its phases.
        plan: its plan.
        is_alike: whether the phases are those of a stage like this one, under the names of this one's slots: they tell
            time and memory, and do not run.
    """

    phased: PhasedProgram
    plan: Plan
    is_alike: bool = False


@dataclass(frozen=True, slots=True)
class StagedProgram:
    """A training step, or a call without gradients, that stages run together.

    Args:
        stages: in the order of the forward.
        crossings: the values that cross stages.
        order: what each pipeline rank does in a step.
        results: what is handed out ("output:0"), of a step the loss alone, and the stage that computes each.
    """

    stages: tuple[StageProgram, ...]
    crossings: tuple[Crossing, ...]
    order: PipelineOrder
    results: Mapping[str, int]

    def digest(self) -> str:
        """A short hash of the text of all stages and of their order, which is the same on all ranks."""
        parts = [*(stage.phased.digest() for stage in self.stages), str(self.order), str(self.crossings)]
        halves = (stage.phased.halves for stage in self.stages if stage.phased.halves is not None)
        parts += [str(half.graph) for pair in halves for half in (pair.inputs, pair.weights)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def made(self, name: str, maker: int, *, is_forward: bool) -> LocalSlot:
        """The slot of a value that crosses stages, as its maker has it."""
        kind = OutputKind.OUTPUT if is_forward else OutputKind.SENT_GRADIENT
        slots = self.stages[maker].phased.lowered.outputs
        return next(slot for slot in slots if (slot.slot.kind, slot.slot.name) == (kind, name))

    def stage_of_parameters(self) -> Mapping[str, int]:
        """The stage that holds each parameter, by qualified name."""
        return {
            slot.slot.name: number
            for number, stage in enumerate(self.stages)
            for slot in stage.phased.lowered.inputs
            if slot.slot.kind is InputKind.PARAMETER
        }
