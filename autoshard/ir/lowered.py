"""Lowered programs: what each rank runs.

The graph of a `LoweredProgram` is a torch.fx graph over local tensors with explicit collectives
(`torch.ops._c10d_functional`, whose group name is a mesh axis). One text serves all ranks. Node metadata: `val`
(local), `spec`, `global` (the traced node it stands for), `phase`.
"""

from __future__ import annotations

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
    """

    traced: Program
    mesh: Mesh
    graph_module: fx.GraphModule
    inputs: tuple[LocalSlot, ...]
    outputs: tuple[LocalSlot, ...]


@dataclass(frozen=True, slots=True)
class PhasedProgram:
    """A lowered program cut into what runs in the forward and in the backward call.

    Args:
        lowered: the whole.
        forward: takes `forward_inputs` (indices into `lowered.inputs`: all but the tangents), returns a flat tuple of
            `forward_outputs` (indices into `lowered.outputs`: outputs and buffer updates), then the saved values.
        backward: takes the saved values, then `backward_inputs` (the tangents); returns `backward_outputs`
            (gradients).
        saved: names of the forward's nodes that are kept for the backward, in order.
    """

    lowered: LoweredProgram
    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_inputs: tuple[int, ...]
    forward_outputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]
    saved: tuple[str, ...]
