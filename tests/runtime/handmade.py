"""A two-layer linear model and its phased programs, written by hand, for tests of the runtime alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard.ir.lowered import LocalSlot, LoweredProgram, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputKind, InputSlot, OutputKind, OutputSlot, Program
from autoshard.ir.request import CompiledProgram, Request
from autoshard.ir.spec import P, PartitionSpec
from autoshard.runtime.engine import Engine

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

BATCH, WIDTH, HIDDEN = 4, 3, 6


class TwoLayers(nn.Module):
    """`second(first(x))` with weights [HIDDEN, WIDTH] and [WIDTH, HIDDEN]; returns loss, output and calls so far."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.second = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.register_buffer("calls", torch.zeros(()))
        self.config = {"hidden": HIDDEN}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        y = self.second(self.first(x))
        return y.square().sum(), y


class HandCompiler:
    """Gives the program of `TwoLayers` for one batch, Megatron-style: hidden over "model", batch over "data"."""

    def __init__(self, *, gathers: Sequence[str] = ()) -> None:
        self.requests: list[Request] = []
        self.sharded_outputs = frozenset(gathers)

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        self.requests.append(request)
        args = (*request.args, *request.kwargs.values())
        return CompiledProgram(two_layers(engine.mesh, args[0].shape[0], request), sharded_outputs=self.sharded_outputs)

    def trace(self, request: Request) -> Program:
        raise NotImplementedError

    def guards_hold(self, program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        return True


def two_layers(mesh: Mesh, batch: int, request: Request) -> PhasedProgram:
    """The phased program; y stays split over "data", so that the boundary gathers it."""
    x_slot = _input("x", InputKind.INPUT, "input:0", P("data"), (batch, WIDTH))
    first = _input("first", InputKind.PARAMETER, "first.weight", P("model"), (HIDDEN, WIDTH))
    second = _input("second", InputKind.PARAMETER, "second.weight", P(None, "model"), (WIDTH, HIDDEN))
    calls = _input("calls", InputKind.BUFFER, "calls", P(), ())
    tangents = [_input("dloss", InputKind.TANGENT, "tangent:0", P(), ())]
    if request.all_tangents:
        tangents.append(_input("dy", InputKind.TANGENT, "tangent:1", P("data"), (batch, WIDTH)))
    inputs = (first, second, calls, x_slot, *(tangents if request.grad else ()))
    outputs = (
        _output("loss", OutputKind.OUTPUT, "output:0", P(partial={"data": "sum"}), ()),
        _output("y", OutputKind.OUTPUT, "output:1", P("data"), (batch, WIDTH)),
        _output("calls_1", OutputKind.BUFFER_UPDATE, "calls", P(), ()),
    )
    gradients = (
        _output("dfirst", OutputKind.GRADIENT, "first.weight", P("model"), (HIDDEN, WIDTH)),
        _output("dsecond", OutputKind.GRADIENT, "second.weight", P(None, "model"), (WIDTH, HIDDEN)),
        _output("dx", OutputKind.INPUT_GRADIENT, "input:0", P("data"), (batch, WIDTH)),
    )
    gradients = gradients if request.grad else ()
    _, out_tree = pytree.tree_flatten((0, 0))
    empty = fx.GraphModule(nn.Module(), fx.Graph())
    traced = Program(
        empty,
        tuple(slot.slot for slot in inputs),
        tuple(slot.slot for slot in (*outputs, *gradients)),
        output_tree=out_tree,
    )
    lowered = LoweredProgram(traced, mesh, empty, inputs, (*outputs, *gradients))
    return PhasedProgram(
        lowered=lowered,
        forward=_forward(batch, mesh),
        backward=_backward(batch, mesh, all_tangents=request.all_tangents),
        forward_inputs=(0, 1, 2, 3),
        forward_outputs=(0, 1, 2),
        backward_inputs=tuple(range(4, len(inputs))),
        backward_outputs=tuple(range(3, 3 + len(gradients))),
        saved=("first", "second", "x", "h", "y"),
    )


def _forward(batch: int, mesh: Mesh) -> fx.GraphModule:
    graph = fx.Graph()
    first, second, calls, x = (graph.placeholder(name) for name in ("first", "second", "calls", "x"))
    call = graph.call_function
    h = call(aten.mm.default, (x, call(aten.t.default, (first,))))
    partial = call(aten.mm.default, (h, call(aten.t.default, (second,))))
    y = call(c10d.wait_tensor.default, (call(c10d.all_reduce.default, (partial, "sum", "model")),))
    rows = _real_rows(graph, y, batch, mesh)
    square = call(aten.mul.Tensor, (y, y))
    loss = call(aten.sum.default, (call(aten.mul.Tensor, (square, rows)),))
    calls_1 = call(aten.add.Tensor, (calls, 1))
    graph.output((loss, y, calls_1, first, second, x, h, y))
    return fx.GraphModule(nn.Module(), graph)


def _backward(batch: int, mesh: Mesh, *, all_tangents: bool) -> fx.GraphModule:
    graph = fx.Graph()
    first, second, x, h, y, dloss = (graph.placeholder(name) for name in ("first", "second", "x", "h", "y", "dloss"))
    dy_in = graph.placeholder("dy") if all_tangents else None
    call = graph.call_function
    rows = _real_rows(graph, y, batch, mesh)
    dy = call(aten.mul.Tensor, (call(aten.mul.Tensor, (y, call(aten.mul.Tensor, (dloss, 2)))), rows))
    if dy_in is not None:
        dy = call(aten.add.Tensor, (dy, call(aten.mul.Tensor, (dy_in, rows))))
    dsecond = _sum_over(graph, call(aten.mm.default, (call(aten.t.default, (dy,)), h)), "data")
    dh = call(aten.mm.default, (dy, second))
    dfirst = _sum_over(graph, call(aten.mm.default, (call(aten.t.default, (dh,)), x)), "data")
    dx = _sum_over(graph, call(aten.mm.default, (dh, first)), "model")
    graph.output((dfirst, dsecond, dx))
    return fx.GraphModule(nn.Module(), graph)


def _real_rows(graph: fx.Graph, like: fx.Node, batch: int, mesh: Mesh) -> fx.Node:
    """1 for the rows of this rank's piece that are no padding, as a column."""
    import operator

    from autoshard.ir.local import axis_index

    call = graph.call_function
    local = P("data").local_shape((batch,), mesh)[0]
    start = call(operator.mul, (call(axis_index, ("data",)), local))
    index = call(aten.arange.start, (start, call(operator.add, (start, local))))
    mask = call(aten.lt.Scalar, (index, batch))
    column = call(aten.unsqueeze.default, (mask, 1))
    return call(aten._to_copy.default, (column,), {"dtype": torch.float32})


def _sum_over(graph: fx.Graph, value: fx.Node, axis: str) -> fx.Node:
    reduced = graph.call_function(c10d.all_reduce.default, (value, "sum", axis))
    return graph.call_function(c10d.wait_tensor.default, (reduced,))


def _input(node: str, kind: InputKind, name: str, spec: PartitionSpec, shape: tuple[int, ...]) -> LocalSlot:
    return LocalSlot(InputSlot(node, kind, name), spec, shape, torch.float32)


def _output(node: str, kind: OutputKind, name: str, spec: PartitionSpec, shape: tuple[int, ...]) -> LocalSlot:
    return LocalSlot(OutputSlot(node, kind, name), spec, shape, torch.float32)
