"""The simulator runs a lowered program for all ranks of a mesh in one process, in lock-step.

It evaluates the graph node by node, and each node on each rank's operands. Ranks whose operands are the same objects
share one evaluation and one result. Memory into which a program writes is separate for each rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoshard.errors import AutoshardError
from autoshard.ir.communicators import group_axes
from autoshard.ir.local import running_at
from autoshard.ir.mesh import Mesh
from autoshard.ir.reduction import combine
from autoshard.ir.spec import Reduction
from autoshard.kernels import EXCHANGING
from autoshard.kernels.exchange import run_together

OnValues = Callable[[fx.Node, Sequence[Any]], None]
"""Function that is called with each evaluated node and its values, one for each rank."""

Around = Callable[[fx.Node], AbstractContextManager[None]]
"""Function that returns a context manager, within which a node is evaluated for all ranks."""

GroupCollective = Callable[..., Sequence[Any]]
"""Function that simulates a collective, and returns a result for each rank of the group.

It takes the node's name, the operands of the group's ranks, and the collective's other arguments without the group.
"""


def simulate(
    program: fx.GraphModule | fx.Graph,
    mesh: Mesh,
    inputs: Sequence[Sequence[Any]],
    *,
    on_values: OnValues | None = None,
    around: Around | None = None,
) -> list[Any]:
    """Run `program` for every rank of `mesh`, without gradients.

    Args:
        program: a lowered program, or the graph of a program without attributes; `autoshard.ir.communicators` names
            the groups of its collectives.
        mesh: the mesh whose ranks are simulated.
        inputs: for each placeholder, the value of each rank. Give the same object to ranks that hold copies.
        on_values: called after each node, for example to compare values.
        around: returns the context of each call, for example to measure it.

    Returns:
        For each output, a list of the ranks' values; ranks that hold copies get the same object. A program that
        returns no tuple has one such list.

    Raises:
        AutoshardError: the inputs do not match, or a collective is unknown or does not fit the mesh.
        MeshError: a group names an axis that the mesh does not have.
    """
    if isinstance(program, fx.Graph):
        return _SimulatedRun(program, torch.nn.Module(), mesh, on_values, around).run(inputs)
    return _SimulatedRun(program.graph, program, mesh, on_values, around).run(inputs)


@dataclass(frozen=True, slots=True)
class _SimulatedRun:
    graph: fx.Graph
    root: torch.nn.Module
    mesh: Mesh
    on_values: OnValues | None
    around: Around | None

    @torch.no_grad()
    def run(self, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        waiting = iter(self._checked(inputs))
        values: dict[fx.Node, list[Any]] = {}
        dead = _last_uses(self.graph)
        for node in self.graph.nodes:
            if node.op == "output":
                return self._outputs(node.args[0], values)
            with nullcontext() if self.around is None else self.around(node):
                values[node] = list(next(waiting)) if node.op == "placeholder" else self._evaluate(node, values)
            if self.on_values is not None:
                self.on_values(node, values[node])
            for value in dead[node]:
                del values[value]
        raise AutoshardError("the program has no output node; a lowered program returns a tuple.")

    def _checked(self, inputs: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        names = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        if len(names) != len(inputs):
            raise AutoshardError(f"the program has {len(names)} placeholders {names}, found {len(inputs)} inputs.")
        for name, ranks in zip(names, inputs, strict=True):
            if len(ranks) != self.mesh.size:
                raise AutoshardError(f"placeholder {name!r} needs a value per rank of {self.mesh}, found {len(ranks)}.")
        return inputs

    def _outputs(self, result: Any, values: Mapping[fx.Node, list[Any]]) -> list[Any]:
        elements = result if isinstance(result, (tuple, list)) else (result,)
        return [values[item] if isinstance(item, fx.Node) else [item] * self.mesh.size for item in elements]

    def _evaluate(self, node: fx.Node, values: Mapping[fx.Node, list[Any]]) -> list[Any]:
        ranks = range(self.mesh.size)
        if node.op == "get_attr":
            return [operator.attrgetter(str(node.target))(self.root)] * len(ranks)
        if _is_collective(node.target):
            return self._communicate(node, [_arguments_at(node, values, rank) for rank in ranks])
        if node.target in EXCHANGING:
            return self._exchange(node, [_arguments_at(node, values, rank) for rank in ranks])
        if _reads_rank(node) or node.target is torch.ops.aten.new_empty.default:
            return [self._evaluate_at(rank, node, _arguments_at(node, values, rank)) for rank in ranks]
        operands = [values[operand] for operand in node.all_input_nodes]
        results: dict[tuple[Any, ...], Any] = {}
        keys = [tuple(_identity(operand[rank]) for operand in operands) for rank in ranks]
        for rank, key in enumerate(keys):
            if key not in results:
                results[key] = self._call(node, _arguments_at(node, values, rank))
        return [results[key] for key in keys]

    def _evaluate_at(self, rank: int, node: fx.Node, arguments: _Arguments) -> Any:
        with running_at(self.mesh.coordinates(rank)):
            return self._call(node, arguments)

    def _call(self, node: fx.Node, arguments: _Arguments) -> Any:
        args, kwargs = arguments
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":
            return self.root.get_submodule(str(node.target))(*args, **kwargs)
        assert callable(node.target), "a node calls a function, a method or a module"
        return node.target(*args, **kwargs)

    def _communicate(self, node: fx.Node, operands: Sequence[_Arguments]) -> list[Any]:
        """Run a collective for all ranks, and return each rank's result.

        Its first argument is its operand, and its last argument is the name of its group.
        """
        if node.target is _c10d.wait_tensor.default:
            return [args[0] for args, _ in operands]
        collective = _COLLECTIVES.get(node.target)
        if collective is None:
            known = ", ".join(map(str, _COLLECTIVES))
            raise AutoshardError(f"node {node.name!r}: the simulator does not know {node.target}; it knows {known}.")
        results: list[Any] = [None] * self.mesh.size
        for group in self._groups(node):
            members = [operands[rank][0][0] for rank in group]
            received = collective(node.name, members, *operands[group[0]][0][1:-1])
            for rank, result in zip(group, received, strict=True):
                results[rank] = result
        return results

    def _exchange(self, node: fx.Node, arguments: Sequence[_Arguments]) -> list[Any]:
        """Run, for all ranks, an operator of ours that communicates inside (`EXCHANGING`); return their results."""
        steps_of = EXCHANGING[cast(OpOverload, node.target)]
        results: list[Any] = [None] * self.mesh.size
        for group in self._groups(node):
            steps = [steps_of(*arguments[rank][0][:-1], **arguments[rank][1]) for rank in group]
            for rank, result in zip(group, run_together(steps), strict=True):
                results[rank] = result
        return results

    def _groups(self, node: fx.Node) -> tuple[tuple[int, ...], ...]:
        name = node.args[-1]
        if not isinstance(name, str):
            raise AutoshardError(f"node {node.name!r}: mesh axes must name a group, found group_name={name!r}.")
        return self.mesh.groups(*group_axes(name))


_Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]

_c10d = torch.ops._c10d_functional
_COLLECTIVE_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")


def _is_collective(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _COLLECTIVE_NAMESPACES


def _reads_rank(node: fx.Node) -> bool:
    """Whether a node may read the rank's coordinate (`axis_index`), as any Python function but arithmetic may."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return False
    return getattr(node.target, "__module__", None) not in ("_operator", "builtins", "math")


def _arguments_at(node: fx.Node, values: Mapping[fx.Node, list[Any]], rank: int) -> _Arguments:
    return fx.map_arg((node.args, node.kwargs), lambda operand: values[operand][rank])


def _identity(value: Any) -> Any:
    """Return a key that is equal for the same object, and for equal numbers."""
    return (type(value), value) if isinstance(value, (bool, int, float)) else id(value)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return a dict from each node to the nodes whose values are freed after it, because no later node reads them."""
    seen: set[fx.Node] = set()
    result: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        dying = [value for value in (*node.all_input_nodes, node) if value not in seen]
        seen.update(dying)
        result[node] = dying
    return result


def _all_reduce(name: str, tensors: Sequence[Tensor], reduction: str) -> list[Tensor]:
    return [_reduce(name, tensors, reduction)] * len(tensors)


def _all_gather(name: str, tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    _check_size(name, size, tensors)
    return [torch.cat([_at_least_1d(tensor) for tensor in tensors])] * len(tensors)


def _reduce_scatter(name: str, tensors: Sequence[Tensor], reduction: str, size: int) -> list[Tensor]:
    _check_size(name, size, tensors)
    if tensors[0].shape[0] % size:
        raise AutoshardError(f"node {name!r}: {size} does not divide dim 0 of shape={tuple(tensors[0].shape)}.")
    return [piece.clone() for piece in _reduce(name, tensors, reduction).chunk(size)]


def _all_to_all(
    name: str, tensors: Sequence[Tensor], output_sizes: Sequence[int], input_sizes: Sequence[int]
) -> list[Tensor]:
    _check_size(name, len(input_sizes), tensors)
    if sum(input_sizes) != tensors[0].shape[0]:
        raise AutoshardError(f"node {name!r}: {input_sizes=} do not add up to shape={tuple(tensors[0].shape)}.")
    pieces = [tensor.split(list(input_sizes)) for tensor in tensors]
    received = [[piece[member] for piece in pieces] for member in range(len(tensors))]
    if any([piece.shape[0] for piece in row] != list(output_sizes) for row in received):
        raise AutoshardError(f"node {name!r}: {output_sizes=} differ from the sent sizes, {input_sizes=}.")
    return [torch.cat(row) for row in received]


_COLLECTIVES: Mapping[Any, GroupCollective] = {
    _c10d.all_reduce.default: _all_reduce,
    _c10d.all_gather_into_tensor.default: _all_gather,
    _c10d.reduce_scatter_tensor.default: _reduce_scatter,
    _c10d.all_to_all_single.default: _all_to_all,
}


def _reduce(name: str, tensors: Sequence[Tensor], reduction: str) -> Tensor:
    if reduction == "avg":
        return combine(Reduction.SUM, tensors) / len(tensors)
    if reduction not in list(Reduction):
        raise AutoshardError(f"node {name!r}: unknown reduce_op={reduction!r}; use sum, avg, max, min or product.")
    result = combine(Reduction(reduction), tensors)
    return result.clone() if len(tensors) == 1 else result


def _check_size(name: str, size: int, tensors: Sequence[Tensor]) -> None:
    if size != len(tensors):
        raise AutoshardError(f"node {name!r} names a group of {size} ranks, but the group has {len(tensors)}.")


def _at_least_1d(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor
