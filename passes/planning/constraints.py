"""Apply a user's constraints to the strategies of parameters, inputs and outputs.

A constraint maps a glob pattern of names ("layers.*.up_proj.weight", "input:0", "output:0") to the spec that the values
must have. A pattern applies to optimizer state ("exp_avg:layers.0.weight") only if the pattern has a colon.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

import numpy as np

from autoshard.errors import InvalidSpecError
from autoshard.ir.program import InputKind, OutputKind, Program
from autoshard.ir.repeat import names_represented_by
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.staged import crosses_stages
from autoshard.ir.update import names_state
from passes.planning.build_assignment import PlanningProblem
from passes.strategies.enumerate_strategies import SearchSpace, Site


def allowed_options(planning: PlanningProblem, constraints: Mapping[str, PartitionSpec]) -> dict[int, np.ndarray]:
    """Return a boolean mask of the allowed options for each constrained variable, by the variable's index.

    Raises:
        InvalidSpecError: a pattern matches no value, a value cannot have the spec, or two constraints contradict each
            other.
    """
    names = constrainable(planning.space)
    allowed: dict[int, np.ndarray] = {}
    layouts: dict[int, str] = {}
    for pattern, spec in constraints.items():
        matches = [name for name in matching(planning.space.program, pattern) if name in names]
        if not matches:
            raise InvalidSpecError(
                f"constraints[{pattern!r}] matches no parameter, buffer, input or output; there are: "
                f"{', '.join(list(names)[:8])}{', ...' if len(names) > 8 else ''}."
            )
        for name in matches:
            variable, mask = planning.classes[names[name]], _mask(planning, name, names[name], spec)
            layout = f"constraints[{pattern!r}] lays out {name!r} as {spec!r}"
            allowed[variable] = mask & allowed.get(variable, mask)
            if not allowed[variable].any():
                raise InvalidSpecError(
                    f"{layout}, and {layouts[variable]}. Both values have one layout; leave one of the constraints out."
                )
            layouts[variable] = layout
    return allowed


def constraints_on(
    program: Program, constraints: Mapping[str, PartitionSpec], *, without_state: bool
) -> dict[str, PartitionSpec]:
    """Return the constraints that apply to a program.

    Constraints on outputs that the program does not have are left out. With `without_state`, for example for an
    evaluation, constraints on optimizer state are left out too.
    """
    outputs = [slot.name for slot in program.outputs_of(OutputKind.OUTPUT)]
    return {
        pattern: spec
        for pattern, spec in constraints.items()
        if (not pattern.startswith("output:") or any(fnmatchcase(name, pattern) for name in outputs))
        and not (without_state and names_state(pattern))
    }


def whole_outputs(program: Program, constraints: Collection[str], *, gather: bool) -> list[str]:
    """Return the names of the outputs that every rank gets whole. Outputs with a constraint are left out.

    With `gather`, all other outputs are whole. Otherwise only outputs that the call stores in attributes of modules,
    such as "router.aux_loss", are whole.
    """
    kept = {f"output:{index}" for index in program.kept}
    names = [slot.name for slot in program.outputs_of(OutputKind.OUTPUT) if gather or slot.name in kept]
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in constraints)]


def split_outputs(program: Program, constraints: Collection[str], *, gather: bool) -> frozenset[str]:
    """Return the names of the outputs that need not be whole on every rank.

    They are the outputs with at least one dim that are not in `whole_outputs`.
    """
    nodes = program.nodes_by_name()
    names = {slot.name for slot in program.outputs_of(OutputKind.OUTPUT) if nodes[slot.node].meta["val"].dim()}
    return frozenset(names.difference(whole_outputs(program, constraints, gather=gather)))


def constrainable(space: SearchSpace) -> dict[str, str]:
    """Return the name of the site of each value that a constraint may name, by the value's name."""
    return {name: site for name, site in _named(space.program, with_state=True).items() if site in space.sites}


def matching(program: Program, pattern: str) -> list[str]:
    """Return the names of the values that a constraint's pattern stands for."""
    return [name for name in _named(program, with_state=":" in pattern) if fnmatchcase(name, pattern)]


def _named(program: Program, *, with_state: bool) -> dict[str, str]:
    """Return the node, or the output, of each value that a constraint may name, by the value's name.

    A tied parameter has all its names. If equal blocks are planned once, the values of the other blocks have the nodes
    of the planned block. Values that pipeline stages send to each other are left out.
    """
    left_out = (InputKind.SQUARES,) if with_state else (InputKind.SQUARES, InputKind.STATE)
    names = {
        alike: slot.node
        for slot in program.inputs
        if slot.kind not in left_out
        for name in (slot.name, *slot.aliases)
        for alike in names_represented_by(program.repeats, name)
    }
    names |= {slot.name: slot.name for slot in program.outputs_of(OutputKind.OUTPUT)}
    return {name: node for name, node in names.items() if not crosses_stages(name)}


def _mask(planning: PlanningProblem, name: str, site_name: str, spec: PartitionSpec) -> np.ndarray:
    """Return a boolean mask of the options under which the value `name` of site `site_name` has the spec.

    Raises:
        InvalidSpecError: no option has the spec.
    """
    site = planning.space.sites[site_name]
    shape = _shape(planning, site)
    try:
        spec.check(planning.space.mesh, len(shape))
    except InvalidSpecError as error:
        raise InvalidSpecError(f"constraints: {name!r} cannot be laid out as {spec!r}: {error}") from error
    mask = np.array([own == spec for own in own_specs(site)])
    if not mask.any():
        raise InvalidSpecError(
            f"constraints: {name!r} cannot be laid out as {spec!r} on {planning.space.mesh}: "
            f"it has shape {shape}. A dim may be split unevenly, but into no more pieces than it has elements. "
            "Two axes on one dim keep the mesh's order, and split an uneven dim only if DTensor makes the same "
            "pieces. Parameters and inputs are whole or split, not partial."
        )
    return mask


def own_specs(site: Site) -> list[PartitionSpec]:
    """Return the spec of a site's first result under each of its strategies.

    For an output of the program, return the spec of its operand instead.
    """
    return [strategy.outputs[0] if strategy.outputs else strategy.inputs[0] for strategy in site.strategies]


def _shape(planning: PlanningProblem, site: Site) -> tuple[int, ...]:
    """Return the global shape of a site's first result, or of the value if the site is an output of the program."""
    if site.results:
        return site.results[0].shape
    program = planning.space.program
    nodes = program.nodes_by_name()
    (node,) = (nodes[slot.node] for slot in program.outputs if slot.name == site.name)
    return tuple(node.meta["val"].shape)
