"""On request, gradients are sent in 16 bits, and all other values keep their dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx

from autoshard.errors import VerificationError
from autoshard.ir.lowered import PhasedProgram
from passes.lowering.narrow_reductions import NarrowReductions
from passes.lowering.overlap import overlapped
from passes.preparation.rewriting import is_collective
from passes.verification.verify_phases import verify_phases
from tests.passes.lowering.test_name_communicators import LAYOUTS, phased
from tests.passes.mutations import copy_of

_aten = torch.ops.aten


def narrowed(layout: str) -> PhasedProgram:
    return NarrowReductions()(phased(layout))


def sent_bytes(graph_module: fx.GraphModule, purpose: str) -> int:
    """Bytes of the operands of collectives of a purpose."""
    nodes = [node for node in graph_module.graph.nodes if is_collective(node) and str(node.args[-1]).endswith(purpose)]
    values = [node.args[0].meta["val"] for node in nodes]
    return sum(value.numel() * value.element_size() for value in values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_half_as_large_on_the_wire(layout: str) -> None:
    """In every layout the backward sends gradients in half the bytes, the forward is unchanged, and phases verify."""
    before, after = phased(layout), narrowed(layout)
    verify_phases(after)
    sent = sent_bytes(before.backward, "/gradients")
    assert sent > 0
    assert sent_bytes(after.backward, "/narrow_gradients") == sent / 2
    assert sent_bytes(after.backward, "/gradients") == 0
    assert after.forward is before.forward


def test_narrowed_gradients_come_in_buckets() -> None:
    """Narrowed gradients are packed into bfloat16 buckets, and the phases verify."""
    found = overlapped(narrowed("data"))
    verify_phases(found)
    packed = [node for node in found.backward.graph.nodes if node.target is _aten.cat.default]
    assert packed
    assert all(node.meta["val"].dtype is torch.bfloat16 for node in packed)


def first(graph: fx.Graph, target: Any, **kwargs: Any) -> Any:
    return next(node for node in graph.nodes if node.target is target and kwargs.items() <= node.kwargs.items())


def no_rounding(graph: fx.Graph) -> None:
    """Send float32 in place of 16 bits."""
    narrow = first(graph, _aten._to_copy.default, dtype=torch.bfloat16)
    narrow.replace_all_uses_with(narrow.args[0])


def no_way_back(graph: fx.Graph) -> None:
    """Leave the sum in 16 bits."""
    wide = first(graph, _aten._to_copy.default, dtype=torch.float32)
    wide.replace_all_uses_with(wide.args[0])


def another_operator(graph: fx.Graph) -> None:
    """Replace the cast of the sum to float32 by another operator."""
    first(graph, _aten._to_copy.default, dtype=torch.float32).target = _aten.empty_like.default


def largest_not_sum(graph: fx.Graph) -> None:
    """Reduce by the maximum in place of the sum."""
    start = first(graph, torch.ops._c10d_functional.all_reduce.default)
    start.args = (start.args[0], "max", start.args[2])


def other_axis(graph: fx.Graph) -> None:
    """Reduce over the other axis of the mesh."""
    start = first(graph, torch.ops._c10d_functional.all_reduce.default)
    start.args = (*start.args[:-1], "model/narrow_gradients")


def another_gradient(graph: fx.Graph) -> None:
    """Return a gradient in the place of another gradient."""
    wide: list[Any] = [node for node in graph.nodes if node.kwargs.get("dtype") is torch.float32]
    wide[0].replace_all_uses_with(wide[1])


@pytest.mark.parametrize(
    "mutate", [no_rounding, no_way_back, another_operator, largest_not_sum, other_axis, another_gradient]
)
def test_what_is_more_than_rounding_is_refused(mutate: Any) -> None:
    """A narrowed gradient that is not the rounded sum is refused."""
    found = narrowed("tensor")
    backward = copy_of(found.backward)
    mutate(backward.graph)
    with pytest.raises(VerificationError):
        verify_phases(dataclasses.replace(found, backward=backward))


def test_norms_are_not_narrowed() -> None:
    """The norm that gradients are clipped to is summed over ranks in float32."""
    found = narrowed("clipped")
    verify_phases(found)
    assert found.update is not None
    assert sent_bytes(found.update, "/narrow_gradients") == 0
    assert sent_bytes(found.update, "/gradients") > 0
