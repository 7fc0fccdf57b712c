"""Expand the plan of a program with left-out blocks (`autoshard.ir.repeat`) to a plan of the whole model's program.

A run of equal blocks is cut into *units*. The short program lacks the inner units of a run, and the first unit behind
the gap stands for them. A node of a left-out unit is matched with the node at the same place of the unit that stands
for it. Every other node is matched with itself. Then the plan of a node is the plan of its match.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import fx

from autoshard.errors import PlanMismatchError
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program, describe
from autoshard.ir.repeat import Repeat
from autoshard.ir.request import Request
from autoshard.ir.restored_nodes import RestoredNode
from autoshard.tracing import without
from passes.driver.norm_of_plan import lacks_norm, with_norm, without_norm
from passes.lowering.lower import check_digest
from passes.lowering.lower_program import prepare
from passes.recomputation.recompute import InsertRecompute
from passes.strategies.fold_blocks import module_paths
from passes.strategies.node_spots import node_spots
from passes.strategies.repeated import NotAlikeError

_Unit = tuple[int, int]
"""The index of a repeat, and the number of the first block of one of its units. Nodes outside of units have (-1, 0)."""


def expand_for(plan: Plan, program: Program, request: Request, trace: Callable[[Request], Program]) -> Plan:
    """Return the plan of a call's whole traced program, from a plan that lacks inner blocks or the gradients' norm.

    A plan that lacks neither is returned unchanged.

    Raises:
        PlanMismatchError: the plan is for another program, or its left-out blocks are not like the blocks beside them.
    """
    if lacks_norm(plan, program) and request.update is not None:
        bare = replace(request, update=replace(request.update, returns_norm=False))
        return with_norm(expand_for(plan, without_norm(program), bare, trace), program)
    if not plan.repeats:
        return plan
    short = prepare(replace(trace(replace(request, model=without(request.model, plan.repeats))), repeats=plan.repeats))
    check_digest(plan, _running(plan, short))
    try:
        return expand_plan(plan, short, prepare(program))
    except NotAlikeError as error:
        raise PlanMismatchError(
            f"The plan was made without the inner blocks of {', '.join(item.path for item in plan.repeats)}, and they "
            f"are not like those beside them: {error}. Leave plan= out: the model is then planned with all its blocks."
        ) from error


def expand_plan(plan: Plan, short: Program, whole: Program) -> Plan:
    """Return the plan of the whole program, from the plan of the program with left-out blocks.

    Args:
        plan: the plan of `short`.
        short, whole: programs of one call after `prepare`, without some blocks and with all blocks.

    Raises:
        NotAlikeError: the programs differ in more than repeated blocks.
    """
    again = _ExpandedRecompute(short, whole)
    recompute = replace(plan.recompute, nodes=again.expand(plan.recompute.nodes))
    offload = replace(plan.offload, nodes=again.expand(plan.offload.nodes))
    expanded = replace(plan, recompute=recompute, offload=offload, repeats=())
    running = _running(expanded, whole)
    matches = match_nodes(_running(plan, short), running)
    nodes = {name: plan.nodes[match] for name, match in matches.items() if match in plan.nodes}
    return replace(expanded, nodes=nodes, program_digest=running.digest())


def _running(plan: Plan, prepared: Program) -> Program:
    """Return a copy of a prepared program that also recomputes, and fetches from the host, as the plan says."""
    return InsertRecompute(plan.recompute.nodes, plan.offload.nodes)(prepared)


_Restored = TypeVar("_Restored", bound=RestoredNode)


@dataclass(frozen=True, slots=True)
class _ExpandedRecompute:
    """Expands the recomputed and offloaded values of a plan to all units.

    A left-out unit restores the same values as the unit that stands for it. Each value is restored just before some
    node. If that node is in another unit of the run, the distance between the two units stays the same.
    """

    short: Program
    whole: Program

    def expand(self, items: Sequence[_Restored]) -> tuple[_Restored, ...]:
        """Return the values that the whole program restores, in program order.

        `items` are the values that the short program restores.
        """
        if not items:
            return ()
        known, nodes = {item.name: item for item in items}, self.whole.nodes_by_name()
        matches = match_nodes(self.short, self.whole)
        alone = {match: name for name, match in matches.items()}
        here, there = (
            {node.name: spot for node, spot in node_spots(program, self.short.repeats, module_paths(program)).items()}
            for program in (self.short, self.whole)
        )
        at = {spot: name for name, spot in there.items()}
        found = []
        for name, node in nodes.items():
            item = known.get(matches.get(name, ""))
            if item is None:
                continue
            own, later = here.get(item.name), here.get(item.before)
            before = alone[item.before]
            if own is not None and later is not None and own.repeat == later.repeat:
                repeat = self.short.repeats[own.repeat]
                first = there[name].first + repeat.distance(own.first, later.first) * repeat.period
                before = at[later._replace(first=first)]
            found.append(replace(item, name=name, before=before, module=node.meta.get("module", "")))
        return tuple(found)


def match_nodes(short: Program, whole: Program) -> dict[str, str]:
    """Return for each node's name in `whole` the name of the matching node in `short`.

    Raises:
        NotAlikeError: a unit has other nodes than the unit that stands for it, or reads other values.
    """
    here, there = (_grouped(program, short.repeats) for program in (short, whole))
    matches: dict[str, str] = {}
    for (number, first), members in there.items():
        standing = (number, short.repeats[number].behind if number >= 0 else first)
        others = here.get(standing, [])
        if [form for _, form in members] != [form for _, form in others]:
            raise NotAlikeError(f"unit {first} of {short.repeats[number]} does not run what the one behind runs")
        matches |= {node.name: other.name for (node, _), (other, _) in zip(members, others, strict=True)}
    _check_operands(short, whole, matches)
    return matches


def _grouped(program: Program, repeats: tuple[Repeat, ...]) -> dict[_Unit, list[tuple[fx.Node, object]]]:
    """Return the nodes of each unit in order, each with its form.

    The form has the node's module in its unit, operator, phase, shape and dtype. Matched nodes have equal forms.
    """
    paths = module_paths(program)
    found: dict[_Unit, list[tuple[fx.Node, object]]] = defaultdict(list)
    for node in program.graph.nodes:
        if node.op != "output":
            unit, path = _unit_of(repeats, paths[node.name])
            form = (path, node.op, str(node.target) if node.op == "call_function" else "", node.meta.get("phase"))
            found[unit].append((node, (*form, describe(node.meta.get("val")))))
    return found


def _unit_of(repeats: tuple[Repeat, ...], path: str) -> tuple[_Unit, str]:
    """Return the unit of a module by the module's path, and the path of the same module in the unit that stands for it.

    A module outside of units has the unit (-1, 0), and keeps its path.
    """
    for number, repeat in enumerate(repeats):
        found = repeat.unit(path)
        if found is not None:
            return (number, found[0]), found[1]
    return (-1, 0), path


def _check_operands(short: Program, whole: Program, matches: Mapping[str, str]) -> None:
    places, nodes = _places(short), short.nodes_by_name()
    for node in whole.graph.nodes:
        if node.op != "call_function":
            continue
        match = nodes[matches[node.name]]
        read = [places[matches[operand.name]] for operand in node.all_input_nodes]
        if read != [places[operand.name] for operand in match.all_input_nodes]:
            raise NotAlikeError(f"{node.name} of the whole model does not read what {match.name} reads")


def _places(program: Program) -> dict[str, object]:
    """Return for each node's name a value that is equal for nodes at the same place of two units.

    The value is (index of the repeat, index in the unit). For a node outside of units, the value is the node's name.
    """
    spots = node_spots(program, program.repeats, module_paths(program))
    return {
        node.name: (spots[node].repeat, spots[node].place) if node in spots else node.name
        for node in program.graph.nodes
    }
