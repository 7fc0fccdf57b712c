"""Compare emitted reshards on Gloo with the simulator, on each of two processes; see `code`."""

from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from autoshard.ir.boundary import shard_all
from autoshard.ir.emit import emit_reshard
from autoshard.ir.local import running_at
from autoshard.ir.mesh import Mesh
from autoshard.ir.reshard import plan_reshard
from autoshard.ir.spec import P, PartitionSpec, Reduction
from autoshard.runtime.simulator import simulate

MESH = Mesh({"data": 2})
WHOLE = (P("data"), P(None, "data"), P())
PARTIAL = tuple(P(partial={"data": reduction}) for reduction in Reduction)
ORDERED = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
)  # fmt: skip
UNORDERED = (torch.complex64, torch.float8_e4m3fn, torch.uint16)


def program(source: PartitionSpec, target: PartitionSpec, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Graph:
    """The program that reshards its input."""
    graph = fx.Graph()
    proxy = fx.Proxy(graph.placeholder("value"), GraphAppendingTracer(graph))
    steps = plan_reshard(source, target, shape, MESH)
    graph.output((emit_reshard(proxy, steps, shape, MESH, dtype=dtype).node,))
    return graph


def bind_groups(graph: fx.Graph, group_name: str) -> fx.GraphModule:
    """Put the process group's name where the axis is named."""
    for node in graph.nodes:
        if "c10d" in str(node.target) and node.args[-1] == "data":
            node.args = (*node.args[:-1], group_name)
    return fx.GraphModule(torch.nn.Module(), graph)


def compare(source: PartitionSpec, target: PartitionSpec, dtype: torch.dtype, rank: int) -> None:
    """Run one reshard on Gloo and the simulator, at an even and an uneven shape."""
    for shape in ((3, 5), (4, 4)):
        value = torch.arange(shape[0] * shape[1]).reshape(shape).remainder(7).to(dtype)
        inputs = shard_all(value, source, MESH)
        graph = program(source, target, shape, dtype)
        expected: Tensor = simulate(graph, MESH, [inputs])[0][rank]
        graph_module = bind_groups(graph, dist.group.WORLD.group_name)
        with running_at({"data": rank}):
            (found,) = graph_module(inputs[rank])
        assert found.dtype == expected.dtype
        assert found.is_contiguous()
        same = torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))
        assert same, (source, target, dtype, shape, found, expected)


def check_reshards() -> None:
    """Compare every kind of step for every element type."""
    rank = dist.get_rank()
    for dtype in ORDERED:
        for source, target in product((*WHOLE, *PARTIAL), repeat=2):
            compare(source, target, dtype, rank)
    for dtype in UNORDERED:
        for source, target in product(WHOLE, repeat=2):
            compare(source, target, dtype, rank)
