"""A traced program whose shapes are expressions in the sizes of its inputs, and the block that each node belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.ir.program import Program, tensor_values
from autoshard.tracing import BlockList
from cost_models.formulas import Point, Size
from passes.counting.fit_sizes import InputSize, Observation, fit_numbers
from passes.strategies.enumerate_strategies import operands_of

Shape = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """A block: the path of its list, its position there, and its kind (blocks of a kind are alike)."""

    path: str
    position: int
    kind: int


@dataclass(frozen=True, slots=True)
class SymbolicProgram:
    """See the module's docstring.

    Args:
        program: as it is for the example inputs.
        shapes: for every node the shapes of the tensors that it yields, absent ones left out.
        arguments: for every call its positional arguments, with None for nodes.
        places: for nodes that belong to a block, which.
        samples: the nodes, by name, of the programs that were looked at, by the sizes of their inputs.
    """

    program: Program
    shapes: Mapping[str, tuple[Shape, ...]]
    arguments: Mapping[str, tuple[Any, ...]]
    places: Mapping[str, BlockPlace]
    sizes: tuple[InputSize, ...]
    samples: Mapping[Point, Mapping[str, fx.Node]] = field(repr=False)


def symbolic_program(
    sizes: tuple[InputSize, ...], trace: Callable[[Point], Program], lists: Sequence[BlockList]
) -> SymbolicProgram:
    """The program that `trace` gives at some sizes of the inputs, with its shapes fitted.

    Raises:
        FormulaError: see `fit_numbers`.
    """
    samples: dict[Point, Program] = {}

    def observe(point: Point) -> Observation:
        samples[point] = trace(point)
        return _observe(samples[point])

    numbers = iter(fit_numbers(sizes, observe))
    program = samples[tuple(size.value for size in sizes)]
    shapes, arguments = {}, {}
    for node in program.graph.nodes:
        shapes[node.name] = tuple(tuple(next(numbers) for _ in value.shape) for value in _present(node))
        arguments[node.name] = _filled(node, numbers)
    nodes = {point: sample.nodes_by_name() for point, sample in samples.items()}
    return SymbolicProgram(program, shapes, arguments, _places(program, lists), sizes, nodes)


def _present(node: fx.Node) -> tuple[torch.Tensor, ...]:
    return tuple(value for value in tensor_values(node) if value is not None)


def _observe(program: Program) -> Observation:
    labels, numbers, owners = [], [], []
    for node in program.graph.nodes:
        labels.append(f"{node.target} ({node.name})")
        found = [int(dim) for value in _present(node) for dim in value.shape]
        found += [leaf for leaf in pytree.tree_leaves(_literals(node)) if _is_size(leaf)]
        numbers += found
        owners += [f"{node.name} ({node.target}, {node.meta.get('source') or 'unknown line'})"] * len(found)
    return Observation(tuple(labels), tuple(numbers), tuple(owners))


def _literals(node: fx.Node) -> tuple[Any, ...]:
    return tuple(fx.map_arg(node.args, lambda argument: None)) if node.op == "call_function" else ()


def _is_size(leaf: Any) -> bool:
    return isinstance(leaf, int) and not isinstance(leaf, bool)


def _filled(node: fx.Node, numbers: Any) -> tuple[Any, ...]:
    """A call's literals with fitted sizes in place of its own."""
    return pytree.tree_map(lambda leaf: next(numbers) if _is_size(leaf) else leaf, _literals(node))


def _places(program: Program, lists: Sequence[BlockList]) -> dict[str, BlockPlace]:
    """By the module that issued a call, or by a parameter's name; sums of gradients go with their last operand."""
    names = {slot.node: slot.name.rpartition(":")[2] for slot in program.inputs}  # of state: "exp_avg:layers.0.weight"
    found: dict[str, BlockPlace] = {}
    for node in program.graph.nodes:
        place = place_of(names.get(node.name) or node.meta.get("module", ""), lists)
        if place is None and not node.meta.get("module") and node.meta.get("phase") == "backward":
            known = [found[item.name] for item in operands_of(node) if item.name in found]
            place = known[-1] if known else None
        if place is not None:
            found[node.name] = place
    return found


def place_of(path: str, lists: Sequence[BlockList]) -> BlockPlace | None:
    """The block that a module's or parameter's path lies in."""
    for item in lists:
        head, _, rest = path.partition(f"{item.path}.")
        position = rest.partition(".")[0]
        if not head and position.isdigit() and int(position) < len(item.kinds):
            return BlockPlace(item.path, int(position), item.kinds[int(position)])
    return None
