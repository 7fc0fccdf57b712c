"""What a recipe does with one value: its spec, the collectives that it takes part in, and what it holds on a device.

* A value's spec follows from the recipe's axes (`propagate_axis`); under ZeRO-3 a parameter's from its replicas too.
* Collectives of a parameter: its part, by elements, of what its pipeline rank exchanges once per step (`price_ends`)
  or, under ZeRO-2 and -3, for each micro-batch (`price_recipe.sharded_time`); and those of what calls that read it are
  given or make. Of another value: those that move it.
* Of the other specs that the value may have, each belongs to some recipes: `spec_families` gives them as restrictions
  of the searched fields, so that the fastest of each can be searched for.

Seconds are those of a step on one rank that has the value, of the collective alone: what of it runs beside computation
is not taken off, as that is decided for all values of a section together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from torch import fx

from autoshard.errors import InvalidSpecError
from autoshard.ir.answers import ValueCost
from autoshard.ir.execution import Execution
from autoshard.ir.program import InputKind, tensor_values
from autoshard.ir.runtime import TRITON
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster
from cost_models.schedule_orders import stage_ranks
from cost_models.step import StepModel
from passes.recipe_search.recipe_space import Only
from passes.recipes.pipeline_stages import rank_sections, share_out
from passes.recipes.price_ends import EndWork, end_work, exchanged_bytes, gradient_bytes, update_bytes
from passes.recipes.price_memory import state_bytes
from passes.recipes.price_recipe import sharded_time
from passes.recipes.recipe_groups import Groups, recipe_groups, traffic_time
from passes.recipes.recipe_plan import recipe_mesh, replica_sharded
from passes.sections.combine_layouts import combined
from passes.sections.count_sections import Sent
from passes.sections.fold_program import AFTER, BEFORE, FoldedProgram
from passes.sections.price_model import PricedModel, RecipeKind
from passes.sections.price_sections import traffic_of
from passes.sections.propagate_axis import MoveKind
from passes.sections.trace_values import readers_of

_COLLECTIVES = {
    MoveKind.GATHER: "all-gather", MoveKind.REDUCE: "all-reduce", MoveKind.SCATTER: "reduce-scatter",
    MoveKind.EXCHANGE: "all-to-all",
}  # fmt: skip

_MANY = range(2, 2**31)


@dataclass(frozen=True, slots=True)
class Value:
    """A value that was asked about.

    Args:
        name: as it was asked for.
        node: its node of the folded program.
        section: that it lies in; "" for inputs.
        parameter: its name in the folded program; "" for others.
        alike: other names that the node stands for.
    """

    name: str
    node: fx.Node
    section: str
    parameter: str = ""
    alike: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape, for one sequence."""
        first = next(iter(tensor_values(self.node)), None)
        return () if first is None else tuple(first.shape)


def find_value(priced: PricedModel, name: str) -> Value:
    """The value of a parameter's or input's qualified name, or of a node of the traced program.

    Raises:
        InvalidSpecError: no such name.
    """
    folded = priced.folded
    nodes = folded.single.nodes_by_name()
    sections = {node: section for section, names in folded.parameters.items() for node in names}
    for slot in folded.single.inputs_of(InputKind.PARAMETER):
        names = folded.names_of(slot.name)
        if name in names:
            alike = tuple(other for other in names if other != name)
            return Value(name, nodes[slot.node], sections[slot.node], slot.name, alike)
    inputs = {slot.name: slot.node for slot in folded.single.inputs_of(InputKind.INPUT)}
    if name in inputs:
        return Value(name, nodes[inputs[name]], "")
    if folded.section_of.get(name):
        return Value(name, nodes[name], folded.section_of[name])
    known = [other for slot in folded.single.inputs_of(InputKind.PARAMETER) for other in folded.names_of(slot.name)]
    raise InvalidSpecError(
        f"explain({name!r}): the model has no parameter, input or node of that name; there are "
        f"{', '.join([*inputs, *known][:8])}, ..., and nodes: {', '.join(_calls(priced)[:8])}, ..."
    )


def _calls(priced: PricedModel) -> list[str]:
    """Calls within sections; `Plan.nodes` lacks those that no axis but the replicas' splits."""
    return [node for node, section in priced.folded.section_of.items() if section and not node.startswith("p_")]


def spec_of(priced: PricedModel, value: Value, recipe: Execution) -> PartitionSpec:
    """The spec of a value under a recipe; batches are split over replicas beside it."""
    spec = _axes_spec(priced, value, RecipeKind.of(recipe))
    return replica_sharded(spec, recipe, recipe_mesh(recipe)) if value.parameter else spec


def kernels_of(priced: PricedModel, value: Value, recipe: Execution) -> tuple[str, ...]:
    """The kernels of ours that compute or read a value, in words; none where a recipe has the usual libraries'."""
    if recipe.runtime.kernels != TRITON:
        return ()
    return tuple(str(kernel) for kernel in priced.kernels if kernel.concerns(value.node.name))


def _axes_spec(priced: PricedModel, value: Value, kind: RecipeKind) -> PartitionSpec:
    layouts = {axis: item for axis, item in priced.layouts(kind).items() if item.results.get(value.node.name)}
    return combined(tuple(layouts), tuple(item.results[value.node.name][0] for item in layouts.values()))


# What it costs.


@dataclass(frozen=True, slots=True)
class Place:
    """Devices that a value lies on.

    Args:
        cluster: theirs.
        groups: of them.
    """

    cluster: Cluster
    groups: Groups


def value_costs(
    priced: PricedModel, value: Value, recipe: Execution, cluster: Cluster, model: StepModel
) -> tuple[ValueCost, ...]:
    """The collectives that a value takes part in, and the update of a parameter."""
    place = Place(cluster, recipe_groups(recipe, cluster))
    own = _parameter_costs(priced, value, recipe, place, model) if value.parameter else ()
    return (*own, *_moves(priced, value, recipe, place, model))


def _moves(
    priced: PricedModel, value: Value, recipe: Execution, place: Place, model: StepModel
) -> tuple[ValueCost, ...]:
    """Collectives of activations: of the value, or of what calls that read it as a parameter are given or make."""
    if not value.section:
        return ()
    section = priced.sections(RecipeKind.of(recipe))[value.section]
    entering = priced.section_prices(recipe, place.cluster)[value.section].entering_bytes
    sizes = {"tensor": recipe.tensor, "context": recipe.context, "expert": recipe.expert}
    is_block = value.section not in (BEFORE, AFTER)
    again = 2 if recipe.recompute == "full" and is_block else 1
    calls = {node.name for node in readers_of(value.node)} if value.parameter else set[str]()

    def concerns(sent: Sent) -> bool:
        return sent.moved == value.node.name or sent.moved in calls or sent.reader in calls

    found = []
    for phase, name, turns in ((section.forward, "forward", again), (section.backward, "backward", 1)):
        for sent in filter(concerns, phase.sent):
            traffic = traffic_of(sent, recipe.micro_batch, sizes, entering)
            times = turns * recipe.micro_batches
            seconds = times * traffic_time(traffic, recipe, place.groups, model)
            what = f"{_COLLECTIVES[sent.kind]} of {sent.moved} for {sent.reader}, {name}"
            found.append(ValueCost(what, sent.axis, traffic.bytes, times, seconds))
    return tuple(found)


def _parameter_costs(
    priced: PricedModel, value: Value, recipe: Execution, place: Place, model: StepModel
) -> tuple[ValueCost, ...]:
    """A parameter's part of reducing gradients, gathering parameters, and updating them."""
    cluster, groups = place.cluster, place.groups
    elements, is_expert = _elements(priced, value, recipe)
    prices = priced.section_prices(recipe, cluster)
    stages = share_out(priced.folded.blocks, recipe)
    counts = rank_sections(stages, recipe)[_rank_of(priced.folded, value, recipe)]
    held = [(prices[name], count) for name, count in counts.items()]
    dense = sum(price.parameters * count for price, count in held)
    expert = sum(price.expert_parameters * count for price, count in held)
    tensors = sum(price.tensors * count for price, count in held)

    def ends(dense: float, expert: float, tensors: int) -> EndWork:
        return end_work(dense, expert, tensors, recipe, groups, cluster, model)

    whole, plain = ends(dense, expert, tensors), ends(dense, 0.0, tensors)
    work, total = (_less(whole, plain), expert) if is_expert else (plain, dense)
    share = elements / total
    axis = "data" if recipe.context == 1 else "data x context"
    weight, gradient = elements * exchanged_bytes(recipe), elements * gradient_bytes(recipe)
    costs = [
        ValueCost("gradient reduction", axis, gradient, 1, share * work.reduce_s),
        ValueCost("parameter gathering", axis, weight, 1, share * work.gather_s),
    ]
    if recipe.reduces_each:
        price, turns = prices[value.section], recipe.micro_batches
        gather_s, again_s = sharded_time(replace(price, expert_parameters=0), recipe, groups, cluster, model)
        if is_expert:
            gathers_s, agains_s = sharded_time(price, recipe, groups, cluster, model)
            gather_s, again_s = gathers_s - gather_s, agains_s - again_s
        reduce_s, gathers = (again_s, 1) if recipe.gathers_once else (again_s - gather_s, 2)
        what = "parameter gathering, forward" + " and backward" * (gathers == 2)
        part = elements / (price.expert_parameters if is_expert else price.parameters) * turns
        costs += [
            ValueCost("gradient reduction", axis, gradient, turns, reduce_s * part),
            ValueCost(what, axis, weight, gathers * turns, gathers * gather_s * part),
        ]
    shards = (groups.expert_replicas if is_expert else groups.zero).size if recipe.zero else 1
    update = ValueCost("optimizer", "", round(elements / shards * update_bytes(recipe)), 1, share * work.update_s)
    return (*(item for item in costs if item.time_s), update)


def _less(one: EndWork, two: EndWork) -> EndWork:
    return EndWork(*(getattr(one, item.name) - getattr(two, item.name) for item in fields(EndWork)))


def _elements(priced: PricedModel, value: Value, recipe: Execution) -> tuple[int, bool]:
    """Elements of a parameter on each rank before ZeRO, and whether the expert axis splits it."""
    section = priced.sections(RecipeKind.of(recipe))[value.section]
    sizes = {"tensor": recipe.tensor, "context": recipe.context, "expert": recipe.expert}
    elements = math.prod(section.parameters[value.parameter].shape(1, sizes))
    return elements, value.parameter in section.expert_parameters


def _rank_of(folded: FoldedProgram, value: Value, recipe: Execution) -> int:
    """The pipeline rank that has a parameter."""
    stages = share_out(folded.blocks, recipe)
    owners = stage_ranks(recipe.chosen_schedule, recipe.pipeline, recipe.virtual_stages)
    if value.section in (BEFORE, AFTER):
        place = 0 if value.section == BEFORE else len(stages) - 1
    else:
        blocks = (sum(count for name, count in stage.sections if name not in (BEFORE, AFTER)) for stage in stages)
        block = _block_of(folded, value.name)
        place = next(place for place, passed in enumerate(accumulate(blocks)) if block < passed)
    return owners[place]


def _block_of(folded: FoldedProgram, name: str) -> int:
    """Which of the model's blocks a parameter of one lies in."""
    start = 0
    for item in folded.lists:
        if name.startswith(f"{item.path}."):
            return start + int(name.removeprefix(f"{item.path}.").partition(".")[0])
        start += len(item.kinds)
    raise AssertionError(f"{name} lies in no block")


def value_memory(priced: PricedModel, value: Value, recipe: Execution, cluster: Cluster) -> dict[str, int]:
    """Bytes of a parameter, its gradient and its state on each device; nothing for other values."""
    if not value.parameter:
        return {}
    elements, is_expert = _elements(priced, value, recipe)
    groups = recipe_groups(recipe, cluster)
    shards = (groups.expert_replicas if is_expert else groups.zero).size
    return {name: int(size) for name, size in state_bytes(elements, shards, recipe).items() if size}


# What else it could be.

_FIELDS: Mapping[str, tuple[Collection[object], Collection[object]]] = {
    "tensor": ((1,), _MANY),
    "sequence_parallel": ((False,), (True,)),
    "context": ((1,), _MANY),
    "expert": ((1,), _MANY),
    "expert_tensor": ((1,), _MANY),
    "zero": ((0, 1, 2), (3,)),
}
"""The fields that decide specs: their values that leave a value whole, and those that may split it."""

_Point = tuple[bool, ...]
"""For each of these fields, in which of the two sets its value is."""


def point_of(recipe: Execution) -> _Point:
    """Where a recipe lies."""
    return tuple(getattr(recipe, name) in split for name, (_, split) in _FIELDS.items())


def spec_families(priced: PricedModel, value: Value, recipe: Execution) -> list[list[Only]]:
    """The recipes that give a value another spec than one does, by spec: some restrictions, whose union they are."""
    points = _points(priced)
    families: dict[object, list[_Point]] = {}
    for point in points:
        families.setdefault(_family(priced, value, point, recipe), []).append(point)
    own = _family(priced, value, point_of(recipe), recipe)
    return [_restrictions(family, points) for key, family in families.items() if key != own]


def _points(priced: PricedModel) -> list[_Point]:
    """All combinations that recipes of the model have."""
    found: list[_Point] = []
    for number in range(2 ** len(_FIELDS)):
        point = tuple(bool(number >> place & 1) for place in range(len(_FIELDS)))
        tensor, parallel, _, expert, expert_tensor, _ = point
        has_parts = tensor or not (parallel or expert_tensor)
        if has_parts and (priced.counted.has_experts or not (expert or expert_tensor)):
            found.append(point)
    return found


def _family(priced: PricedModel, value: Value, point: _Point, recipe: Execution) -> object:
    """What tells specs apart: axes, and whether replicas share a parameter."""
    tensor, parallel, context, expert, expert_tensor, gathers = point
    kind = RecipeKind.of(recipe)._replace(
        tensor=tensor, sequence_parallel=parallel, context=context, expert=expert, expert_tensor=expert_tensor
    )
    return _axes_spec(priced, value, kind), gathers and bool(value.parameter)


def _restrictions(family: Sequence[_Point], points: Sequence[_Point]) -> list[Only]:
    """Restrictions of fields whose union is a family: one where it is a product, else those of its halves."""
    seen = [set(values) for values in zip(*family, strict=True)]
    box = [point for point in points if all(item in values for item, values in zip(point, seen, strict=True))]
    if len(box) == len(family):
        chosen = zip(_FIELDS.items(), seen, strict=True)
        return [{name: sets[next(iter(values))] for (name, sets), values in chosen if len(values) == 1}]
    split = next(place for place, values in enumerate(seen) if len(values) == 2)
    halves = ([point for point in family if point[split] is side] for side in (False, True))
    return [only for half in halves for only in _restrictions(half, points)]
