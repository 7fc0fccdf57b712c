"""Find buffers that `forward` writes, and whose values after a batch do not follow from its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autoshard.ir.program import InputKind, OutputKind, Program
from passes.verification.batch_states import Same, State, Sum

aten = torch.ops.aten


def written_values(program: Program) -> list[fx.Node]:
    """Return the nodes of the new values of buffers."""
    nodes = program.nodes_by_name()
    return [nodes[slot.node] for slot in program.outputs_of(OutputKind.BUFFER_UPDATE)]


def refuse_statistics(
    program: Program, twins: Mapping[fx.Node, fx.Node], states: Mapping[fx.Node, Sequence[State]]
) -> str | None:
    """Return why micro-batches cannot write the buffers; None if each new value adds a sum over samples, or has none.

    The momentum of a running mean, for example, would count once for each micro-batch.

    Args:
        program: the program of one micro-batch.
        twins: node of the program → the corresponding node of a program of two micro-batches at once.
        states: for each node of the program, the state of each of its results.
    """
    nodes = program.nodes_by_name()
    buffers = {slot.name: nodes[slot.node] for slot in program.inputs_of(InputKind.BUFFER)}
    for slot, value in zip(program.outputs_of(OutputKind.BUFFER_UPDATE), written_values(program), strict=True):
        (state,) = states[value]
        if not isinstance(state, Same) and not _adds_sum(value, twins, buffers.get(slot.name), state):
            return (
                f"micro_batches: forward writes buffer {slot.name!r} from the samples, once for each part of a batch, "
                f"and its value is no sum over them ({value.meta.get('source') or value.name}). Running statistics "
                "are an example. Set track_running_stats=False, write it between steps, or leave micro_batches out."
            )
    return None


def _adds_sum(value: fx.Node, twins: Mapping[fx.Node, fx.Node], buffer: fx.Node | None, state: State) -> bool:
    """Whether `value` is the buffer plus a sum over the samples, or plus their number."""
    while value.target is aten.clone.default:
        (value,) = value.all_input_nodes
    if value.target not in _ADDS or value.args[0] is not buffer:
        return False
    ours, theirs = value.args[1], twins[value].args[1]
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return theirs == 2 * ours
    return isinstance(state, Sum) and state.terms == frozenset({(None, 0)})


_ADDS = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.index_add.default, aten.scatter_add.default),
    *(aten.index_put.default, aten._unsafe_index_put.default),
)
