"""Updates of optimizers are split like their parameters, along any dim."""

from __future__ import annotations

import pytest
import torch

from autoshard.ir.mesh import Mesh
from autoshard.rules import strategies
from tests.rules.recording import check_call, check_splits

ops = torch.ops.autoshard
MESHES = (Mesh({"a": 2}), Mesh({"a": 4}), Mesh({"a": 2, "b": 2}))
SGD = torch.tensor([0.1, 0.05, 0.9, 0.2, 0.0], dtype=torch.float64)
ADAM = torch.tensor([0.02, 0.8, 0.95, 1e-6, 0.1, 3.0], dtype=torch.float64)
CASES = {
    "sgd": (ops.sgd_update.default, 0, SGD, (False,)),
    "momentum": (ops.momentum_update.default, 1, SGD, (True, False)),
    "adam": (ops.adam_update.default, 2, ADAM, (True, False)),
    "amsgrad": (ops.amsgrad_update.default, 3, ADAM, (False, True)),
}


@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (4,), ()], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_pieces_are_updated_apart(case: str, scaled: bool, shape: tuple[int, ...]) -> None:
    """Under every strategy, updates equal one device's, on even and uneven shapes and on scalars."""
    operator, states, hyper, flags = CASES[case]
    tensors = [torch.rand(shape, dtype=torch.float64) + 0.5 for _ in range(2 + states)]
    scale = torch.tensor(0.5, dtype=torch.float64) if scaled else None
    check = check_splits if shape else check_call
    check(operator, *tensors, scale, hyper, *flags, meshes=MESHES)


def test_gradients_are_whole_or_split_never_pending() -> None:
    """Adam's gradient, parameter and state are all whole or split along one dim, and never pending sums."""
    operator, states, hyper, flags = CASES["adam"]
    tensors = [torch.empty(8, 6, device="meta") for _ in range(2 + states)]
    found = strategies(operator, (*tensors, None, hyper, *flags), {}, 2)
    placements = {(str(inputs[0]), str(inputs[1]), str(outputs[2])) for inputs, outputs in found}
    assert placements == {("R", "R", "R"), ("S(0)", "S(0)", "S(0)"), ("S(1)", "S(1)", "S(1)")}


@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (4,)], ids=str)
def test_squares_of_pieces_add_up(shape: tuple[int, ...]) -> None:
    """Under every strategy, the sum of squares of a gradient equals one device's."""
    check_splits(ops.sum_of_squares.default, torch.randn(shape, dtype=torch.float64), meshes=MESHES)


@pytest.mark.parametrize("scaled", [False, True])
def test_muon_is_elementwise_but_for_its_orthogonalisation(scaled: bool) -> None:
    """Under every strategy, Muon's direction and update of a matrix equal one device's."""
    values = [torch.rand(8, 6) + 0.5 for _ in range(4)]
    scale = torch.tensor(0.5) if scaled else None
    hyper = torch.tensor([0.1, 0.05, 0.9], dtype=torch.float64)
    check_splits(ops.muon_direction.default, *values[:2], scale, hyper, True, meshes=MESHES)
    check_splits(ops.muon_update.default, *values, scale, hyper, 1.5, meshes=MESHES)


def test_ranks_share_whole_matrices() -> None:
    """Orthogonalisation splits a batch of matrices only along the batch, and a single matrix not at all."""
    options = ([3.4445, -4.7750, 2.0315], 5, 1e-7)
    batch = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    check_splits(ops.orthogonalise.default, batch, *options, meshes=MESHES)
    for xs, placements in ((batch, {"R", "S(0)"}), (batch[0], {"R"})):
        found = strategies(ops.orthogonalise.default, (xs, *options), {}, 2)
        assert {str(inputs[0]) for inputs, _ in found} == placements
