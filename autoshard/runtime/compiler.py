"""Who answers a sharded module's requests for programs."""

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
