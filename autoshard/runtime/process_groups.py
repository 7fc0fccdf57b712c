"""Make the process groups that lowered programs name, and put torch's names of these groups into programs.

A lowered program names a group by its mesh axes and its purpose (`autoshard.ir.communicators`): "model", "data,model",
or "data/gradients". `bind` copies a graph for one rank, with torch's names of its groups and with its coordinates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import NotAvailableError
from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.collectives import reduces_in_place
from autoshard.ir.communicators import group_axes
from autoshard.ir.local import axis_index
from autoshard.ir.mesh import Mesh
from autoshard.kernels import EXCHANGING
from autoshard.runtime.rank_order import reduce_in_rank_order

_FUNCTIONAL = torch.ops._c10d_functional
_COLLECTIVES = frozenset(
    {
        _FUNCTIONAL.all_reduce.default,
        _FUNCTIONAL.all_gather_into_tensor.default,
        _FUNCTIONAL.reduce_scatter_tensor.default,
        _FUNCTIONAL.all_to_all_single.default,
        *EXCHANGING,
    }
)
_INTEGER_OPERATORS: frozenset[Callable[..., Any]] = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, max, min}
)


class ProcessGroups:
    """The process groups of this process along the axes of a torch `DeviceMesh`.

    Groups over several axes, and groups for a purpose, are made at first use, in the same order on all ranks. There are
    at most three groups for each set of axes. On CPUs, communication in a new group raises an error after `timeout_s`
    seconds.

    The stages of a pipeline have different programs. Their ranks use the groups of `outer`, on the mesh of all ranks.
    `outer.prepare` makes these groups for all stages together. `rank` is this process's number on the mesh.
    """

    def __init__(
        self, device_mesh: DeviceMesh, timeout_s: float | None = None, outer: ProcessGroups | None = None
    ) -> None:
        self._outer = outer
        self.mesh = Mesh.from_device_mesh(device_mesh)
        self._device_mesh = device_mesh
        self._ranks: list[int] = device_mesh.mesh.flatten().tolist()
        self.rank = self._ranks.index(dist.get_rank())
        self._names: dict[str, str] = {}
        self.on_cpu = device_mesh.device_type == "cpu"
        self._timeout = timedelta(seconds=timeout_s) if timeout_s is not None and self.on_cpu else None

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's index along each axis."""
        return self.mesh.coordinates(self.rank)

    def name(self, group: str) -> str:
        """Return torch's name of this rank's process group with the name `group` in lowered programs.

        The group is made now if it is new.
        """
        if group not in self._names:
            found = self._group(group).group_name if self._outer is None else self._outer.prepared(group)
            self._names[group] = found
        return self._names[group]

    def prepare(self, groups: Iterable[str]) -> None:
        """Make the groups with these names now. All ranks must call this with the same names."""
        for group in sorted(set(groups)):
            self.name(group)

    def prepared(self, group: str) -> str:
        """Return torch's name of a group that exists.

        Raises:
            NotAvailableError: neither `prepare` nor torch has made the group.
        """
        if group not in self._names and group not in self.mesh.axis_names:
            raise NotAvailableError(
                f"A stage of the pipeline communicates along {group!r}, but this group was not made for all stages "
                "together. Use a mesh without the axis 'pipeline' for this call."
            )
        return self.name(group)

    def new(self, members: Sequence[int], axis: str) -> dist.ProcessGroup:
        """Make a process group of `members` (ranks on the mesh), in this order, with the backend of `axis`.

        All ranks must call this.
        """
        backend = dist.get_backend(self._device_mesh.get_group(axis))
        return _new_group([self._ranks[member] for member in members], self._timeout, backend)

    def _group(self, name: str) -> dist.ProcessGroup:
        axes = group_axes(name)
        if name in self.mesh.axis_names:
            return self._device_mesh.get_group(name)
        mine: dist.ProcessGroup | None = None
        for members in self.mesh.groups(*axes):
            group = self.new(members, axes[0])
            if self.rank in members:
                mine = group
        assert mine is not None, f"rank {self.rank} is in no group along {axes}"
        return mine


def _new_group(ranks: list[int], timeout: timedelta | None, backend: str) -> dist.ProcessGroup:
    """Make a process group in which `ranks` have numbers in the given order.

    Torch below 2.13 accepts only an ascending order.
    """
    if ranks == sorted(ranks):
        return cast(dist.ProcessGroup, dist.new_group(ranks, timeout, backend))
    return cast(dist.ProcessGroup, dist.new_group(ranks, timeout, backend, sort_ranks=False))


def bind(graph_module: fx.GraphModule, groups: ProcessGroups) -> fx.GraphModule:
    """Return a copy of a lowered graph for this rank.

    The copy names this rank's process groups; `meta["group"]` has the group's name in the lowered program. This rank's
    coordinates, and integer arithmetic on them, are numbers. On CPUs, reductions add in rank order
    (`reduce_in_rank_order`).

    Before → after on rank 1 of "model": `all_gather(x, 4, "model")` → `all_gather(x, 4, "7")`, and
    `axis_index("model") * 8` → `8`.
    """
    graph_module = reduce_in_rank_order(graph_module, groups.mesh, of_gloo=groups.on_cpu)
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    coordinates = groups.coordinates
    for node in graph_module.graph.nodes:
        copies[node] = _bind_node(node, graph, copies, coordinates, groups)
    return lazy_module(graph_module, graph)


def group_of(node: fx.Node) -> str | None:
    """Return the name of the group in which a node of a lowered program communicates; None for any other node."""
    return str(node.kwargs.get("group_name", node.args[-1])) if node.target in _COLLECTIVES else None


def reduce_in_place(graph_module: fx.GraphModule) -> None:
    """Change a graph so that all-reduces write over their operands where that is safe (`reduces_in_place`)."""
    for node in graph_module.graph.nodes:
        if reduces_in_place(node):
            node.target = _FUNCTIONAL.all_reduce_.default
    graph_module.recompile()


def taking_from_a_list(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph that takes its inputs as one list, in reverse order, and empties the list.

    No other object then holds an input, so the graph's code frees each input after its last use.

    Before → after: placeholders `a, b` → `a, b = values.pop(), values.pop()`.
    """
    graph = fx.Graph()
    values = graph.placeholder("values")
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.call_method("pop", (values,))
        else:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    return fx.GraphModule(graph_module, graph)


def _bind_node(
    node: fx.Node,
    graph: fx.Graph,
    copies: dict[fx.Node, Any],
    coordinates: dict[str, int],
    groups: ProcessGroups,
) -> Any:
    """Copy a node into `graph`, and return the copy.

    For this rank's coordinates and arithmetic on them, return a number.
    """
    if node.target is axis_index:
        return coordinates[str(node.args[0])]
    args = fx.map_arg(node.args, copies.__getitem__)
    if node.target in _INTEGER_OPERATORS and all(isinstance(argument, int) for argument in args):
        return cast(Callable[..., int], node.target)(*args)
    kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
    name = group_of(node)
    if name is not None:
        args, kwargs = _with_group(args, kwargs, groups)
    made = graph.create_node(node.op, node.target, tuple(args), dict(kwargs), node.name)
    made.meta = dict(node.meta) if name is None else {**node.meta, "group": name}
    return made


def _with_group(args: Any, kwargs: Any, groups: ProcessGroups) -> tuple[Any, Any]:
    """Return a collective's arguments, with torch's name of its group in place of the last argument."""
    if "group_name" in kwargs:
        return args, {**kwargs, "group_name": groups.name(kwargs["group_name"])}
    return (*args[:-1], groups.name(args[-1])), kwargs
