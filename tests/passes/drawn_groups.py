"""Draw graphs of pointwise operators, reductions and views, with values for the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_VALUE = 30.0
_aten = torch.ops.aten

UNARY: tuple[Callable[[Any], Any], ...] = (
    lambda x: _aten.neg.default(x),
    lambda x: _aten.abs.default(x),
    lambda x: _aten.tanh.default(x),
    lambda x: _aten.sigmoid.default(x),
    lambda x: _aten.silu.default(x),
    lambda x: _aten.gelu.default(x),
    lambda x: _aten.gelu.default(x, approximate="tanh"),
    lambda x: _aten.relu.default(x),
    lambda x: _aten.erf.default(x),
    lambda x: _aten.cos.default(x),
    lambda x: _aten.pow.Tensor_Scalar(x, 2),
    lambda x: _aten.mul.Tensor(x, 0.375),
    lambda x: _aten.add.Tensor(x, 1, alpha=2),
    lambda x: _aten.rsub.Scalar(x, 1.5),
    lambda x: _aten.exp.default(_aten.clamp.default(x, -3.0, 2.0)),
    lambda x: _aten.rsqrt.default(_aten.add.Tensor(_aten.mul.Tensor(x, x), 0.5)),
    lambda x: _aten.log.default(_aten.add.Tensor(_aten.abs.default(x), 1)),
    lambda x: _aten._to_copy.default(x, dtype=torch.float32),
    lambda x: _aten.clone.default(x, memory_format=torch.contiguous_format),
)
BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: _aten.add.Tensor(x, y),
    lambda x, y: _aten.sub.Tensor(x, y, alpha=0.5),
    lambda x, y: _aten.mul.Tensor(x, y),
    lambda x, y: _aten.div.Tensor(x, _aten.add.Tensor(_aten.abs.default(y), 1)),
    lambda x, y: _aten.maximum.default(x, y),
    lambda x, y: _aten.minimum.default(x, y),
    lambda x, y: _aten.silu_backward.default(x, y),
    lambda x, y: _aten.gelu_backward.default(
        _aten.add.Tensor(x, y), _aten.mul.Tensor(x, y)
    ),  # oneDNN asks for one shape
    lambda x, y: _aten.tanh_backward.default(x, _aten.tanh.default(y)),
)
REDUCTIONS = (
    _aten.sum.dim_IntList,
    _aten.mean.dim,
    _aten.amax.default,
    _aten.amin.default,
)


@dataclass
class DrawnGraph:
    """A graph, values for its placeholders, and the largest magnitude of any value in float64."""

    graph_module: fx.GraphModule
    inputs: list[Tensor]
    largest: float


@dataclass
class _Drawing:
    """A graph under construction; `wide` has the value of each node in float64."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[Tensor] = field(default_factory=list)
    wide: dict[fx.Node, Tensor] = field(default_factory=dict)
    largest: float = 1.0
    tracer: _Tracer = field(init=False)

    def __post_init__(self) -> None:
        self.tracer = _Tracer(self)

    def place(self, value: Tensor) -> fx.Proxy:
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self.inputs.append(value)
        self.wide[node] = value.double() if value.is_floating_point() else value
        return fx.Proxy(node, self.tracer)

    def close(self, results: Sequence[fx.Node]) -> DrawnGraph:
        self.graph.output(tuple(results))
        self.graph.eliminate_dead_code()
        return DrawnGraph(fx.GraphModule(torch.nn.Module(), self.graph), self.inputs, self.largest)


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Gives the node of every call its meta value and its value in float64."""

    def __init__(self, drawing: _Drawing) -> None:
        super().__init__(drawing.graph)
        self.wide = drawing.wide

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        target: Any = node.target
        node.meta["val"] = target(*fx.map_arg(node.args, lambda item: item.meta["val"]), **node.kwargs)
        self.wide[node] = wide_call(node, self.wide)
        return node


def wide_call(node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor:
    """Run a call on the float64 `values` of its operands, and drop float types from its keyword arguments."""
    target: Any = node.target
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = {name: item for name, item in node.kwargs.items() if item not in FLOATS}
    return target(*args, **kwargs)


@st.composite
def drawn_graphs(draw: st.DrawFn) -> DrawnGraph:
    """Draw a graph of three to eight operations on tensors of one to three dims, some broadcast or transposed."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 17, 33]), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(FLOATS))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    drawing = _Drawing()
    values = [drawing.place(_input(draw, sizes, dtype)) for _ in range(draw(st.integers(1, 3)))]
    masks = [drawing.place(torch.randn(sizes, device=DEVICE) > 0)] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(3, 8))):
        made = _call(draw, values, masks, sizes)
        magnitude = drawing.wide[made.node].abs().max().item()
        if magnitude < MAX_VALUE:
            drawing.largest = max(drawing.largest, magnitude)
            values.append(made)
    kept = draw(st.lists(st.sampled_from(values), max_size=2))
    results = dict.fromkeys(value.node for value in (values[-1], *kept))
    return drawing.close(list(results))


def _input(draw: st.DrawFn, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw an input with the last dims of `sizes`, some broadcast, in one of four memory layouts."""
    shape = [draw(st.sampled_from([size, size, size, 1])) for size in sizes][draw(st.integers(0, len(sizes) - 1)) :]
    layout = draw(st.sampled_from(["plain", "plain", "turned", "spread", "expanded"]))
    if layout == "turned":
        return torch.randn(shape[::-1], device=DEVICE).to(dtype).permute(*reversed(range(len(shape))))
    if layout == "spread":
        return torch.randn(*shape[:-1], 2 * shape[-1], device=DEVICE).to(dtype)[..., ::2]
    if layout == "expanded":
        return torch.randn(*shape[:-1], 1, device=DEVICE).to(dtype).expand(shape)
    return torch.randn(shape, device=DEVICE).to(dtype)


def _call(draw: st.DrawFn, values: Sequence[Any], masks: Sequence[Any], sizes: Sequence[int]) -> Any:
    x = draw(st.sampled_from(list(values)))
    shape = tuple(x.node.meta["val"].shape)
    fitting = [y for y in values if _broadcasts(shape, tuple(y.node.meta["val"].shape))]
    kind = draw(st.sampled_from(["unary", "binary", "binary", "reduce", "softmax", "view", "where"]))
    if kind == "unary":
        return draw(st.sampled_from(UNARY))(x)
    if kind == "reduce" and shape:
        dims = [len(shape) - 1] if draw(st.integers(0, 3)) else draw(st.sampled_from([[0], list(range(len(shape)))]))
        return draw(st.sampled_from(REDUCTIONS))(x, dims, draw(st.sampled_from([True, True, False])))
    if kind == "softmax" and shape:
        shifted = _aten.exp.default(_aten.sub.Tensor(x, _aten.amax.default(x, [-1], True)))
        return _aten.div.Tensor(shifted, _aten.sum.dim_IntList(shifted, [-1], True))
    if kind == "view" and shape:
        return _view(draw, x, shape)
    if kind == "where" and masks and shape == tuple(sizes):
        half = x.tracer.create_proxy("call_function", _aten.full.default, ([], 0.5), {"dtype": torch.float32})
        return _aten.where.self(masks[0], x, half)
    return draw(st.sampled_from(BINARY))(x, draw(st.sampled_from(fitting)))


def _view(draw: st.DrawFn, x: Any, shape: tuple[int, ...]) -> Any:
    kind = draw(st.sampled_from(["flatten", "unsqueeze", "permute", "split"]))
    if kind == "unsqueeze":
        return _aten.unsqueeze.default(x, draw(st.integers(-1, 0)))
    if kind == "permute":
        return _aten.permute.default(x, draw(st.permutations(range(len(shape)))))
    if kind == "split" and shape[-1] % 2 == 0:
        return _aten.reshape.default(x, [*shape[:-1], 2, shape[-1] // 2])
    return _aten.reshape.default(x, [-1])


def _broadcasts(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return all(1 in pair or pair[0] == pair[1] for pair in zip(reversed(first), reversed(second), strict=False))
