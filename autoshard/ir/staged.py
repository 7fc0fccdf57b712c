"""Training steps, and calls without gradients, cut into the stages of a pipeline, as data.

Each stage has a program of its own, on the mesh without the pipeline axis. A value that crosses stages is a result of
one program and an input of another, under one name. The value goes to the rank with the same coordinates in the reading
stage.
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
"""The mesh axis of pipeline stages."""

ONLY_AXIS = "data"
"""Name of a stage's only axis, of size one, if the mesh has no axis beside the pipeline."""

_CROSSING, _WEIGHTS = "<", "<weights "


def crossing_name(node: str, *, is_of_weights: bool) -> str:
    """Return the name of the slot for the value of `node`, which one stage computes and another stage reads.

    `is_of_weights` says whether the value is computed from parameters alone.
    """
    return f"{_WEIGHTS if is_of_weights else _CROSSING}{node}>"


def crosses_stages(name: str) -> bool:
    """Whether an input or result of this name is a value that crosses stages."""
    return name.startswith(_CROSSING)


def is_of_weights(name: str) -> bool:
    """Whether an input or result of this name crosses stages and is computed from parameters alone."""
    return name.startswith(_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one stage makes and another stage reads, for each micro-batch.

    Args:
        name: name of the value's slots in both programs.
        maker: stage whose forward (`is_forward`) or backward makes the value.
        reader: stage whose forward or backward reads the value; later than the maker in the forward, earlier in the
            backward.
    """

    name: str
    maker: int
    reader: int
    is_forward: bool


@dataclass(frozen=True, slots=True)
class CutProgram:
    """A traced step cut into stages.

    Args:
        stages: programs with global shapes, each with forward, backward, and gradients of the stage's own parameters.
        cuts: for each stage after the first, the name of its first call in the forward.
    """

    stages: tuple[Program, ...]
    crossings: tuple[Crossing, ...]
    cuts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageProgram:
    """Lowered program of a stage, with the stage's plan.

    With `is_of_equal_stage`, an equal stage was planned before. `phased` then has the graphs of that stage, and only
    serves to predict time and memory.
    """

    phased: PhasedProgram
    plan: Plan
    is_of_equal_stage: bool = False


@dataclass(frozen=True, slots=True)
class StagedProgram:
    """A training step, or a call without gradients, that stages run together.

    Args:
        stages: programs of the stages, in the order of the forward.
        order: tasks of each pipeline rank in a step, in running order.
        results: stage of each returned output, by name ("output:0"); a training step returns only the loss.
    """

    stages: tuple[StageProgram, ...]
    crossings: tuple[Crossing, ...]
    order: PipelineOrder
    results: Mapping[str, int]

    def digest(self) -> str:
        """Return a hash of 16 hex digits, which is equal on all ranks.

        It covers the programs of all stages, the values sent between stages, and the order of tasks.
        """
        parts = [*(stage.phased.digest() for stage in self.stages), str(self.order), str(self.crossings)]
        halves = (stage.phased.halves for stage in self.stages if stage.phased.halves is not None)
        parts += [str(half.graph) for pair in halves for half in (pair.inputs, pair.weights)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def sent_slot(self, name: str, maker: int, *, is_forward: bool) -> LocalSlot:
        """Return the result slot of stage `maker` that is sent under the name `name`.

        The slot is an output of the stage's forward (`is_forward`), or a gradient of its backward.
        """
        kind = OutputKind.OUTPUT if is_forward else OutputKind.SENT_GRADIENT
        slots = self.stages[maker].phased.lowered.outputs
        return next(slot for slot in slots if (slot.slot.kind, slot.slot.name) == (kind, name))

    def stage_of_parameters(self) -> Mapping[str, int]:
        """Return the index of the stage that holds each parameter, by qualified name."""
        return {
            slot.slot.name: number
            for number, stage in enumerate(self.stages)
            for slot in stage.phased.lowered.inputs
            if slot.slot.kind is InputKind.PARAMETER
        }
