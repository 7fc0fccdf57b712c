"""Optimizer updates as operators equal torch's own optimizers, in new tensors or in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.kernels import optimizers as module
from autoshard.kernels.optimizers import IN_PLACE, MANY, sum_of_squares
from autoshard.kernels.optimizers import adam_update as adam
from autoshard.kernels.optimizers import amsgrad_update as amsgrad
from autoshard.kernels.optimizers import momentum_update as momentum
from autoshard.kernels.optimizers import sgd_update as sgd

STEPS = 4
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SGD = {"lr": 0.1, "weight_decay": 0.05, "momentum": 0.0, "dampening": 0.0}
ADAM = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def _sgd_hyper(options: dict[str, Any], step: int) -> Tensor:
    names = ("lr", "weight_decay", "momentum", "dampening")
    return torch.tensor([*(options[name] for name in names), float(step == 0)], dtype=torch.float64)


def _adam_hyper(options: dict[str, Any], step: int) -> Tensor:
    values = [options["lr"], *options["betas"], options["eps"], options["weight_decay"], step]
    return torch.tensor(values, dtype=torch.float64)


CASES = {
    "sgd": (torch.optim.SGD, SGD, sgd, _sgd_hyper, 0, (False,)),
    "sgd, ascending": (torch.optim.SGD, {**SGD, "maximize": True}, sgd, _sgd_hyper, 0, (True,)),
    "momentum": (
        torch.optim.SGD, {**SGD, "momentum": 0.9, "dampening": 0.3}, momentum, _sgd_hyper, 1, (False, False),
    ),
    "nesterov": (
        torch.optim.SGD, {**SGD, "momentum": 0.9, "nesterov": True}, momentum, _sgd_hyper, 1, (True, False),
    ),
    "adam": (torch.optim.Adam, ADAM, adam, _adam_hyper, 2, (False, False)),
    "adamw": (torch.optim.AdamW, ADAM, adam, _adam_hyper, 2, (True, False)),
    "adamw, ascending": (torch.optim.AdamW, {**ADAM, "maximize": True}, adam, _adam_hyper, 2, (True, True)),
    "amsgrad": (torch.optim.AdamW, {**ADAM, "amsgrad": True}, amsgrad, _adam_hyper, 3, (True, False)),
}  # fmt: skip


def _gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype) for _ in range(STEPS)]


def _expected(case: str, dtype: torch.dtype, scale: float) -> tuple[Tensor, list[Tensor]]:
    """Parameter and state after some steps of torch's optimizer."""
    kind, options, *_ = CASES[case]
    parameter = nn.Parameter(torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3).to(dtype))
    optimizer = kind([parameter], foreach=False, **options)
    for grad in _gradients(dtype):
        parameter.grad = grad * scale
        optimizer.step()
    return parameter.detach(), [item for name, item in optimizer.state[parameter].items() if name != "step"]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_an_update_is_torchs_own(case: str, dtype: torch.dtype, scale: float | None) -> None:
    """Parameter and state after four steps equal those of torch's optimizer, and the operands do not change."""
    _, options, operator, hyper, states, flags = CASES[case]
    values = [torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3).to(dtype)]
    values += [torch.zeros(5, 3, dtype=dtype) for _ in range(states)]
    factor = None if scale is None else torch.tensor(scale, dtype=dtype)
    for step, grad in enumerate(_gradients(dtype)):
        before = [value.clone() for value in values]
        found = operator(values[0], grad, *values[1:], factor, hyper(options, step), *flags)
        assert all(torch.equal(value, kept) for value, kept in zip(values, before, strict=True))
        values = [found] if isinstance(found, Tensor) else list(found)
    parameter, state = _expected(case, dtype, 1.0 if factor is None else float(factor))
    tolerance = 8 * torch.finfo(dtype).eps  # the fused kernels round otherwise
    for value, reference in zip(values, [parameter, *state], strict=False):
        torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_long_updates_of_narrow_types_are_exact_but_for_rounding(case: str, dtype: torch.dtype) -> None:
    """A step of 67 elements in a 16-bit type equals float64's to a few roundings, and to one rounding for Adam."""
    _, options, operator, hyper, states, flags = CASES[case]
    values = [torch.linspace(start, 1, 67).to(dtype) for start in (-1, 0.5, *(0.25 for _ in range(states)))]
    found = operator(*values, None, hyper(options, 2), *flags)
    exact = operator(*(value.double() for value in values), None, hyper(options, 2), *flags)
    found, exact = ([item] if isinstance(item, Tensor) else list(item) for item in (found, exact))
    eps = torch.finfo(dtype).eps
    rtol, atol = (0.505 * eps, 1e-6) if operator in (adam, amsgrad) else (4 * eps, 4 * eps)
    for value, reference in zip(found, exact, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_the_twin_writes_over_its_operands(case: str) -> None:
    """The operator in place writes the functional operator's results bit for bit, also when the gradient lies by
    columns."""
    _, options, operator, hyper, states, flags = CASES[case]
    grad = _gradients(torch.float32)[0].t().contiguous().t()
    values = [torch.linspace(-1, 1, 15).view(5, 3), *(torch.full((5, 3), 0.25) for _ in range(states))]
    expected = operator(values[0], grad, *values[1:], None, hyper(options, 2), *flags)
    plain = operator(values[0], grad.contiguous(), *values[1:], None, hyper(options, 2), *flags)
    IN_PLACE[operator](values[0], grad, *values[1:], None, hyper(options, 2), *flags)
    expected, plain = ([item] if isinstance(item, Tensor) else list(item) for item in (expected, plain))
    for value, reference, other in zip(values, expected, plain, strict=True):
        assert torch.equal(value, reference)
        assert torch.equal(other, reference)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_many_are_updated_in_a_call(
    case: str, scale: float | None, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many parameters is updated as if alone, whether torch's fused kernels take it or not. Updates are
    equal bit for bit, and within 1e-6 in a transposed layout."""
    monkeypatch.setattr(module, "_SCALED_AT_ONCE", 100)
    calls = _recorded(monkeypatch)
    _, options, operator, hyper, states, flags = CASES[case]
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
    values = [[torch.linspace(-1, 1, 15).view(5, 3).to(kind) for kind in kinds]]
    values += [[torch.full((5, 3), 0.0 if first else 0.25, dtype=kind) for kind in kinds] for _ in range(states)]
    for group in values:
        group[3] = group[3].t().contiguous().t()
    grads = [_gradients(kind)[index] for index, kind in enumerate(kinds)]
    factor = None if scale is None else torch.tensor(scale)
    rest = (factor, hyper(options, 0 if first else 2), *flags)
    expected = [operator(values[0][i], grads[i], *(group[i] for group in values[1:]), *rest) for i in range(4)]
    kept = [[tensor.data_ptr() for tensor in group] for group in values]
    calls.clear()
    MANY[IN_PLACE[operator]](values[0], grads, *values[1:], *rest)
    assert [[tensor.data_ptr() for tensor in group] for group in values] == kept
    for index, results in enumerate(expected):
        results = [results] if isinstance(results, Tensor) else results
        tolerance = 0.0 if index < 3 else 1e-6  # the one that does not lie in order is not fused
        for group, result in zip(values, results, strict=True):
            torch.testing.assert_close(group[index], result, rtol=tolerance, atol=tolerance)
    if first and operator is momentum:
        assert not any(fused for fused, _ in calls)
    else:
        taken = 3 if operator in (adam, amsgrad) else 2  # those in order; SGD of bfloat16 is not fused
        assert sum(count for fused, count in calls if fused) == taken
    assert sum(count for _, count in calls) == 4
    assert len(calls) <= 2 if scale is None else len(calls) > 2


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Records the later calls of torch's functions: whether each is fused, and how many parameters it has."""
    calls: list[tuple[bool, int]] = []
    for name in ("run_sgd", "run_adam"):
        own = getattr(module, name)

        def run(params: list[Tensor], *args: Any, own: Any = own, **options: Any) -> None:
            calls.append((options["fused"], len(params)))
            own(params, *args, **options)

        monkeypatch.setattr(module, name, run)
    return calls


@pytest.mark.parametrize("case", CASES)
def test_shapes_are_known_without_values(case: str) -> None:
    """Torch's checks of schema and fake tensors pass."""
    _, options, operator, hyper, states, flags = CASES[case]
    operands = [torch.randn(5, 3) for _ in range(2 + states)]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, (*operands, None, hyper(options, 1), *flags), test_utils=tests)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_are_summed_wide(dtype: torch.dtype) -> None:
    """The sum of squares of types narrower than float32 is computed and returned in float32."""
    x = torch.full((3, 100), 300.0, dtype=dtype)
    found = sum_of_squares(x)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.item() == pytest.approx(300 * float(x[0, 0]) ** 2, rel=1e-6)
    torch.library.opcheck(sum_of_squares, (x,), test_utils=("test_schema", "test_faketensor"))
