"""A phased program bound to the engine that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from autoshard.ir.lowered import LocalSlot, PhasedProgram
from autoshard.ir.plan import Plan
from autoshard.ir.program import OutputKind
from autoshard.runtime.engine import Engine, Loaded, LocalValue


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """What compiling one call of a model gives.

    Args:
        phased: the lowered program, cut into forward and backward.
        plan: the plan it was lowered from, or None for a program written by hand.
        sharded_outputs: names of the outputs ("output:0") whose layout the user asked for: they are handed
            out as they lie, not gathered.
    """

    phased: PhasedProgram
    plan: Plan | None = None
    sharded_outputs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Executable:
    """A compiled program that an engine has loaded; runs on what users hold: global tensors and DTensors."""

    compiled: CompiledProgram
    engine: Engine

    @property
    def phased(self) -> PhasedProgram:
        """The program."""
        return self.compiled.phased

    @cached_property
    def inputs(self) -> tuple[LocalSlot, ...]:
        """The slots that a forward call takes, in order."""
        return tuple(self.phased.lowered.inputs[index] for index in self.phased.forward_inputs)

    @cached_property
    def outputs(self) -> tuple[LocalSlot, ...]:
        """The slots that a forward call yields, in order: outputs and buffer updates."""
        return tuple(self.phased.lowered.outputs[index] for index in self.phased.forward_outputs)

    @cached_property
    def tangents(self) -> tuple[LocalSlot, ...]:
        """The slots that a backward call takes, in order."""
        return tuple(self.phased.lowered.inputs[index] for index in self.phased.backward_inputs)

    @cached_property
    def gradients(self) -> tuple[LocalSlot, ...]:
        """The slots that a backward call yields, in order."""
        return tuple(self.phased.lowered.outputs[index] for index in self.phased.backward_outputs)

    @cached_property
    def updated_buffers(self) -> frozenset[str]:
        """Names of the buffers that a forward call changes."""
        return frozenset(slot.slot.name for slot in self.outputs if slot.slot.kind == OutputKind.BUFFER_UPDATE)

    @cached_property
    def _forward(self) -> Loaded:
        return self.engine.load(self.phased.forward)

    @cached_property
    def _backward(self) -> Loaded:
        return self.engine.load(self.phased.backward)

    def load(self) -> None:
        """Load both phases now; they may bind process groups, which all ranks do together."""
        _ = self._forward, self._backward

    def run_forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[LocalValue]]:
        """The global outputs, in the order of `outputs`, and the local values kept for the backward."""
        values = [self.engine.read(tensor, slot) for tensor, slot in zip(tensors, self.inputs, strict=True)]
        results = self._forward(values)
        count = len(self.outputs)
        outputs = [self._write_output(value, slot) for value, slot in zip(results, self.outputs, strict=False)]
        return outputs, list(results[count:])

    def run_backward(
        self,
        saved: list[LocalValue],
        tangents: Mapping[str, torch.Tensor],
        likes: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The gradients by the name of what they belong to.

        Args:
            saved: what `run_forward` kept; emptied, so that each value is freed after its last use.
            tangents: gradient of each output by the name of its tangent ("tangent:0"); zeros where one is
            missing. likes: what each gradient belongs to, by name: that of a DTensor has its placements.
        """
        values = [*saved, *(self._read_tangent(tangents, slot) for slot in self.tangents)]
        saved.clear()
        results = self._backward(values)
        return {
            slot.slot.name: self.engine.write_like(value, slot, likes[slot.slot.name])
            for value, slot in zip(results, self.gradients, strict=True)
            if slot.slot.name in likes
        }

    def _write_output(self, value: LocalValue, slot: LocalSlot) -> torch.Tensor:
        if slot.slot.name in self.compiled.sharded_outputs:
            return self.engine.write_sharded(value, slot)
        return self.engine.write(value, slot)

    def _read_tangent(self, tangents: Mapping[str, torch.Tensor], slot: LocalSlot) -> LocalValue:
        tangent = tangents.get(slot.slot.name)
        if tangent is None:
            tangent = torch.zeros(slot.shape, dtype=slot.dtype, device=self.engine.device)
        return self.engine.read(tangent, slot)
