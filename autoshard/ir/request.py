"""A request for a program, and the program that answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard.ir.derivative import Derivatives
from autoshard.ir.loss_weights import LossWeights
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.outputs import Outputs
from autoshard.ir.plan import Plan
from autoshard.ir.python_guards import PythonUse
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.staged import StagedProgram
from autoshard.ir.update import Update


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """The result of compiling one call of a model.

    Args:
        phased: the lowered program, cut into forward and backward.
        plan: the plan it was lowered from, or None for a program written by hand.
        sharded_outputs: names of the outputs ("output:0") that are handed out as they lie; others are whole.
        update: what the program's update was traced for, if it is that of a whole training step.
        fingerprint: of the traced program, see `autoshard.ir.fingerprint`; "" if there is none.
        python: what the trace read in Python.
        weights: how its loss is part of that of a batch, where the step has micro-batches.
        staged: the stages of a pipeline; `phased` then says what they take and update together, and is not run.
        own_stages: those that this process runs.
    """

    phased: PhasedProgram
    plan: Plan | None = None
    sharded_outputs: frozenset[str] = frozenset()
    update: Update | None = None
    fingerprint: str = ""
    python: PythonUse = field(default_factory=PythonUse)
    weights: LossWeights | None = None
    staged: StagedProgram | None = None
    own_stages: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[PhasedProgram, ...]:
        """The programs that run: of a pipeline, those of all stages."""
        return (self.phased,) if self.staged is None else tuple(stage.phased for stage in self.staged.stages)


@dataclass(frozen=True, slots=True)
class Request:
    """A call of a model that needs a program.

    Args:
        model: the user's model, holding outlines of its parameters: global shapes, on the meta device.
        args, kwargs: example inputs, global.
        grad: whether gradients can be asked for: the program then has a backward, unless it is `forward_only`.
        all_tangents: whether each output gets a tangent, not only losses.
        placed: specs that parameters and optimizer state already have, by qualified name; empty for the first program.
        signature: text of the call, for messages.
        update: what an optimizer does; the program is then that of the whole training step.
        seed: of the call's random operators, for a model that branches on what they give.
        device: where parameters are.
        values: within it, a model (or one that shares its parameters) holds their global values. Entered only where
            they must be read: that gathers them on every rank.
        known: programs of calls of this kind, traced when the model's Python held something else.
        derivatives: what the call returns instead of the model's outputs, the innermost first; see `Derivative`.
        outputs: what the call hands out.
        forward_only: leave out the backward, for one who only looks at the forward.
        as_compiled: tell the model's Python that it is compiled (`torch.compiler.is_compiling()`), from the start.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad: bool
    all_tangents: bool = False
    placed: Mapping[str, PartitionSpec] = field(default_factory=dict)
    signature: str = ""
    update: Update | None = None
    seed: torch.Tensor | None = None
    device: torch.device | None = None
    values: Callable[[nn.Module], AbstractContextManager[None]] = lambda model: nullcontext()
    known: tuple[CompiledProgram, ...] = ()
    derivatives: Derivatives = ()
    outputs: Outputs = Outputs.AS_PLANNED
    forward_only: bool = False
    as_compiled: bool = False
