"""Verifies that the prepared form of a program computes the results of the traced program.

Both graphs get value numbers in one table (`passes.preparation.number_values`), and their results must have equal
numbers. A fan-out has the number of its operand. `addmm(bias, a, b)` has the number of `mm(a, b) + bias`. The tanh form
of gelu has the number of its written-out calls.
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.errors import VerificationError
from autoshard.ir.program import Program
from passes.preparation.join_gelu import number_written_out
from passes.preparation.number_values import OPERAND, Numbering
from passes.verification.verify_offload import verify_offload

_aten = torch.ops.aten


def verify_preparation(traced: Program, prepared: Program) -> None:
    """Prove that every result of `prepared` is the same value as in `traced`.

    Raises:
        VerificationError: the inputs or outputs of the programs differ, a result is another value, or an offloaded
            value is read in a wrong place. The message names the value and the user's line.
    """
    if traced.inputs != prepared.inputs or _names(traced) != _names(prepared):
        raise VerificationError("preparing the program changed its inputs or the order of its outputs.")
    _check_results(prepared)
    verify_offload(prepared.graph)
    numbering = Numbering()
    expected, found = _result_numbers(numbering, traced), _result_numbers(numbering, prepared)
    nodes = prepared.nodes_by_name()
    for slot, before, after in zip(prepared.outputs, expected, found, strict=True):
        if before != after:
            node = nodes[slot.node]
            raise VerificationError(
                f"{slot.kind.value} {slot.name!r} is {node.format_node()} once the program is prepared, another value "
                f"than in the trace; it comes from {node.meta.get('source') or 'an unknown line'}. Written by "
                "passes.preparation.canonicalize, join_gelu or insert_fan_outs."
            )


def _check_results(program: Program) -> None:
    """Raise `VerificationError` unless the graph returns the nodes that the output slots name, in order."""
    returned = [str(item) for item in program.graph.output_node().args[0]]  # type: ignore[union-attr]
    named = [slot.node for slot in program.outputs]
    if returned != named:
        wrong = [pair for pair in zip(returned, named, strict=False) if pair[0] != pair[1]]
        raise VerificationError(
            f"the prepared program returns {len(returned)} values, {[pair[0] for pair in wrong]} where its slots name "
            f"{[pair[1] for pair in wrong]} of {len(named)}. Written by "
            "passes.preparation.canonicalize, join_gelu or insert_fan_outs."
        )


def _names(program: Program) -> list[tuple[str, str]]:
    return [(slot.kind, slot.name) for slot in program.outputs]


def _result_numbers(numbering: Numbering, program: Program) -> list[int]:
    numbering.restart_draws()
    for index, node in enumerate(program.graph.find_nodes(op="placeholder")):
        numbering.add(node, ("placeholder", index))
    for node in program.graph.nodes:
        if node.target is _aten.addmm.default and not node.kwargs:
            _add_split(numbering, node)
        elif number_written_out(node, numbering):
            continue
        elif node.op not in ("placeholder", "output"):
            numbering.add_node(node, program.graph_module)
    nodes = program.nodes_by_name()
    return [numbering.numbers[nodes[slot.node]] for slot in program.outputs]


def _add_split(numbering: Numbering, node: fx.Node) -> None:
    kind, _, (word, bias, left, right), keywords = numbering.structure(node)
    product = numbering.add(node, (kind, _aten.mm.default, (word, left, right), keywords))
    numbering.add(node, (kind, _aten.add.Tensor, (word, (OPERAND, product), bias), keywords))
