"""Lowered programs: what each rank runs.

The graph of a `LoweredProgram` is a torch.fx graph over local tensors with explicit collectives
(`torch.ops._c10d_functional`, whose group `autoshard.ir.communicators` names). One text serves all ranks. Node
metadata: `val` (local), `spec`, `global` (the traced node it stands for), `phase`.
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
    """A value that enters or leaves a lowered program.

    `shape` is the global shape; each rank passes the padded local shape `spec.local_shape(shape, mesh)`.
    """

    slot: InputSlot | OutputSlot
    spec: PartitionSpec
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """The joint forward-and-backward program of one rank (of every rank: the text is the same).

    Args:
        traced: the program with global shapes that this one computes.
        mesh: the mesh it runs on.
        graph_module: placeholders in the order of `inputs`; returns a flat tuple in the order of `outputs`.
        inputs, outputs: the slots of `traced`, with specs.
        without_kernels: the program that this one was before kernels stood in for its operators, if they do.
    """

    traced: Program
    mesh: Mesh
    graph_module: fx.GraphModule
    inputs: tuple[LocalSlot, ...]
    outputs: tuple[LocalSlot, ...]
    without_kernels: LoweredProgram | None = None


@dataclass(frozen=True, slots=True)
class BackwardHalves:
    """A backward in two halves: for the stages before, which wait for it, and for the update (Qi et al. 2023).

    Args:
        inputs: takes what the backward takes; returns what that returns for others, `backward_outputs`, then the values
            that the second half reads.
        weights: takes these values; returns those carried into the update.
    """

    inputs: fx.GraphModule
    weights: fx.GraphModule


@dataclass(frozen=True, slots=True)
class PhasedProgram:
    """A lowered program cut into what runs in the forward and in the backward call, and in an optimizer's update.

    Args:
        lowered: the whole.
        forward: takes `forward_inputs` (indices into `lowered.inputs`: all but the tangents), then the results of
            `hoisted`; returns a flat tuple of `forward_outputs` (indices into `lowered.outputs`: outputs and buffer
            updates), then the saved values.
        backward: takes the saved values, then `backward_inputs` (the tangents); returns `backward_outputs`
            (gradients), then the values carried into the update: gradients as the update reads them, each a sum, or an
            addend of one, so that those of micro-batches add up.
        saved: names of the forward's nodes that are kept for the backward, in order.
        update: takes the carried values, then `update_inputs` (parameters, optimizer state, hyper-parameters); returns
            `update_outputs` (the parameters and the state, updated). None in programs without one.
        carried: names of the backward's nodes that the update reads, in order.
        hoisted: what depends on parameters alone, computed once for all micro-batches of a step: takes
            `hoisted_inputs`, parameters and buffers that stay. None where each micro-batch computes everything.
        halves: the backward in two, of a stage whose order cuts it.
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
        """The graphs by name, in the order in which they run."""
        named = {"hoisted": self.hoisted, "forward": self.forward, "backward": self.backward, "update": self.update}
        return {name: graph_module for name, graph_module in named.items() if graph_module is not None}

    def digest(self) -> str:
        """A short hash of the text of the graphs, which is the same on all ranks."""
        graphs = [graph_module.graph for graph_module in self.phases.values()]
        return hashlib.sha256("\n".join(map(str, graphs)).encode()).hexdigest()[:16]
