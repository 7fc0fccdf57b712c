"""A reshard that runs on the simulator gives the shards of the full tensor."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from autoshard.ir.boundary import shard_all, unshard
from autoshard.ir.emit import OnNode, emit_reshard
from autoshard.ir.local import running_at
from autoshard.ir.mesh import Mesh
from autoshard.ir.reshard import plan_reshard
from autoshard.ir.spec import P, PartitionSpec, Reduction
from autoshard.runtime.simulator import simulate
from autoshard.testing.strategies import meshes, shapes, specs

PAD = torch.ops.aten.constant_pad_nd.default


def lower(
    source: PartitionSpec,
    target: PartitionSpec,
    shape: tuple[int, ...],
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
    on_node: OnNode | None = None,
) -> fx.GraphModule:
    """The program that reshards its input from `source` to `target`."""
    graph = fx.Graph()
    node = graph.placeholder("value")
    node.meta["val"] = torch.empty(source.local_shape(shape, mesh), dtype=dtype, device="meta")
    steps = plan_reshard(source, target, shape, mesh, itemsize=dtype.itemsize)
    proxy = fx.Proxy(node, GraphAppendingTracer(graph))
    result = emit_reshard(proxy, steps, shape, mesh, on_node=on_node)
    graph.output((result.node,))
    return fx.GraphModule(torch.nn.Module(), graph)


def addends(value: Tensor, spec: PartitionSpec, mesh: Mesh, seed: int) -> list[Tensor]:
    """Each rank's local tensor, padded with NaN; partial tensors hold different addends of `value`."""
    if not spec.partial:
        return shard_all(value, spec, mesh, padding=math.nan)
    axes, reduction = tuple(axis for axis, _ in spec.partial), spec.partial[0][1]
    whole = PartitionSpec(*spec.dims)
    drawn = draw_addends(value, reduction, mesh.shards(axes), seed)
    locals_ = [shard_all(addend, whole, mesh, padding=math.nan) for addend in drawn]
    index = {rank: i for group in mesh.groups(*axes) for i, rank in enumerate(group)}
    return [locals_[index[rank]][rank] for rank in range(mesh.size)]


def draw_addends(value: Tensor, reduction: Reduction, count: int, seed: int) -> list[Tensor]:
    """`count` tensors whose reduction is `value`, exactly."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(1, 9, value.shape, generator=generator).to(value.dtype) for _ in range(count - 1)]
    if reduction is Reduction.SUM:
        return [value - sum(drawn), *drawn]
    if reduction is Reduction.PRODUCT:
        powers = [2.0 ** (addend - 4) for addend in drawn]
        return [value / math.prod(powers), *powers]
    sign = 1 if reduction is Reduction.MAX else -1
    return [value - sign * addend for addend in drawn] + [value]


def poison_padding(program: fx.GraphModule) -> None:
    """Replace the value with which reshards pad by NaN."""
    for node in program.graph.find_nodes(op="call_function", target=PAD):
        node.update_arg(2, math.nan)
    program.recompile()


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, so that 0.0 differs from -0.0."""
    left, right = left.reshape(-1).contiguous(), right.reshape(-1).contiguous()
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@given(st.data())
def test_reshard_equals_slicing_the_full_tensor(data: st.DataObject) -> None:
    """Any reshard gives each rank a contiguous shard of the value, bit for bit, whatever the padding holds."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    source, target = data.draw(specs(mesh, len(shape))), data.draw(specs(mesh, len(shape)))
    value = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    program = lower(source, target, shape, mesh)
    poison_padding(program)
    (results,) = simulate(program, mesh, [addends(value, source, mesh, seed=math.prod(shape))])
    assert all(result.is_contiguous() for result in results)
    assert all(result.shape == target.local_shape(shape, mesh) for result in results)
    assert same_bits(unshard(results, target, mesh, shape, check=True), value)


@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    """A reshard followed by its reverse gives the value."""
    mesh, shape = data.draw(meshes()), data.draw(shapes(min_size=0))
    source, middle = (data.draw(specs(mesh, len(shape), reductions=())) for _ in range(2))
    value = torch.randn(shape)
    (there,) = simulate(lower(source, middle, shape, mesh), mesh, [shard_all(value, source, mesh)])
    (back,) = simulate(lower(middle, source, shape, mesh), mesh, [there])
    assert same_bits(unshard(back, source, mesh, shape, check=True), value)


DTYPES = (
    torch.bool, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
CASES = (
    (P("data"), P()),
    (P(None, "data"), P()),
    (P("data"), P(None, "data")),
    (P(partial={"data": "sum"}), P()),
    (P(partial={"data": "sum"}), P(None, "data")),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("source", "target"), CASES, ids=str)
def test_dtypes(dtype: torch.dtype, source: PartitionSpec, target: PartitionSpec) -> None:
    """Gathers, exchanges and sums work for every element type, which they keep."""
    mesh, shape = Mesh({"data": 2}), (3, 5)
    value = torch.arange(15).reshape(shape).remainder(7).to(dtype)
    if dtype is torch.float8_e4m3fn and source.is_partial:
        locals_ = [value, torch.zeros(shape).to(dtype)]
    else:
        locals_ = shard_all(value, source, mesh)
    (results,) = simulate(lower(source, target, shape, mesh, dtype), mesh, [locals_])
    assert same_bits(unshard(results, target, mesh, shape), value)


@given(st.data())
def test_val_is_the_local_tensor(data: st.DataObject) -> None:
    """The inferred `meta["val"]` of every tensor node has the shape and type that the simulator finds."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    source, target = data.draw(specs(mesh, len(shape))), data.draw(specs(mesh, len(shape)))
    program = lower(source, target, shape, mesh)

    def compare(node: fx.Node, values: list[object]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                assert node.meta["val"].shape == value.shape
                assert node.meta["val"].dtype == value.dtype

    simulate(program, mesh, [shard_all(torch.zeros(shape), source, mesh)], on_values=compare)


def test_on_node_names_the_spec_of_each_step() -> None:
    """The callback gets every node in order, and a spec for the last node of each step."""
    seen: list[tuple[str, PartitionSpec | None]] = []
    mesh = Mesh({"data": 2})
    program = lower(
        P("data"),
        P(partial={"data": "max"}),
        (4,),
        mesh,
        on_node=lambda node, spec: seen.append((node.name, spec)),
    )
    nodes = [node.name for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name, _ in seen] == nodes
    assert [spec for _, spec in seen if spec is not None] == [P(), P(partial={"data": "max"})]


def test_text() -> None:
    """The emitted calls of a reduce-scatter over one axis followed by an all-gather over another."""
    program = lower(P("data", partial={"model": "sum"}), P(None, "model"), (8, 4), Mesh({"data": 2, "model": 2}))
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert [getattr(node.target, "__name__", "") for node in calls] == [
        "contiguous.default",
        "view.default",
        "permute.default",
        "contiguous.default",
        "reduce_scatter_tensor.default",
        "wait_tensor.default",
        "view.default",
        "contiguous.default",
        "all_gather_into_tensor.default",
        "wait_tensor.default",
        "view.default",
        "view.default",
    ]
    assert [node.args[-1] for node in calls if "c10d" in str(node.target) and "wait" not in str(node.target)] == [
        "model",
        "data",
    ]


def test_axis_of_size_one_emits_nothing() -> None:
    """A reshard over an axis of one rank emits no node."""
    program = lower(P("data"), P(partial={"data": "sum"}), (4,), Mesh({"data": 1}))
    assert [node.op for node in program.graph.nodes] == ["placeholder", "output"]


def test_on_node_looks_past_axes_of_size_one() -> None:
    """A step over one rank emits no node, and the node in front has the step's spec."""
    seen: list[PartitionSpec | None] = []
    mesh = Mesh({"data": 2, "model": 1})
    lower(P(), P("data", "model"), (4, 4), mesh, on_node=lambda node, spec: seen.append(spec))
    assert [spec for spec in seen if spec is not None] == [P("data", "model")]


def test_a_slice_is_a_copy() -> None:
    """A slice is a copy, and does not keep its operand in memory."""
    mesh, value = Mesh({"data": 2}), torch.arange(4.0)
    (results,) = simulate(lower(P(), P("data"), (4,), mesh), mesh, [[value, value]])
    assert results[0].untyped_storage().nbytes() == 8


def test_local_steps_run_on_tensors() -> None:
    """Given a tensor in place of a proxy, `emit_reshard` runs the steps at once."""
    mesh = Mesh({"data": 2})
    steps = plan_reshard(P(), P("data"), (4,), mesh)
    with running_at({"data": 1}):
        assert emit_reshard(torch.arange(4), steps, (4,), mesh).tolist() == [2, 3]


def test_unknown_dtype() -> None:
    """Emitting a reshard of a node without `val` is refused, and the error says to pass `dtype=`."""
    graph = fx.Graph()
    proxy = fx.Proxy(graph.placeholder("value"), GraphAppendingTracer(graph))
    with pytest.raises(ValueError, match="pass dtype="):
        emit_reshard(proxy, (), (4,), Mesh({"data": 2}))


def test_complex_maximum() -> None:
    """A maximum of complex numbers is refused."""
    with pytest.raises(ValueError, match="have no reduction='max'"):
        lower(P(partial={"data": "max"}), P(), (4,), Mesh({"data": 2}), torch.complex64)
