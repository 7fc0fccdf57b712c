"""Verifies that the phases of a program together compute the results of the uncut program (the *joint* program).

The joint program gets value numbers (`passes.preparation.number_values`), so that equal values have equal numbers. The
calls of each phase are then looked up in this numbering. Every call must be a call of the joint program.

* The hoisted phase runs before the forward, which takes its results. It may only read parameters, and buffers that the
  program does not write, and it draws no random numbers. So its results are equal for all micro-batches of a step. The
  update, which writes parameters, runs after all micro-batches (`autoshard.runtime.traced_step`).
* The forward starts from the numbers of the joint inputs. It must return the joint program's outputs and buffer
  updates, and then the saved values.
* The backward starts from the numbers of the saved values, in order, and of the tangents.
* The update starts from the numbers of the carried values and of its inputs.

If all numbers agree, the phases compute the joint program's results; names of nodes do not matter. Values that the
forward leaves on the host may only be fetched from there (`passes.verification.verify_offload`).

The rewrites of the phases are undone first. Gradients that are sent in 16 bits count as the gradients that they round
(`widen_reductions`). Native operators count as their semantic operators. Buckets are expanded into collectives
(`expand_collectives`), and kernels into calls (`expand_kernels`). So the proof does not look into kernels, whose tests
show that they compute the expanded calls. Sums and products match in either order of their operands. Expert layers may
save received rows for the backward (`number_kept`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autoshard.errors import VerificationError
from autoshard.ir.communicators import without_purpose
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.program import InputKind, OutputKind
from autoshard.kernels.native import SEMANTIC
from autoshard.kernels.offload import TRANSFERS, to_host
from passes.preparation.number_values import Numbering, draws_numbers, number_graph
from passes.preparation.rewriting import with_groups, with_targets
from passes.verification.check_computed import check_computed
from passes.verification.expand_biases import expand_biases
from passes.verification.expand_collectives import expand_collectives
from passes.verification.number_kept import number_kept
from passes.verification.verify_offload import verify_offload
from passes.verification.widen_reductions import widen_reductions

_FORWARD_RESULTS = (OutputKind.OUTPUT, OutputKind.BUFFER_UPDATE)
_UPDATE_RESULTS = (OutputKind.PARAMETER_UPDATE, OutputKind.STATE_UPDATE, OutputKind.SQUARES, OutputKind.NORM)
_UPDATE_INPUTS = (InputKind.STATE, InputKind.HYPER, InputKind.SQUARES, InputKind.UNSCALE)
_KERNEL_PREFIX = "autoshard.triton_"


def verify_phases(phased: PhasedProgram) -> None:
    """Prove that the phases together compute the results of `phased.lowered`.

    Raises:
        VerificationError: a node, a saved value or a result differs. The message names it.
    """
    _check_parts(phased)
    _check_host(phased)
    joint = number_graph(phased.lowered.graph_module)
    number_kept(joint)
    inputs = [joint.keys["placeholder", index] for index in range(len(phased.lowered.inputs))]
    results = [joint.numbers[node] for node in results_of(phased.lowered.graph_module)]
    names = {node.name: number for node, number in joint.numbers.items()}
    held = _walk_hoisted(phased, joint, inputs)
    joint.restart_draws()
    taken = [*(inputs[index] for index in phased.forward_inputs), *held]
    forward = walk(joint, _written_out(phased.forward), taken, "forward")
    count = len(phased.forward_outputs)
    _check_equal(phased.forward, forward[:count], [results[index] for index in phased.forward_outputs])
    saved = forward[count:]
    _check_kept(names, phased.saved, saved, "forward")
    taken = [*saved, *(inputs[index] for index in phased.backward_inputs)]
    backward = walk(joint, _written_out(phased.backward), taken, "backward")
    count = len(phased.backward_outputs)
    _check_equal(phased.backward, backward[:count], [results[index] for index in phased.backward_outputs])
    carried = backward[count:]
    _check_kept(names, phased.carried, carried, "backward")
    if phased.update is not None:
        taken = [*carried, *(inputs[index] for index in phased.update_inputs)]
        update = walk(joint, _written_out(phased.update), taken, "update")
        _check_equal(phased.update, update, [results[index] for index in phased.update_outputs])


def _walk_hoisted(phased: PhasedProgram, joint: Numbering, inputs: Sequence[int]) -> list[int]:
    """Return the value numbers of the results of the hoisted phase.

    Raises:
        VerificationError: a result may differ between micro-batches, or a call is no call of the joint program.
    """
    written = {slot.slot.name for slot in phased.lowered.outputs if slot.slot.kind == OutputKind.BUFFER_UPDATE}
    for index in phased.hoisted_inputs:
        slot = phased.lowered.inputs[index].slot
        if slot.kind != InputKind.PARAMETER and (slot.kind != InputKind.BUFFER or slot.name in written):
            raise VerificationError(
                f"the hoisted program reads {slot.kind.value} {slot.name!r}, which may differ between micro-batches."
            )
    if phased.hoisted is None:
        return []
    graph_module = _written_out(phased.hoisted)
    for node in graph_module.graph.nodes:
        if draws_numbers(node.target) or node.target in TRANSFERS:
            raise VerificationError(
                f"node {node.name!r}, {node.format_node()}, is hoisted; each micro-batch has its own."
            )
    return walk(joint, graph_module, [inputs[index] for index in phased.hoisted_inputs], "hoisted")


def _written_out(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph of a phase with calls like those of the joint program.

    The calls take the place of buckets, kernels, native operators, `addmm` and 16-bit reductions. Communicators lose
    their purposes. Triton is imported only if the graph has kernels.
    """
    check_computed(graph_module.graph)
    graph_module = widen_reductions(expand_collectives(with_targets(graph_module, SEMANTIC)))
    graph_module = _without_purposes(expand_biases(graph_module))
    if not any(str(node.target).startswith(_KERNEL_PREFIX) for node in graph_module.graph.nodes):
        return graph_module
    from passes.verification.expand_kernels import expand_kernels

    return expand_kernels(graph_module)


def _without_purposes(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph in which each communicator is named by its mesh axes alone, without its purpose."""
    return with_groups(graph_module, lambda node: without_purpose(str(node.args[-1])))


def _check_parts(phased: PhasedProgram) -> None:
    """Raise `VerificationError` unless each input and output of the joint program belongs to the phase of its kind.

    For example, tangents must be inputs of the backward.
    """
    takes = [slot.slot.kind for slot in phased.lowered.inputs]
    gives = [slot.slot.kind for slot in phased.lowered.outputs]
    others = (*_FORWARD_RESULTS, *_UPDATE_RESULTS)
    for word, indices, expected in (
        ("forward_inputs", phased.forward_inputs, [k not in (InputKind.TANGENT, *_UPDATE_INPUTS) for k in takes]),
        ("backward_inputs", phased.backward_inputs, [kind == InputKind.TANGENT for kind in takes]),
        ("forward_outputs", phased.forward_outputs, [kind in _FORWARD_RESULTS for kind in gives]),
        ("backward_outputs", phased.backward_outputs, [kind not in others for kind in gives]),
        ("update_outputs", phased.update_outputs, [kind in _UPDATE_RESULTS for kind in gives]),
    ):
        wanted = tuple(index for index, flag in enumerate(expected) if flag)
        if indices != wanted:
            raise VerificationError(f"{word}={indices!r} of the phases should be {wanted!r}.")
    if bool(phased.update_outputs) != (phased.update is not None):
        raise VerificationError(f"the joint program has {len(phased.update_outputs)} updates, not {phased.update!r}.")


def _check_host(phased: PhasedProgram) -> None:
    """Raise `VerificationError` if values on the host are used wrongly.

    Only fetches may read them, and only the saved values of the forward may be returned on the host.
    """
    results, count = results_of(phased.forward), len(phased.forward_outputs)
    returned, saved = results[:count], results[count:]
    verify_offload(phased.forward.graph, kept=[node for node in saved if node not in returned])
    taken = phased.backward.graph.find_nodes(op="placeholder")
    held = [node for node, given in zip(taken, saved, strict=False) if given.target is to_host]
    verify_offload(phased.backward.graph, held)
    if phased.update is not None:
        verify_offload(phased.update.graph)


def walk(joint: Numbering, graph_module: fx.GraphModule, inputs: Sequence[int], phase: str) -> list[int]:
    """Return the value numbers of the results of `graph_module`, whose calls must be calls of the program `joint`.

    `inputs` are the value numbers of its inputs. `phase` names the graph in messages, such as "forward".

    Raises:
        VerificationError: a call of the graph is no call of the whole program.
    """
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise VerificationError(
            f"the {phase} program takes {[node.name for node in placeholders]}; it is given {len(inputs)} values."
        )
    joint.numbers.update(zip(placeholders, inputs, strict=True))
    known = len(joint.nodes)
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if joint.add_node(node, graph_module, commuted=True) >= known:
            raise VerificationError(
                f"node {node.name!r} of the {phase} program, {node.format_node()}, is no call of the whole program; it "
                f"comes from {node.meta.get('source') or 'an unknown line'}."
            )
    return [joint.numbers[node] for node in results_of(graph_module)]


def _check_equal(graph_module: fx.GraphModule, found: Sequence[int], expected: Sequence[int]) -> None:
    if list(found) == list(expected):
        return
    nodes = results_of(graph_module)
    for node, number, due in zip(nodes, found, expected, strict=False):
        if number != due:
            raise VerificationError(f"{node.name!r} is returned where the joint program returns another value.")
    raise VerificationError(f"{len(found)} results are returned; the joint program has {len(expected)} of them.")


def _check_kept(names: Mapping[str, int], kept: Sequence[str], found: Sequence[int], phase: str) -> None:
    """Raise `VerificationError` unless a phase hands on the values of the joint program's nodes `kept`, in order.

    Args:
        names: the value number of each node of the joint program, by name.
        found: the value numbers of the values that the phase `phase` hands on.
    """
    if [names.get(name) for name in kept] != list(found):
        raise VerificationError(f"the {phase} program's last {len(found)} results are not {list(kept)}, in order.")


def results_of(graph_module: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that a graph returns.

    Raises:
        VerificationError: the graph returns something that is no node.
    """
    results = next(iter(reversed(graph_module.graph.nodes))).args[0]
    if not isinstance(results, (tuple, list)) or not all(isinstance(item, fx.Node) for item in results):
        raise VerificationError(f"a program returns a tuple of its values; found {results!r}.")
    return [item for item in results if isinstance(item, fx.Node)]
