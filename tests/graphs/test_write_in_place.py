"""Results are written into inputs, and no value is overwritten before its last read."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import autoshard.kernels  # noqa: F401  (defines the operators)
from autoshard.graphs.write_in_place import write_in_place

aten = torch.ops.aten
HYPER = torch.tensor([0.1, 0.0, 0.9, 0.0, 0.0], dtype=torch.float64)


def _graph(names: str, build: Callable[..., tuple[fx.Node, ...]]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in names.split()]
    graph.output(build(graph.call_function, *nodes))
    return fx.GraphModule(nn.Module(), graph)


def _momentum(call: Callable[..., fx.Node], p: fx.Node, g: fx.Node, m: fx.Node, hyper: fx.Node) -> list[fx.Node]:
    update = call(torch.ops.autoshard.momentum_update.default, (p, g, m, None, hyper, False, False))
    return [call(operator.getitem, (update, index)) for index in (0, 1)]


def _plain(call: Callable[..., fx.Node], p: fx.Node, g: fx.Node, m: fx.Node, h: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(_momentum(call, p, g, m, h))


def _by_a_slice(call: Callable[..., fx.Node], p: fx.Node, g: fx.Node, m: fx.Node, h: fx.Node) -> tuple[fx.Node, ...]:
    """Update a piece of the parameter and concatenate the whole, as ZeRO-1 does."""
    piece = call(aten.narrow.default, (p, 0, 0, 2))
    updated, state = _momentum(call, piece, g, m, h)
    rest = call(aten.narrow.default, (p, 0, 2, 2))
    return call(aten.cat.default, ([updated, rest],)), state


def _late(view: Callable[..., fx.Node]) -> Callable[..., tuple[fx.Node, ...]]:
    """A graph that returns twice the old parameter, read through a view, beside the update."""

    def build(call: Callable[..., fx.Node], p: fx.Node, g: fx.Node, m: fx.Node, h: fx.Node) -> tuple[fx.Node, ...]:
        early = view(call, p)
        updated, state = _momentum(call, p, g, m, h)
        return updated, state, call(aten.mul.Tensor, (early, 2.0))

    return build


def _swapped(call: Callable[..., fx.Node], p: fx.Node, g: fx.Node, m: fx.Node, h: fx.Node) -> tuple[fx.Node, ...]:
    """Return two inputs in each other's place, one of them through an alias."""
    return call(aten.type_as.default, (m, g)), p


def _read_later(call: Callable[..., fx.Node], p: fx.Node, g: fx.Node, m: fx.Node, h: fx.Node) -> tuple[fx.Node, ...]:
    """Return twice the sum of the old parameter, read through a view, beside the update."""
    view = call(aten.view.default, (p, [-1]))
    updated, state = _momentum(call, p, g, m, h)
    late = call(aten.sum.default, (view,))
    return updated, state, call(aten.mul.Tensor, (late, 2.0))


def _exchanged(call: Callable[..., fx.Node], p: fx.Node, g: fx.Node, m: fx.Node, h: fx.Node) -> tuple[fx.Node, ...]:
    """Compute each of two results from both inputs."""
    return call(aten.add.Tensor, (p, m)), call(aten.sub.Tensor, (p, m))


def _same(call: Callable[..., fx.Node], p: fx.Node, g: fx.Node, m: fx.Node, h: fx.Node) -> tuple[fx.Node, ...]:
    """Update a parameter with itself as the gradient."""
    return tuple(_momentum(call, p, p, m, h))


_VIEWS: dict[str, Callable[..., fx.Node]] = {
    "_unsafe_view": lambda call, p: call(aten._unsafe_view.default, (p, [-1])),
    "type_as": lambda call, p: call(aten.type_as.default, (p, p)),
    "dropout": lambda call, p: call(aten.dropout.default, (p, 0.5, False)),
    "to": lambda call, p: call(aten.to.dtype, (p, torch.float32)),
    "expand": lambda call, p: call(aten.expand.default, (p, [2, -1, -1])),
    "contiguous": lambda call, p: call(aten.contiguous.default, (call(aten.reshape.default, (p, [-1])),)),
    "split": lambda call, p: call(operator.getitem, (call(aten.unsafe_split.Tensor, (p, 2)), 1)),
    "second": lambda call, p: call(
        operator.getitem,
        (call(aten.meshgrid.default, ([call(aten.select.int, (p, 1, 0)), call(aten.view.default, (p, [-1]))],)), 1),
    ),
}
"""Calls that return their operand or its view, with or without an alias in the schema."""

BUILDERS = {
    "plain": _plain, "slice": _by_a_slice, "read later": _read_later, "exchanged": _exchanged, "same": _same,
    "swapped": _swapped, **{name: _late(view) for name, view in _VIEWS.items()},
}  # fmt: skip


def _values(kind: str) -> list[Tensor]:
    torch.manual_seed(0)
    p, g, m = (torch.randn(4, 3) for _ in range(3))
    if kind == "slice":
        g, m = g[:2].clone(), m[:2].clone()
    return [p, g, m, HYPER]


@pytest.mark.parametrize("kind", BUILDERS)
def test_results_are_those_of_the_functional_graph(kind: str) -> None:
    """Results equal the functional graph's bit for bit, lie in the inputs' memory, and the gradient does not change."""
    functional = _graph("p g m hyper", BUILDERS[kind])
    expected = functional(*_values(kind))
    values = _values(kind)
    found = write_in_place(functional, {0: 0, 1: 2})(*values)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert found[0] is values[0]
    assert found[1] is values[2]
    if kind != "same":
        assert torch.equal(values[1], _values(kind)[1])


def test_updates_are_made_in_place_where_they_may_be() -> None:
    """A plain update runs in place without a copy, and only an input that is read later is copied."""

    def calls(kind: str) -> list[str]:
        module = write_in_place(_graph("p g m hyper", BUILDERS[kind]), {0: 0, 1: 2})
        return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]

    assert calls("plain") == ["autoshard.momentum_update_.default"]
    assert "aten.clone.default" in calls("read later")
    assert "aten.clone.default" in calls("same")
    assert calls("exchanged").count("aten.copy_.default") == 2


def test_what_is_not_written_is_not_touched() -> None:
    """An input that is not to be overwritten keeps its value."""
    functional = _graph("p g m hyper", _plain)
    values = _values("plain")
    found = write_in_place(functional, {1: 2})(*values)
    assert torch.equal(values[0], _values("plain")[0])
    assert torch.equal(found[0], functional(*_values("plain"))[0])
