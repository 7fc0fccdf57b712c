"""The request for a program that a sharded module makes at a new kind of call, and who answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from autoshard.ir.derivative import Derivatives
from autoshard.ir.initialisation import Initialisation
from autoshard.ir.outputs import Outputs
from autoshard.ir.program import Program
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.update import Update
from autoshard.runtime.engine import Engine
from autoshard.runtime.executable import CompiledProgram


@dataclass(frozen=True, slots=True)
class Request:
    """What to compile.

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


class Compiler(Protocol):
    """Traces, plans and lowers; given by `autoshard.api`, which may import what the runtime may not."""

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        """The program for a call. Called by all ranks."""
        ...

    def trace(self, request: Request) -> Program:
        """The program of a call, traced and not planned."""
        ...

    def record_initialisation(
        self, model: nn.Module, device: torch.device, init_fn: Callable[[nn.Module], Any] | None
    ) -> Initialisation:
        """What the initialisers of a model do, whose tensors are on `device`; `init_fn` comes after its own."""
        ...

    def guards_hold(self, program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        """Whether a program whose trace relied on values serves these inputs; `state` has what its guards read."""
        ...
