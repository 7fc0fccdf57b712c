"""A `Request` for the program of a call, and the `CompiledProgram` that answers it."""

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
        phased: the lowered program, cut into phases.
        plan: the plan of the program, or None for a program written by hand.
        sharded_outputs: names of the outputs ("output:0") that are returned sharded; all other outputs are whole.
        update: the traced update of a whole training step, or None.
        fingerprint: hash of the traced program by `autoshard.ir.fingerprint`, or "".
        python: Python values that the trace read and set.
        weights: weights of micro-batch losses within the batch's loss, where the step has micro-batches.
        staged: the stages of a pipeline. `phased` then describes their common inputs and update, and does not run.
        own_stages: indices of the stages that this process runs.
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
        """The programs that run: the program of the call, or the programs of all stages of a pipeline."""
        return (self.phased,) if self.staged is None else tuple(stage.phased for stage in self.staged.stages)


@dataclass(frozen=True, slots=True)
class Request:
    """A call of a model that needs a program.

    Args:
        model: the user's model with its parameters on the meta device, in global shapes.
        args, kwargs: example inputs, global.
        grad: whether the caller may take gradients. The program then has a backward, unless `forward_only` is set.
        all_tangents: whether each output gets a tangent, not only losses.
        placed: specs that parameters and optimizer state already have, by qualified name; empty for the first program.
        signature: a description of the call, for messages.
        update: the optimizer's update. The program is then that of the whole training step.
        seed: seed of the call's random operators, for a model that branches on random values.
        device: device of the parameters.
        values: makes a context in which the given model's parameters hold their global values. The context gathers the
            parameters on every rank, so it is entered only if the trace must read values.
        known: programs of similar calls, traced while the model had other Python attributes.
        derivatives: derivatives that the call returns in place of the model's outputs, the innermost first.
        outputs: choice of the outputs that the call returns.
        forward_only: leave out the backward, for callers that inspect only the forward.
        as_compiled: make `torch.compiler.is_compiling()` true for the model's Python from the start.
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
