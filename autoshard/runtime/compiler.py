"""The interface by which a sharded module gets programs. The runtime does not import the passes that make them."""

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
    """Traces, plans and lowers calls. `passes.driver` implements it."""

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        """Compile the requested call for an engine's mesh, and return its program. All ranks must call this."""
        ...

    def trace(self, request: Request) -> Program:
        """Trace the requested call, and return its program with global shapes, without a plan."""
        ...

    def record_initialisation(
        self, model: nn.Module, device: torch.device, init_fn: Callable[[nn.Module], Any] | None
    ) -> Initialisation:
        """Return the recorded operators that initialise a model's tensors, which are or will be on `device`.

        `init_fn` is called with each module, after the modules' own initialisers.
        """
        ...

    def guards_hold(self, program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        """Whether the tensor values that a program's trace read are still the same. If not, the program must not run.

        `inputs` are the tensors among the call's arguments. `state` has the parameters, buffers and seeds that guards
        read, by name.
        """
        ...
