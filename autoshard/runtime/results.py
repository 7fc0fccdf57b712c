"""Give the results of a program to the user: nest outputs as the model does, and set buffers and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.ir.program import OutputKind
from autoshard.runtime.executable import Executable


@dataclass(frozen=True, slots=True)
class Results:
    """Sets the buffers and attributes of the user's `model` after calls, and returns the outputs of calls."""

    model: nn.Module

    def hand_out(self, executable: Executable, outputs: Sequence[torch.Tensor]) -> Any:
        """Set the buffers and attributes that a call sets; return its outputs, nested as the model's own call does."""
        program = executable.phased.lowered.traced
        executable.set_attributes()
        leaves = dict(program.output_constants)
        for slot, output in zip(executable.outputs, outputs, strict=True):
            if slot.slot.kind is OutputKind.BUFFER_UPDATE:
                self.update_buffer(slot.slot.name, output)
            else:
                leaves[int(slot.slot.name.removeprefix("output:"))] = output
        for index, path in program.kept.items():
            self.keep(path, leaves.pop(index))
        if program.output_tree is None:
            return tuple(leaves[index] for index in sorted(leaves))
        return pytree.tree_unflatten([leaves[index] for index in range(len(leaves))], program.output_tree)

    def keep(self, path: str, value: torch.Tensor) -> None:
        """Set the model's attribute at `path`, such as "layers.0.last", to a tensor, as the model's own call does."""
        owner, _, name = path.rpartition(".")
        setattr(self.model.get_submodule(owner), name, value)

    @torch.no_grad()
    def update_buffer(self, name: str, value: torch.Tensor) -> None:
        """Copy `value`, a program's new value of a buffer, into the user's buffer with this qualified name."""
        self.model.get_buffer(name).copy_(value)
