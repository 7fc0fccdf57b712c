"""Trace a program at several input sizes, and fit the shapes of its values as expressions in these sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autoshard.ir.program import Program, tensor_values
from autoshard.tracing import BlockList
from cost_models.formulas import Point, Size
from passes.questions.fit_sizes import InputSize, Observation, fit_numbers
from passes.questions.totals import BlockPlace
from passes.strategies.enumerate_strategies import operands_of

Shape = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class FittedProgram:
    """A program after preparation, with the shapes of its values as expressions in the sizes of its inputs.

    Args:
        program: the program for the example inputs.
        shapes: name of a node → the global shapes of its tensor results. The dims are expressions.
        places: name of a node → its block; nodes outside of blocks are absent.
        sizes: the input sizes that are symbols.
        samples: the programs traced so far, by the values of `sizes`.
        trace: traces the program at other values of `sizes`.
    """

    program: Program
    shapes: Mapping[str, tuple[Shape, ...]]
    places: Mapping[str, BlockPlace]
    sizes: tuple[InputSize, ...]
    samples: dict[Point, Program] = field(repr=False)
    trace: Callable[[Point], Program] = field(repr=False)

    def at(self, point: Point) -> Program:
        """Return the program for other input sizes. Each program is traced once.

        Raises:
            DoesNotRunError: the model does not run with these sizes.
        """
        if point not in self.samples:
            self.samples[point] = self.trace(point)
        return self.samples[point]


def fit_program(
    sizes: tuple[InputSize, ...], trace: Callable[[Point], Program], lists: Sequence[BlockList]
) -> FittedProgram:
    """Trace a program at several input sizes, and fit the shapes of its values. Raises the errors of `fit_numbers`.

    Args:
        trace: takes one number for each of `sizes`; returns the program for these sizes.
        lists: the model's lists of blocks.
    """
    samples: dict[Point, Program] = {}

    def observe(point: Point) -> Observation:
        samples[point] = trace(point)
        labels, numbers, owners = [], [], []
        for node in samples[point].graph.nodes:
            labels.append(f"{node.target} ({node.name})")
            found = [int(dim) for value in tensors_of(node) for dim in value.shape]
            numbers += found
            owners += [f"{node.name} ({node.target}, {line_of(node)})"] * len(found)
        return Observation(tuple(labels), tuple(numbers), tuple(owners))

    numbers = iter(fit_numbers(sizes, observe))
    program = samples[tuple(size.value for size in sizes)]
    shapes = {
        node.name: tuple(tuple(next(numbers) for _ in value.shape) for value in tensors_of(node))
        for node in program.graph.nodes
    }
    return FittedProgram(program, shapes, _places(program, lists), sizes, samples, trace)


def _places(program: Program, lists: Sequence[BlockList]) -> dict[str, BlockPlace]:
    """Return the block of each node inside a block, found by the node's module or by its parameter's name.

    Backward nodes without a module, such as sums of gradients, are in the block of their last operand.
    """
    names = {slot.node: slot.name.rpartition(":")[2] for slot in program.inputs}  # of state: "exp_avg:layers.0.weight"
    found: dict[str, BlockPlace] = {}
    for node in program.graph.nodes:
        path = names.get(node.name) or node.meta.get("module", "")
        place = _place_of(path, lists, program)
        if place is None and not node.meta.get("module") and node.meta.get("phase") == "backward":
            known = [found[item.name] for item in operands_of(node) if item.name in found]
            place = known[-1] if known else None
        if place is not None:
            found[node.name] = place
    return found


def _place_of(path: str, lists: Sequence[BlockList], program: Program) -> BlockPlace | None:
    for item in lists:
        head, _, rest = path.partition(f"{item.path}.")
        position = rest.partition(".")[0]
        if not head and position.isdigit() and int(position) < len(item.kinds):
            stands_for = max((len(repeat.represented_by(path)) for repeat in program.repeats), default=1)
            return BlockPlace(item.path, item.kinds[int(position)], int(position), stands_for)
    return None


def tensors_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the tensor results of a node, in order, without the results that are not tensors."""
    return tuple(value for value in tensor_values(node) if value is not None)


def line_of(node: fx.Node) -> str:
    """Return the line of the user's source that made a node, for messages."""
    return node.meta.get("source") or "unknown line"
