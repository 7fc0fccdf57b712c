"""Programs that take their inputs from a list."""

from __future__ import annotations

import weakref

import torch
from torch import fx

from autoshard.runtime.process_groups import taking_from_a_list


def test_a_graph_that_takes_a_list_frees_each_input_after_its_last_use() -> None:
    """An input that is taken from the caller's list is freed after its last use within the graph."""
    alive: list[bool] = []
    kept: list[weakref.ref[torch.Tensor]] = []

    def note(value: torch.Tensor) -> torch.Tensor:
        alive.append(kept[0]() is not None)
        return value

    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    total = graph.call_function(torch.add, (first, second))
    early = graph.call_function(note, (second,))
    late = graph.call_function(note, (graph.call_function(torch.mul, (total, early)),))
    graph.output((late,))
    run = taking_from_a_list(fx.GraphModule(torch.nn.Module(), graph))

    values = [torch.full((3,), 5.0), torch.full((3,), 2.0)]  # the last first
    kept.append(weakref.ref(values[1]))
    (result,) = run(values)
    assert values == []
    assert torch.equal(result, torch.full((3,), 35.0))
    assert alive == [False, False]
