"""Muon's three operators together equal torch's Muon, and matrices of a batch are orthogonalised independently."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.ir.update import NewtonSchulz
from autoshard.kernels.newton_schulz import muon_direction, orthogonalise
from autoshard.kernels.optimizers import IN_PLACE, MANY, muon_update

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.8}
HYPER = torch.tensor([*OPTIONS.values()], dtype=torch.float64)
COEFFICIENTS = [3.4445, -4.7750, 2.0315]
SHAPES = {"wide": (5, 9), "tall": (12, 4), "square": (6, 6)}


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _step(parameter: Tensor, grad: Tensor, buffer: Tensor, scale: Tensor | None, rule: NewtonSchulz) -> list[Tensor]:
    direction = muon_direction(grad, buffer, scale, HYPER, rule.nesterov)
    whole = orthogonalise(direction, list(rule.coefficients), rule.steps, rule.eps)
    return list(muon_update(parameter, grad, buffer, whole, scale, HYPER, rule.ratio(*parameter.shape)))


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(
    ("dtype", "nesterov"),
    [*product((torch.float64, torch.float32), (False, True)), (torch.bfloat16, True)],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_three_operators_are_torchs_own_muon(
    shape: tuple[int, int], dtype: torch.dtype, nesterov: bool, adjust: str, scale: float | None
) -> None:
    """Parameter and momentum after three steps equal those of torch.optim.Muon, and the operands do not change."""
    rule = NewtonSchulz((3.4445, -4.7750, 2.0315), 5, 1e-7, adjust, nesterov)
    parameter, buffer = _values(shape, dtype), torch.zeros(shape, dtype=dtype)
    reference = nn.Parameter(parameter.clone())
    optimizer = torch.optim.Muon([reference], nesterov=nesterov, adjust_lr_fn=adjust, **OPTIONS)
    factor = None if scale is None else torch.tensor(scale)
    for number in range(STEPS):
        grad = _values(shape, dtype, 1 + number)
        before = [parameter.clone(), buffer.clone()]
        found = _step(parameter, grad, buffer, factor, rule)
        assert torch.equal(parameter, before[0])
        assert torch.equal(buffer, before[1])
        parameter, buffer = found
        reference.grad = grad if scale is None else grad * scale
        optimizer.step()
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(parameter, reference.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(buffer, optimizer.state[reference]["momentum_buffer"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matrices_of_a_batch_are_independent(shape: tuple[int, int]) -> None:
    """A matrix has the same result bit for bit alone and in a batch, and a matrix of zeros stays zero."""
    matrices = torch.stack(
        [_values(shape, torch.bfloat16, seed) for seed in range(3)] + [torch.zeros(shape).bfloat16()]
    )
    found = orthogonalise(matrices, COEFFICIENTS, 5, 1e-7)
    for matrix, result in zip(matrices, found, strict=True):
        assert torch.equal(orthogonalise(matrix, COEFFICIENTS, 5, 1e-7), result)
    assert not found[3].any()


def test_singular_values_become_about_one() -> None:
    """Five steps bring every singular value of a random matrix between 0.4 and 1.4."""
    values = torch.linalg.svdvals(orthogonalise(_values((8, 32), torch.bfloat16), COEFFICIENTS, 5, 1e-7).float())
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_updates_in_place_write_the_same_bits() -> None:
    """In place, for one parameter or for a list, the results equal the functional operator's bit for bit."""
    shape = SHAPES["wide"]
    parameter, grad, buffer, whole = (_values(shape, torch.float32, seed) for seed in range(4))
    expected = muon_update(parameter, grad, buffer, whole, None, HYPER, 1.5)
    alone, many = (parameter.clone(), buffer.clone()), (parameter.clone(), buffer.clone())
    IN_PLACE[muon_update](alone[0], grad, alone[1], whole, None, HYPER, 1.5)
    MANY[IN_PLACE[muon_update]]([many[0]], [grad], [many[1]], [whole], None, HYPER, 1.5)
    for found in (alone, many):
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
