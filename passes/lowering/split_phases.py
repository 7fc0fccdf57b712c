"""Cuts a lowered program into forward, backward and update.

* The forward has every node that outputs and buffer updates need, and every other node of phase "forward".
* The backward has all other nodes before the update. Forward values that it reads are *saved*.
* The update, which only the program of a training step has, has the nodes of phase "update". Values that it reads from
  the forward or the backward are *carried*.

Nodes keep their order in each phase.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.graphs.extract_graph import extract_graph, needed
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from autoshard.ir.program import InputKind, OutputKind
from passes.lowering.save_least import computed_again

FORWARD_RESULTS = (OutputKind.OUTPUT, OutputKind.BUFFER_UPDATE)
UPDATE_RESULTS = (OutputKind.PARAMETER_UPDATE, OutputKind.STATE_UPDATE, OutputKind.SQUARES, OutputKind.NORM)
UPDATE_INPUTS = (InputKind.STATE, InputKind.HYPER, InputKind.SQUARES, InputKind.UNSCALE)
"""Kinds of the inputs that only an update reads. The update also reads parameters, which other phases read too."""


@dataclass(frozen=True, slots=True)
class SplitPhases:
    """Cuts a lowered program into phases.

    With `saves_least`, the forward saves fewer bytes, and the backward recomputes the other values that it reads
    (`passes.lowering.save_least`).
    """

    saves_least: bool = False

    def __call__(self, lowered: LoweredProgram) -> PhasedProgram:
        """Return the program cut into phases. Its field `lowered` is the uncut program, for verification."""
        nodes = list(lowered.graph_module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        results = nodes[-1].args[0]
        kinds = [slot.slot.kind for slot in lowered.inputs]
        found = [slot.slot.kind for slot in lowered.outputs]
        forward_out = _indices(kind in FORWARD_RESULTS for kind in found)
        update_out = _indices(kind in UPDATE_RESULTS for kind in found)
        backward_out = _indices(kind not in (*FORWARD_RESULTS, *UPDATE_RESULTS) for kind in found)
        forward_in = _indices(kind not in (InputKind.TANGENT, *UPDATE_INPUTS) for kind in kinds)
        backward_in = _indices(kind == InputKind.TANGENT for kind in kinds)

        update = {node for node in nodes if node.op != "placeholder" and node.meta.get("phase") == "update"}
        forward = {node for node in nodes if node.meta.get("phase") == "forward"}
        forward |= needed(results[index] for index in forward_out)
        backward = {node for node in nodes if node not in forward and node not in update}
        read = _read_by(update, [results[index] for index in update_out])
        pairs = enumerate(zip(placeholders, kinds, strict=True))  # a tangent that the update reads is carried
        update_in = tuple(index for index, (node, kind) in pairs if node in read and kind != InputKind.TANGENT)
        carried = [node for node in nodes if node in read and node not in update and _is_carried(node)]
        gives = [*(results[index] for index in backward_out), *carried]
        if self.saves_least:
            backward |= computed_again(nodes, forward, _read_by(backward, gives))
        saved = _saved(nodes, forward - backward, _read_by(backward, gives))
        return PhasedProgram(
            lowered=lowered.without_kernels or lowered,
            forward=_extract(
                lowered,
                [placeholders[i] for i in forward_in],
                forward,
                [*(results[i] for i in forward_out), *saved],
            ),
            backward=_extract(
                lowered,
                [*saved, *(placeholders[i] for i in backward_in)],
                backward,
                [*(results[i] for i in backward_out), *carried],
            ),
            forward_inputs=forward_in,
            forward_outputs=forward_out,
            backward_inputs=backward_in,
            backward_outputs=backward_out,
            saved=tuple(node.name for node in saved),
            update=_extract(
                lowered, [*carried, *(placeholders[i] for i in update_in)], update, [results[i] for i in update_out]
            )
            if update_out
            else None,
            update_inputs=update_in,
            update_outputs=update_out,
            carried=tuple(node.name for node in carried),
        )


def _indices(flags: Iterable[bool]) -> tuple[int, ...]:
    return tuple(index for index, flag in enumerate(flags) if flag)


def _read_by(members: Collection[fx.Node], results: Sequence[fx.Node]) -> set[fx.Node]:
    read = {operand for node in members if node.op != "output" for operand in node.all_input_nodes}
    return read | set(results)


def _saved(nodes: Sequence[fx.Node], forward: set[fx.Node], read: set[fx.Node]) -> list[fx.Node]:
    """Return the tensors to save: the nodes that are in `forward` and in `read`, in the order of `nodes`.

    Integers, such as a rank's index, are not saved, because the backward computes them again.
    """
    return [node for node in nodes if node in forward and node in read and _is_tensor(node)]


def _is_carried(node: fx.Node) -> bool:
    """Whether a value that the update reads is carried to the update: a computed tensor, or a tangent of the backward.

    Parameters and optimizer state are not carried, because they are inputs of the update.
    """
    return _is_tensor(node) and (node.op != "placeholder" or node.meta.get("phase") == "backward")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and node.op != "get_attr"


def _extract(
    lowered: LoweredProgram, inputs: Sequence[fx.Node], members: set[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    whole = lowered.graph_module
    return lazy_module(whole, extract_graph(whole.graph, inputs, members, results))
