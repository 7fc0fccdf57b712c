"""Verifies that a lowered program computes the results of the traced program, before it runs.

The proof trusts the sharding rules, the definitions of reshards (`autoshard.ir.emit`), and the derivation in
`derive_values`. It reads neither the plan nor the metadata of the lowered program, and shares no code with lowering.

The sharding rules say which calls each rank makes for an operator of the traced program. The definitions of reshards
say the same for a change of spec. Each node of the lowered program must be one of these calls, with the same arguments.
So a wrong axis of a collective, a missing wait, a wrong offset or a wrong factor leaves a node without a proof. Each
node without a proof is an error, even if no result depends on it.

The proof checks that

* the inputs and outputs are those of the traced program, in order;
* each result is the traced value's piece under the spec that its slot states;
* gradients and updates have the spec of the parameter, buffer, input or optimizer state that they belong to;
* each value that is added up over micro-batches is a gradient, which is linear in the loss. The traced update reads the
  gradient, or a sum with the gradient as an addend, from the backward.
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from types import FunctionType

import torch
from torch import fx
from torch._ops import OpOverload

from autoshard.errors import InvalidSpecError, VerificationError
from autoshard.ir.lowered import LocalSlot, LoweredProgram
from autoshard.ir.program import OWNERS, InputSlot, OutputKind, OutputSlot, Program
from autoshard.ir.spec import Reduction
from autoshard.ir.verification_report import VerificationReport
from autoshard.rules.registry import author_of_rule, inferred_operators
from passes.preparation.number_values import draws_numbers
from passes.verification.derive_values import Derivation
from passes.verification.local_forms import LocalForms
from passes.verification.verify_offload import verify_offload


def verify_program(
    program: Program, lowered: LoweredProgram, carried: Sequence[str] = (), forms: LocalForms | None = None
) -> VerificationReport:
    """Prove that every result of `lowered` is the result of `program`, under the spec of its slot.

    Args:
        program: the traced program in the form that was lowered: canonical, with fan-outs.
        carried: names of the values of `lowered` that are added up over micro-batches before the update reads them.
        forms: a cache of local forms on the mesh, to share between programs. None: a new cache.

    Returns:
        A report of the proof: the number of proven nodes and results, the collectives, and the assumptions.

    Raises:
        VerificationError: a value could not be derived. The message names the node, the expected and the derived value,
            and the user's line.
    """
    start = time.monotonic()
    _check_slots(program, lowered)
    verify_offload(lowered.graph_module.graph)
    derivation = Derivation(program, lowered, forms or LocalForms(lowered.mesh))
    derivation.run()
    _check_nodes(derivation)
    _check_results(derivation)
    _check_carried(derivation, carried)
    return VerificationReport(
        mesh=lowered.mesh,
        nodes=len(lowered.graph_module.graph.nodes) - 1,
        values=sum(map(bool, derivation.holders.values())),
        results=dict(Counter(slot.slot.kind.value for slot in lowered.outputs)),
        collectives=dict(sorted(_collectives(lowered).items())),
        rules=dict(sorted(derivation.rules.items())),
        assumptions=tuple(_assumptions(derivation)),
        seconds=time.monotonic() - start,
    )


def _check_slots(program: Program, lowered: LoweredProgram) -> None:
    """Raise `VerificationError` unless both programs have the same slots, with the same shapes and dtypes.

    Each slot must also have an input or result in the lowered graph. A gradient or an updated value must have its
    owner's spec.
    """
    local, nodes = list(lowered.graph_module.graph.nodes), program.nodes_by_name()
    placeholders = [node for node in local if node.op == "placeholder"]
    results = _results(local[-1])
    for word, slots, traced, count in (
        ("inputs", lowered.inputs, program.inputs, len(placeholders)),
        ("outputs", lowered.outputs, program.outputs, len(results)),
    ):
        if tuple(slot.slot for slot in slots) != traced or len(slots) != count:
            raise VerificationError(
                f"the lowered program has {count} {word} for the slots {[slot.slot.name for slot in slots]}; "
                f"the traced program has {[slot.name for slot in traced]}."
            )
        for slot in slots:
            _check_slot(nodes[slot.slot.node].meta["val"], lowered, slot)
    _check_owners(lowered)


def _check_slot(value: torch.Tensor, lowered: LoweredProgram, slot: LocalSlot) -> None:
    """Raise `VerificationError` unless a slot has the traced value's shape and dtype, and a possible spec."""
    if slot.shape != tuple(value.shape) or slot.dtype != value.dtype:
        raise VerificationError(
            f"{_slot_text(slot.slot)} is promised with shape={slot.shape}, dtype={slot.dtype}; the traced value has "
            f"shape={tuple(value.shape)}, dtype={value.dtype}."
        )
    try:
        slot.spec.check(lowered.mesh, value.dim())
    except InvalidSpecError as error:
        raise VerificationError(f"{_slot_text(slot.slot)} is promised under an impossible spec: {error}") from error


def _check_owners(lowered: LoweredProgram) -> None:
    owners = {(slot.slot.kind, slot.slot.name): slot.spec for slot in lowered.inputs}
    for slot in lowered.outputs:
        kind = OWNERS.get(OutputKind(slot.slot.kind))
        if kind is not None and owners.get((kind, slot.slot.name)) != slot.spec:
            raise VerificationError(
                f"{_slot_text(slot.slot)} is promised as {slot.spec!r}, but its owner lies as "
                f"{owners.get((kind, slot.slot.name))!r}. The two must agree."
            )


def _check_nodes(derivation: Derivation) -> None:
    for node in derivation.lowered.graph_module.graph.nodes:
        if node.op != "output" and derivation.local.numbers[node] not in derivation.covered:
            raise VerificationError(_unproven_text(derivation, node))


def _check_results(derivation: Derivation) -> None:
    results = _results(list(derivation.lowered.graph_module.graph.nodes)[-1])
    nodes = derivation.program.nodes_by_name()
    for slot, result in zip(derivation.lowered.outputs, results, strict=True):
        traced = nodes[slot.slot.node]
        holders = derivation.holders[derivation.traced.numbers[traced]]
        is_node = isinstance(result, fx.Node)
        if is_node and derivation.local.numbers[result] in holders.get(derivation.spec(slot.spec), ()):
            continue
        held = _held_text(derivation, result) if is_node else f"the constant {result!r}"
        raise VerificationError(
            f"{_slot_text(slot.slot)} is promised as {traced.name!r} under {slot.spec!r}, but the result "
            f"{result!s} was derived to hold {held}. The traced value comes from {_line(traced)}."
        )


def _check_carried(derivation: Derivation, carried: Sequence[str]) -> None:
    """Raise `VerificationError` unless the traced update reads each value named in `carried` from the backward.

    The update reads the value itself, or a sum of which the value is an addend. So the sum of the value over
    micro-batches is the value for the whole batch.
    """
    nodes = {node.name: node for node in derivation.lowered.graph_module.graph.nodes}
    unknown = [name for name in carried if name not in nodes]
    if unknown:
        raise VerificationError(f"{unknown} are carried into the update, and the lowered program has no such values.")
    addends = {number for number in _read_by_update(derivation) for number in _sums_of(derivation, number)}
    for name in carried:
        if derivation.local.numbers[nodes[name]] not in addends:
            raise VerificationError(
                f"node {name!r} of the lowered program is carried into the update, and so added up over micro-batches. "
                f"It holds {_held_text(derivation, nodes[name])}, which is no sum that the traced update reads of the "
                f"backward. It comes from {_line(nodes[name])}. "
                "Written by passes.lowering.lower or passes.lowering.split_phases."
            )


def _read_by_update(derivation: Derivation) -> set[int]:
    return {
        derivation.traced.numbers[operand]
        for node in derivation.program.graph.nodes
        if node.meta.get("phase") == "update"
        for operand in node.all_input_nodes
        if operand.meta.get("phase") == "backward"
    }


def _sums_of(derivation: Derivation, number: int) -> Iterator[int]:
    """Yield the local values that hold traced value `number` whole, or as addends of a sum over ranks."""
    for spec, held in derivation.holders[number].items():
        if all(reduction is Reduction.SUM for _, reduction in spec.partial):
            yield from held


def _results(output: fx.Node) -> tuple[object, ...]:
    results = output.args[0] if output.op == "output" else None
    if not isinstance(results, (tuple, list)):
        raise VerificationError(f"a lowered program ends in a tuple of results; found {output.format_node()!r}.")
    return tuple(results)


def _collectives(lowered: LoweredProgram) -> Counter[str]:
    """Return the number of collectives in a lowered program, by operator and communicator ("all_reduce over data")."""
    found: Counter[str] = Counter()
    for node in lowered.graph_module.graph.nodes:
        target = node.target
        if isinstance(target, OpOverload) and target.namespace == "_c10d_functional" and len(node.args) > 1:
            found[f"{target.name().partition('::')[2]} over {node.args[-1]}"] += 1
    return found


_OWN_NAMESPACES = ("aten", "prims", "autoshard")


def _users_operators(derivation: Derivation) -> dict[str, fx.Node]:
    """Return the first traced call of each operator of the user, by the operator's name.

    These are the operators that come neither from PyTorch nor from this project.
    """
    found: dict[str, fx.Node] = {}
    for node in derivation.traced.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace not in _OWN_NAMESPACES:
            found.setdefault(str(node.target), node)
    return found


def _users_rule(node: fx.Node, inferred: Collection[str]) -> str:
    """Return the words of the report that name the author of a user operator's sharding rule.

    The result is "" if the rule was inferred, or if there is no rule. `inferred` has the operators with inferred rules.
    """
    author = author_of_rule(node.target)
    if author is None or str(node.target) in inferred:
        return ""
    return f", and the sharding rule that {author} wrote for it to be sound"


def _assumptions(derivation: Derivation) -> list[str]:
    found = [
        f"{name} has no sharding rule and runs whole on every rank (first at {_line(node)})"
        for name, node in derivation.unruled.items()
    ]
    inferred = inferred_operators()
    found += [
        f"{name} has a sharding rule that was found by running it, not written: {'; '.join(inferred[name])}"
        for name in sorted(derivation.rules)
        if name in inferred
    ]
    found += [
        f"{name} is a user's operator. It is assumed to compute its stated result from its arguments alone"
        f"{_users_rule(node, inferred)} (first at {_line(node)})"
        for name, node in _users_operators(derivation).items()
    ]
    draws = {str(node.target): node for node in derivation.traced.nodes if draws_numbers(node.target)}
    return found + [
        f"{name} draws from the generator of each rank, so these must be seeded alike (first at {_line(node)})"
        for name, node in draws.items()
    ]


# Texts of messages.


def _unproven_text(derivation: Derivation, node: fx.Node) -> str:
    lines = [
        f"node {node.name!r} of the lowered program is part of no proof:",
        f"  found:    {_call_text(node)}",
        *(f"  operand:  {operand.name} holds {_held_text(derivation, operand)}" for operand in node.all_input_nodes),
    ]
    expected = _first_underived(derivation)
    if expected is not None:
        lines.append(
            f"  expected: a local form of {_call_text(expected)} or a reshard of its operands, from {_line(expected)}"
        )
    lines.append(
        f"  lowered from {node.meta.get('global', 'an unknown node')} at {_line(node)}, by passes.lowering.lower"
    )
    return "\n".join(lines)


def _first_underived(derivation: Derivation) -> fx.Node | None:
    for number, node in enumerate(derivation.traced.nodes):
        selections = [derivation.traced.numbers[user] for user in node.users if user.target is operator.getitem]
        if not any(derivation.holders[held] for held in (number, *selections)):
            return node
    return None


def _held_text(derivation: Derivation, node: fx.Node) -> str:
    if node not in derivation.local.numbers:
        return "nothing"
    held = derivation.specs_of(derivation.local.numbers[node])
    return " and ".join(f"{traced.name!r} under {spec!r}" for traced, spec in held[:3]) or "no traced value"


def _call_text(node: fx.Node) -> str:
    arguments = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    name = str(node.target) if not isinstance(node.target, FunctionType) else node.target.__name__
    return f"{node.name} = {name}({', '.join(arguments)})"


def _line(node: fx.Node) -> str:
    return node.meta.get("source") or "an unknown line"


def _slot_text(slot: InputSlot | OutputSlot) -> str:
    return f"{slot.kind.value} {slot.name!r}"
