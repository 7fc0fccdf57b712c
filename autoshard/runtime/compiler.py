"""The interface through which a sharded module asks for programs, since the runtime imports no passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from autoshard.ir.initialisation import Initialisation
from autoshard.ir.program import Program
from autoshard.ir.request import CompiledProgram, Request
from autoshard.runtime.engine import Engine


class Compiler(Protocol):
    """Traces, plans and lowers calls. `passes.driver` implements it, because the runtime must not import the passes."""

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        """Compile a call, and return its program. All ranks must call."""
        ...

    def trace(self, request: Request) -> Program:
        """Trace a call, and return its program with global shapes, without a plan."""
        ...

    def record_initialisation(
        self, model: nn.Module, device: torch.device, init_fn: Callable[[nn.Module], Any] | None
    ) -> Initialisation:
        """Record the operations of a model's initialisers on `device`; `init_fn` runs after them."""
        ...

    def guards_hold(self, program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        """Whether a program whose trace depended on values of tensors may run with the present values.

        `inputs` are the tensors among the call's arguments. `state` has the parameters, buffers and seeds that guards
        read, by name.
        """
        ...
