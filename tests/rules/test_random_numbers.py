"""Ranks draw their pieces of the random tensor that one device draws."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.mesh import Mesh
from autoshard.kernels.random_numbers import DISTRIBUTIONS
from tests.kernels.test_random_numbers import PARAMETERS
from tests.rules.recording import MESH_PAIRS, check_splits

ops = torch.ops.autoshard
_SEED = torch.tensor(11)
_SHAPES = st.lists(st.sampled_from([1, 2, 4, 5, 8]), min_size=1, max_size=3).filter(lambda shape: max(shape) > 1)


@given(_SHAPES, MESH_PAIRS)
def test_dropout(shape: list[int], pair: Sequence[Mesh]) -> None:
    """Under every strategy, dropout equals one device's, with pieces of the whole mask."""
    x = torch.randn(*shape, dtype=torch.float64)
    check_splits(ops.dropout.default, x, _SEED, 0.5, 2, [0] * len(shape), shape, meshes=pair)


@given(st.sampled_from(sorted(DISTRIBUTIONS)), _SHAPES, MESH_PAIRS)
def test_random(distribution: str, shape: list[int], pair: Sequence[Mesh]) -> None:
    """Under every strategy, each distribution gives one device's numbers, on even and uneven shapes."""
    arguments = (_SEED, distribution, PARAMETERS[distribution], 2, shape, [0] * len(shape), shape)
    check_splits(ops.random.default, *arguments, dtype=torch.float32, meshes=pair)


@pytest.mark.parametrize("operator", [ops.poisson, ops.gamma])
def test_distributions_of_a_tensor(operator: torch._ops.OpOverloadPacket) -> None:
    """Under every strategy, Poisson and gamma draws equal one device's, although they reject numbers."""
    check_splits(operator.default, torch.rand(4, 5) * 20.0, _SEED, 2, [0, 0], [4, 5])


def test_binomial() -> None:
    """Under every strategy, binomial draws equal one device's."""
    count, p = torch.full((4, 5), 30.0), torch.rand(4, 5)
    check_splits(ops.binomial.default, count, p, _SEED, 2, [0, 0], [4, 5])
