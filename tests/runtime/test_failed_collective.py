"""`failed_collective` describes the collective in which an error was raised."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autoshard.runtime.failed_collective import failed_collective


def fail(value: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(f"gloo: timed out at {value.shape}")


def failing_graph() -> fx.GraphModule:
    """Return a graph whose only call, an all-reduce, raises."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    started = graph.call_function(fail, (value,), name="all_reduce")
    started.meta |= {"collective": "all_reduce", "group": "data", "module": "up", "source": "model.py:3 in forward"}
    graph.output(started)
    return fx.GraphModule({}, graph)


def error_of(module: fx.GraphModule) -> RuntimeError:
    with pytest.raises(RuntimeError) as found:
        module(torch.ones(2))
    return found.value


def test_the_failing_node_is_named() -> None:
    """The description has the collective, its mesh axis, module and source line."""
    module = failing_graph()
    words = failed_collective(error_of(module), module.graph)
    assert words == "in the all-reduce over 'data' of up (model.py:3 in forward)"


def test_an_error_of_other_code() -> None:
    """The description of an error that was not raised in the graph's code is empty."""
    error = error_of(failing_graph())
    assert failed_collective(ValueError(), failing_graph().graph) == ""
    assert failed_collective(error, fx.Graph()) == ""
