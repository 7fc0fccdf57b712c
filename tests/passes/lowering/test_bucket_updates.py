"""Updates of many parameters become one call, behind all operands and before all readers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from autoshard.errors import VerificationError
from autoshard.graphs.write_in_place import write_in_place
from passes.lowering.bucket_updates import BucketUpdates
from passes.verification.expand_buckets import expand_buckets
from passes.verification.verify_in_place import verify_in_place

aten, ours = torch.ops.aten, torch.ops.autoshard
HYPER = torch.tensor([0.1, 0.9, 0.99, 1e-8, 0.01, 2.0], dtype=torch.float64)
_STATE = 4
"""Inputs of each update: the parameter, its gradient, both moments."""
Lists = list[list[fx.Node]]
"""Lists of a bucket, one list for each kind of operand."""


def _update_graph(count: int, *, in_pieces: bool, dtypes: Sequence[torch.dtype] | None = None) -> fx.GraphModule:
    """The functional Adam update of `count` parameters of shape [4, 3].

    With `in_pieces` only the first half of each parameter is updated, and then joined to the rest, as in ZeRO-1.
    """
    graph, results = fx.Graph(), []
    hyper = graph.placeholder("hyper")
    hyper.meta["val"] = HYPER
    for index in range(count):
        operands = [graph.placeholder(f"{name}{index}") for name in ("p", "g", "m", "v")]
        for place, node in enumerate(operands):
            shape = (2, 3) if in_pieces and place else (4, 3)
            node.meta["val"] = torch.empty(shape, dtype=dtypes[index] if dtypes else torch.float32, device="meta")
        results += _updated(graph, operands, hyper, in_pieces=in_pieces)
    # Updates stand behind all inputs.
    output = graph.output(tuple(results))
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        output.prepend(node)
    return fx.GraphModule(nn.Module(), graph)


def _updated(graph: fx.Graph, operands: list[fx.Node], hyper: fx.Node, *, in_pieces: bool) -> list[fx.Node]:
    whole, *rest = operands
    param = whole
    if in_pieces:
        param = graph.call_function(aten.narrow.default, (whole, 0, 0, 2))
        param.meta["val"] = torch.empty(2, 3, device="meta")
    update = graph.call_function(ours.adam_update.default, (param, *rest, None, hyper, True, False))
    new, *state = (graph.call_function(operator.getitem, (update, index)) for index in range(3))
    if in_pieces:
        other = graph.call_function(aten.narrow.default, (whole, 0, 2, 2))
        sent = graph.call_function(aten.contiguous.default, (new,))
        new = graph.call_function(aten.cat.default, ([sent, other],))
    return [new, *state]


def _written(count: int) -> dict[int, int]:
    """Map each result to the input that it overwrites. Input 0 has hyper-parameters, and gradients are not written."""
    return {3 * i + j: 1 + _STATE * i + place for i in range(count) for j, place in enumerate((0, 2, 3))}


def _values(graph: fx.Graph) -> list[Tensor]:
    torch.manual_seed(0)
    found = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return [HYPER, *(torch.rand(value.shape).to(value.dtype) for value in found[1:])]


def _calls(graph_module: fx.GraphModule) -> list[int]:
    """Return the number of parameters in each bucket; 1 for a lone update."""
    found = [node for node in graph_module.graph.nodes if "adam_update" in str(node.target)]
    return [len(node.args[0]) if isinstance(node.args[0], (list, tuple)) else 1 for node in found]


@pytest.mark.parametrize("in_pieces", [False, True])
def test_updates_share_a_launch(in_pieces: bool) -> None:
    """Three updates become one in-place call, which is proven and keeps the step's results."""
    functional = _update_graph(3, in_pieces=in_pieces)
    expected = functional(*_values(functional.graph))
    writing = write_in_place(functional, _written(3))
    bucketed = BucketUpdates()(writing)
    assert _calls(writing) == [1, 1, 1]
    assert _calls(bucketed) == [3]
    verify_in_place(functional, bucketed, _written(3))
    values = _values(functional.graph)
    found = bucketed(*values)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for index, place in _written(3).items():
        assert found[index].data_ptr() == values[place].data_ptr()


def test_a_call_takes_all_dtypes() -> None:
    """One call updates parameters of several dtypes."""
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16]
    functional = _update_graph(5, in_pieces=False, dtypes=kinds)
    bucketed = BucketUpdates()(write_in_place(functional, _written(5)))
    assert _calls(bucketed) == [5]
    verify_in_place(functional, bucketed, _written(5))
    torch.testing.assert_close(
        bucketed(*_values(functional.graph)), functional(*_values(functional.graph)), rtol=1e-2, atol=1e-2
    )


def test_buckets_expand_to_their_updates() -> None:
    """`expand_buckets` turns one call for three parameters back into three updates."""
    bucketed = BucketUpdates()(write_in_place(_update_graph(3, in_pieces=True), _written(3)))
    assert _calls(expand_buckets(bucketed)) == [1, 1, 1]


def _reversed_at(*places: int) -> Callable[[Lists], list[Lists]]:
    """Reverse the operands of a bucket at the given places, and leave the other operands."""
    return lambda lists: [[items[::-1] if place in places else items for place, items in enumerate(lists)]]


def _with_sizes(*sizes: int) -> Callable[[Lists], list[Lists]]:
    """Cut the lists of a bucket to given numbers of parameters, gradients and moments."""
    return lambda lists: [[items[:size] for items, size in zip(lists, sizes, strict=True)]]


def _cut(*parts: slice) -> Callable[[Lists], list[Lists]]:
    """Cut a bucket into one bucket for each slice."""
    return lambda lists: [[items[part] for items in lists] for part in parts]


MISTAKES: dict[str, Callable[[Lists], list[Lists]]] = {
    "parameters in another order": _reversed_at(0),
    "gradients of other parameters": _reversed_at(1),
    "moments of other parameters": _reversed_at(2, 3),
    "moments for each other": lambda lists: [[lists[0], lists[1], lists[3], lists[2]]],
    "a parameter left out": _with_sizes(2, 2, 2, 2),
    "a gradient left out": _with_sizes(3, 2, 3, 3),
    "a parameter twice": lambda lists: [[[*items, items[0]] for items in lists]],
    "two that overlap": _cut(slice(2), slice(1, 3)),
    "two that leave one out": _cut(slice(1), slice(2, 3)),
    "the same twice": _cut(slice(3), slice(3)),
}


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_buckets_do_not_verify(name: str, in_pieces: bool) -> None:
    """Buckets with a mistake are refused, both for whole parameters and for parameters in pieces."""
    functional, bucketed = _split_otherwise(MISTAKES[name], in_pieces)
    with pytest.raises(VerificationError):
        verify_in_place(functional, bucketed, _written(3))


@pytest.mark.parametrize("right", [_cut(slice(1), slice(1, 3)), _reversed_at(0, 1, 2, 3)])
def test_other_right_buckets_verify(right: Callable[[Lists], list[Lists]]) -> None:
    """A bucket that is cut in two, or has its parameters in another order, verifies and computes the same results."""
    functional, bucketed = _split_otherwise(right, in_pieces=True)
    verify_in_place(functional, bucketed, _written(3))
    torch.testing.assert_close(
        bucketed(*_values(functional.graph)), functional(*_values(functional.graph)), rtol=1e-5, atol=1e-6
    )


def _split_otherwise(change: Callable[[Lists], list[Lists]], in_pieces: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The update of three parameters, and its graph in place with other buckets than the pass makes."""
    functional = _update_graph(3, in_pieces=in_pieces)
    bucketed = BucketUpdates()(write_in_place(functional, _written(3)))
    (call,) = (node for node in bucketed.graph.nodes if node.target is ours.adam_updates_.default)
    with bucketed.graph.inserting_before(call):
        for lists in change([list(items) for items in call.args[:_STATE]]):
            bucketed.graph.call_function(ours.adam_updates_.default, (*lists, *call.args[_STATE:]))
    bucketed.graph.erase_node(call)
    return functional, fx.GraphModule(bucketed, bucketed.graph)


def test_updates_that_read_each_other_stay() -> None:
    """One call cannot update two parameters if the gradient of one reads the new value of the other."""
    functional = _update_graph(2, in_pieces=False)
    graph = functional.graph
    first, second = (node for node in graph.nodes if node.target is ours.adam_update.default)
    updated = next(user for user in first.users if user.args[1] == 0)
    with graph.inserting_before(second):
        grad = graph.call_function(aten.mul.Tensor, (updated, 2.0))
    grad.meta["val"] = torch.empty(4, 3, device="meta")
    second.args = (second.args[0], grad, *second.args[2:])
    bucketed = BucketUpdates()(write_in_place(functional, _written(2)))
    assert _calls(bucketed) == [1, 1]
