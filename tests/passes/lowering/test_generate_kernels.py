"""Generated kernels compute the results of the replaced calls, and are proven equal to the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from torch import Tensor, fx

from autoshard.errors import VerificationError
from autoshard.kernels.generated.define import generated_kernel
from autoshard.kernels.generated.operators import CONSTANTS, POINTWISE, REDUCTIONS, VIEWS
from cost_models.device import Device, device
from passes.lowering.choose_groups import choose_groups
from passes.lowering.generate_kernels import generate_kernels
from passes.preparation.number_values import Numbering, draws_numbers
from passes.verification.expand_kernels import STANDS_FOR, expand_kernels
from tests.passes.drawn_groups import DrawnGraph, drawn_graphs, wide_call
from tests.passes.launches import count_launches

_aten = torch.ops.aten


def _results(graph_module: fx.GraphModule) -> list[fx.Node]:
    return list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]


def _expected(drawn: DrawnGraph) -> list[Tensor]:
    """The results of a graph, each call in float64."""
    inputs = iter(drawn.inputs)
    values: dict[fx.Node, Tensor] = {}
    for node in drawn.graph_module.graph.nodes:
        if node.op == "placeholder":
            value = next(inputs)
            values[node] = value.double() if value.is_floating_point() else value
        elif node.op == "call_function":
            values[node] = wide_call(node, values)
    return [values[node] for node in _results(drawn.graph_module)]


@pytest.mark.usefixtures("_poisoned_outputs")
@settings(suppress_health_check=[*HealthCheck])
@given(drawn=drawn_graphs())
def test_drawn_graphs_equal_eager(drawn: DrawnGraph) -> None:
    """A drawn graph with generated kernels equals the plain graph in float64, and expands to the same calls."""
    generated = generate_kernels({"drawn": drawn.graph_module}, None, "A drawn graph.")["drawn"]
    groups = [node for node in generated.graph.nodes if STANDS_FOR in node.meta]
    event(f"{len(groups)} kernels")
    numbering = Numbering()
    numbering.add_graph(drawn.graph_module)
    expected = [numbering.numbers[node] for node in _results(drawn.graph_module)]
    expanded = expand_kernels(generated)
    numbering.add_graph(expanded)
    assert [numbering.numbers[node] for node in _results(expanded)] == expected
    eps = max(torch.finfo(item.dtype).eps for item in drawn.inputs if item.is_floating_point())
    found = zip(generated(*drawn.inputs), _results(drawn.graph_module), _expected(drawn), strict=True)
    for result, node, wanted in found:
        form = node.meta["val"]
        assert (result.shape, result.dtype) == (form.shape, form.dtype)
        tolerance = drawn.largest * max(1e-4, 16 * eps)
        torch.testing.assert_close(result.double(), wanted.double(), rtol=1e-3, atol=tolerance)


def _graph(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Return a function of ATen calls as a graph with fake values."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = [fx.Proxy(graph.placeholder(f"x{index}"), tracer) for index in range(len(inputs))]
    results = function(*proxies)
    graph.output(tuple(item.node for item in (results if isinstance(results, tuple) else (results,))))
    values = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            value = next(values)
            node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    return fx.GraphModule(torch.nn.Module(), graph)


def _generate(graph_module: fx.GraphModule, device: Device | None = None) -> fx.GraphModule:
    return generate_kernels({"tested": graph_module}, device, "A graph of a test.")["tested"]


def _groups(graph_module: fx.GraphModule) -> list[tuple[str, ...]]:
    return [node.meta[STANDS_FOR] for node in graph_module.graph.nodes if STANDS_FOR in node.meta]


def _norm(x: Any, weight: Any) -> Any:
    wide = _aten._to_copy.default(x, dtype=torch.float32)
    scale = _aten.rsqrt.default(_aten.add.Tensor(_aten.mean.dim(_aten.pow.Tensor_Scalar(wide, 2), [-1], True), 1e-6))
    return _aten._to_copy.default(_aten.mul.Tensor(_aten.mul.Tensor(wide, scale), weight), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "costly",
    [
        _aten.gelu.default,
        lambda angles: _aten.gelu_backward.default(angles, angles),
        lambda angles: _aten.silu_backward.default(angles, angles),
    ],
    ids=["gelu", "gelu_backward", "silu_backward"],
)
def test_what_is_costly_is_not_computed_for_every_row(costly: Callable[[Any], Any]) -> None:
    """A costly function of a vector that all rows read stays out of the rows' kernel, so it is computed once."""
    x, angles = torch.randn(50, 8), torch.randn(8)
    graph = _graph(lambda x, a: _aten.tanh.default(_aten.mul.Tensor(x, costly(a))), x, angles)
    assert _groups(_generate(graph)) == [("mul_tensor", "tanh_default")]


def test_what_reads_nothing_or_is_read_by_nothing_has_no_kernel() -> None:
    """Calls that read only constants, and calls whose results are unread, have no generated kernel."""

    def function(x: Any) -> Any:
        _aten.exp.default(_aten.neg.default(x))
        twos = x.tracer.create_proxy("call_function", _aten.full.default, ([4], 2.0), {})
        return _aten.exp.default(_aten.neg.default(twos))

    assert not _groups(_generate(_graph(function, torch.ones(4))))


def test_a_norm_is_one_kernel() -> None:
    """A norm with its pointwise calls is one kernel, which reads and writes each tensor once."""
    x, weight = torch.randn(5, 7, 24).bfloat16(), torch.randn(24)
    graph = _graph(_norm, x, weight)
    generated = _generate(graph)
    assert len(_groups(generated)) == 1
    before, after = count_launches(graph), count_launches(generated)
    assert (before.launches, after.launches) == (8, 1)
    assert after.memory_bytes == 2 * x.numel() * 2 + weight.numel() * 4
    torch.testing.assert_close(generated(x, weight), graph(x, weight), rtol=2e-2, atol=2e-2)


def test_what_is_saved_is_what_is_counted() -> None:
    """A program with a generated kernel has as many launches and bytes fewer as its group claims to save."""
    graph = _graph(
        lambda x, y: _aten.mul.Tensor(_aten.tanh.default(x), _aten.add.Tensor(x, y)), *[torch.ones(6, 8)] * 2
    )
    (chosen,) = choose_groups(graph.graph, None)
    before, after = count_launches(graph), count_launches(_generate(graph))
    assert before.launches - after.launches == chosen.saved_launches == 2
    assert before.memory_bytes - after.memory_bytes == chosen.saved_bytes


def test_the_device_decides() -> None:
    """Two readers of one value become one kernel, with or without a device. Readers of two values stay apart."""
    graph = _graph(lambda x: (_aten.tanh.default(x), _aten.neg.default(x)), torch.ones(6, 8))
    assert [len(group) for group in _groups(_generate(graph, device("h100_sxm")))] == [2]
    assert [len(group) for group in _groups(_generate(graph))] == [2]
    apart = _graph(lambda x, y: (_aten.tanh.default(x), _aten.neg.default(y)), *[torch.ones(6, 8)] * 2)
    assert not _groups(_generate(apart, device("h100_sxm")))


def test_results_come_before_what_reads_them() -> None:
    """A call stays out of a group if its result also reaches the group through a call outside, here a product."""

    def function(x: Any, w: Any) -> Any:
        first = _aten.tanh.default(x)
        return _aten.add.Tensor(_aten.mul.Tensor(_aten.mm.default(first, w), 2.0), first)

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    graph = _graph(function, x, w)
    generated = _generate(graph)
    assert _groups(generated) == [("mul_tensor", "add_tensor")]
    torch.testing.assert_close(generated(x, w), graph(x, w))


def test_random_numbers_keep_their_order() -> None:
    """Operators that draw random numbers stay out of kernels, and keep their order."""
    assert not [target for target in (*POINTWISE, *REDUCTIONS, *VIEWS, *CONSTANTS) if draws_numbers(target)]

    def function(x: Any) -> Any:
        first = _aten.bernoulli.p(_aten.tanh.default(_aten.neg.default(x)), 0.5)
        return _aten.mul.Tensor(_aten.bernoulli.p(x, 0.5), _aten.add.Tensor(first, x))

    generated = _generate(_graph(function, torch.ones(64)))
    assert len(_groups(generated)) == 2
    drawn = [node for node in generated.graph.nodes if draws_numbers(node.target)]
    assert [node.name for node in drawn] == ["bernoulli_p", "bernoulli_p_1"]


def test_no_operator_of_a_kernel_writes() -> None:
    """No operator of kernels writes in place, and a graph with such a write has no kernel."""
    assert not [target for target in (*POINTWISE, *REDUCTIONS, *VIEWS, *CONSTANTS) if target._schema.is_mutable]

    def function(x: Any, y: Any) -> Any:
        first = _aten.neg.default(_aten.tanh.default(x))
        _aten.copy_.default(x, y)
        return _aten.add.Tensor(first, x)

    assert not _groups(_generate(_graph(function, torch.ones(4), torch.ones(4))))


def test_a_value_beside_its_transpose_is_read_as_a_view() -> None:
    """A graph of x + x.T computes the same results with generated kernels as without."""
    x = torch.randn(6, 6)
    graph = _graph(lambda x: _aten.tanh.default(_aten.add.Tensor(x, _aten.t.default(x))), x)
    generated = _generate(graph)
    torch.testing.assert_close(generated(x), graph(x))


def test_alike_groups_share_a_kernel() -> None:
    """Groups that differ only in names share one operator, whose file states the number of groups."""

    def function(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = _aten.mm.default(_aten.neg.default(_aten.tanh.default(x)), w)
        return x

    generated = _generate(_graph(function, torch.ones(4, 4), torch.ones(4, 4)))
    calls = [node.target for node in generated.graph.nodes if STANDS_FOR in node.meta]
    assert len(calls) == 3
    (operator,) = set(calls)
    text = generated_kernel(operator).path.read_text()
    assert text.count("@triton.jit") == 1
    assert "The program has 3 such groups." in text


def test_the_choice_is_the_same_every_time() -> None:
    """Equal graphs have the same code with generated kernels."""
    inputs = (torch.randn(5, 7, 24).bfloat16(), torch.randn(24))
    first, second = (_generate(_graph(_norm, *inputs)) for _ in range(2))
    assert first.code == second.code


@pytest.mark.parametrize("mutation", ["operands", "kernel", "missing"])
def test_wrong_kernels_do_not_expand_to_the_program(mutation: str) -> None:
    """Swapped operands, or another kernel, expand to other calls than the graph's. A missing operand is refused."""

    def function(x: Any, y: Any) -> Any:
        return _aten.sub.Tensor(_aten.tanh.default(x), y), _aten.mm.default(x, y)

    def other(x: Any, y: Any) -> Any:
        return _aten.sub.Tensor(_aten.sigmoid.default(x), y)

    inputs = (torch.randn(4, 4), torch.randn(4, 4))
    graph = _graph(function, *inputs)
    generated = _generate(graph)
    (call,) = (node for node in generated.graph.nodes if STANDS_FOR in node.meta)
    if mutation == "operands":
        call.args = (call.args[1], call.args[0])
    elif mutation == "missing":
        call.args = call.args[:1]
    else:
        (call.target,) = (
            node.target for node in _generate(_graph(other, *inputs)).graph.nodes if STANDS_FOR in node.meta
        )
    numbering = Numbering()
    numbering.add_graph(graph)
    expected = [numbering.numbers[node] for node in _results(graph)]
    if mutation == "missing":
        with pytest.raises(VerificationError, match="takes 2 operands"):
            expand_kernels(generated)
        return
    expanded = expand_kernels(generated)
    numbering.add_graph(expanded)
    assert [numbering.numbers[node] for node in _results(expanded)] != expected
