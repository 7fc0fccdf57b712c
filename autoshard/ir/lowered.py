"""Lowered programs: the programs that ranks run.

The graph of a `LoweredProgram` is a torch.fx graph over local tensors with explicit collectives
(`torch.ops._c10d_functional`, with groups named by `autoshard.ir.communicators`). One text serves all ranks. Node
metadata: `val` (the local value), `spec`, `global` (the node's traced node), `phase`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputSlot, OutputSlot, Program
from autoshard.ir.spec import PartitionSpec


@dataclass(frozen=True, slots=True)
class LocalSlot:
    """A value that enters or leaves a lowered program, with its global `shape`.

    Each rank passes a tensor of the padded local shape `spec.local_shape(shape, mesh)`.
    """

    slot: InputSlot | OutputSlot
    spec: PartitionSpec
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """Forward, backward and (in a training step) the update as one program, with one text for all ranks.

    Args:
        traced: the program with global shapes, before lowering.
        graph_module: placeholders in the order of `inputs`; returns a flat tuple in the order of `outputs`.
        inputs, outputs: the slots of `traced`, with specs.
        without_kernels: the program before Triton kernels replaced operators, or None.
    """

    traced: Program
    mesh: Mesh
    graph_module: fx.GraphModule
    inputs: tuple[LocalSlot, ...]
    outputs: tuple[LocalSlot, ...]
    without_kernels: LoweredProgram | None = None


@dataclass(frozen=True, slots=True)
class BackwardHalves:
    """A backward split into two graphs, as in zero-bubble pipelines (Qi et al. 2023).

    The first graph computes gradients for which previous stages wait, the second graph gradients for the update.

    Args:
        inputs: takes the backward's inputs; returns `backward_outputs` for other stages, then the inputs of `weights`.
        weights: takes the last results of `inputs`; returns the values carried into the update.
    """

    inputs: fx.GraphModule
    weights: fx.GraphModule


@dataclass(frozen=True, slots=True)
class PhasedProgram:
    """A lowered program (`lowered`) cut into forward, backward and the optimizer's update.

    Args:
        forward: takes `forward_inputs` (indices into `lowered.inputs`: all but the tangents), then the results of
            `hoisted`. Returns a flat tuple of `forward_outputs` (indices into `lowered.outputs`: outputs and buffer
            updates), then the saved values.
        backward: takes the saved values, then `backward_inputs` (the tangents). Returns `backward_outputs` (gradients),
            then the carried values.
        saved: names of the forward's nodes whose values are saved for the backward, in order.
        update: takes the carried values, then `update_inputs` (parameters, optimizer state, hyper-parameters). Returns
            `update_outputs` (the updated parameters and state). None in programs without an update.
        carried: names of the backward's nodes that the update reads, in order. Each is a gradient, or an addend of a
            gradient, so micro-batches can be added up.
        hoisted: computation on parameters and buffers alone, run once for all micro-batches of a step. Takes
            `hoisted_inputs` (indices into `lowered.inputs`). None where each micro-batch computes everything.
        halves: the split backward, for a stage whose order splits backwards.
    """

    lowered: LoweredProgram
    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_inputs: tuple[int, ...]
    forward_outputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]
    saved: tuple[str, ...]
    update: fx.GraphModule | None = None
    update_inputs: tuple[int, ...] = ()
    update_outputs: tuple[int, ...] = ()
    carried: tuple[str, ...] = ()
    hoisted: fx.GraphModule | None = None
    hoisted_inputs: tuple[int, ...] = ()
    halves: BackwardHalves | None = None

    @property
    def phases(self) -> Mapping[str, fx.GraphModule]:
        """The graphs in running order by phase ("hoisted", "forward", "backward", "update"), without absent phases."""
        named = {"hoisted": self.hoisted, "forward": self.forward, "backward": self.backward, "update": self.update}
        return {name: graph_module for name, graph_module in named.items() if graph_module is not None}

    def digest(self) -> str:
        """Return a hash of the text of all phases, 16 hex digits, equal on all ranks."""
        graphs = [graph_module.graph for graph_module in self.phases.values()]
        return hashlib.sha256("\n".join(map(str, graphs)).encode()).hexdigest()[:16]
