"""Operators outside of the cost models are refused with the place to extend."""

from __future__ import annotations

import pytest

from cost_models.errors import UnknownOperatorError
from cost_models.operators import work
from cost_models.work import TensorInfo

VALUE = TensorInfo((4,), 4, "f32")


@pytest.mark.parametrize("name", ["_c10d_functional.broadcast.default", "_dtensor.shard_dim_alltoall.default"])
def test_a_collective_is_no_operator(name: str) -> None:
    """A collective as an operator is refused, and the error names the module of collectives."""
    with pytest.raises(UnknownOperatorError, match=rf"'{name}'.*cost_models\.collectives"):
        work(name, [VALUE], [VALUE])
