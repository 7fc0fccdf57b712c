"""Name the layout of a parameter, its gradient and its optimizer state in the field's words.

For one parameter, an axis of the mesh is

* *ZeRO-3* (fully sharded) if it splits the parameter, and the forward gathers it over the axis;
* *split* if it splits the parameter, and the forward uses the pieces (tensor or expert parallel);
* *ZeRO-2* if it splits the state and not the parameter, and the gradient is reduced to pieces as soon as it is
  computed;
* *ZeRO-1* if it splits only the state;
* *copied* otherwise.

After Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models" (2020). For a parameter
without state, the pieces of its update count.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir.plan_parts import ParameterPlan
from autoshard.ir.program import InputSlot
from passes.planning.build_assignment import PlanningProblem
from passes.planning.parameter_uses import forward_links, update_of
from passes.strategies.enumerate_strategies import operands_of, resolve
from passes.strategies.price import local_bytes

_ZERO_3, _SPLIT, _ZERO_2, _ZERO_1, _COPIED = "ZeRO-3", "split", "ZeRO-2", "ZeRO-1", "copied"
_ORDER = (_ZERO_3, _ZERO_2, _ZERO_1, _SPLIT, _COPIED)


def plan_of_parameter(planning: PlanningProblem, choice: Sequence[int], slot: InputSlot) -> ParameterPlan:
    """Return a plan's entry for one parameter.

    It has the parameter's spec, shape, bytes on a rank, layout in words, and the specs of its gradient and state.
    """
    space = planning.space
    spec = planning.strategy(slot.node, choice).outputs[0]
    value = space.sites[slot.node].results[0]
    place = ParameterPlan(spec, value.shape, local_bytes(value, spec, space.mesh))
    parameter = space.sites[slot.node].node
    assert parameter is not None, "only a program's results have sites without a node"
    update = update_of(parameter)
    if update is None:
        return place
    _, (gradient, index), *others = map(resolve, operands_of(update))
    names = {item.node: item.name for item in space.program.inputs}
    state = {
        names[node.name].partition(":")[0]: planning.strategy(node.name, choice).outputs[0]
        for node, _ in others
        if names.get(node.name, "").endswith(f":{slot.name}")
    }
    reduced = planning.strategy(gradient.name, choice).outputs[index]
    kept = next(iter(state.values()), planning.strategy(update.name, choice).inputs[0])
    gathered = _gathered(planning, choice, slot.node)
    found: dict[str, list[str]] = {}
    for axis, size in space.mesh.axes:
        if size == 1:
            continue
        if axis in spec.sharded_axes:
            kind = _ZERO_3 if axis in gathered else _SPLIT
        elif axis in kept.sharded_axes:
            kind = _ZERO_2 if axis in reduced.sharded_axes else _ZERO_1
        else:
            kind = _COPIED
        found.setdefault(kind, []).append(axis)
    text = "; ".join(f"{kind} over {', '.join(found[kind])}" for kind in _ORDER if kind in found)
    return ParameterPlan(spec, place.shape, place.local_bytes, gradient=reduced, state=state, layout=text or _COPIED)


def _gathered(planning: PlanningProblem, choice: Sequence[int], parameter: str) -> set[str]:
    """Return the mesh axes over which the forward gathers a parameter before calls use the parameter."""
    found: set[str] = set()
    for link in forward_links(planning, parameter):
        before = planning.strategy(link.tail, choice).outputs[link.result]
        after = planning.strategy(link.head, choice).inputs[link.operand]
        found |= set(before.sharded_axes) - set(after.sharded_axes)
    return found
