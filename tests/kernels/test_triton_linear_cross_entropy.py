"""Cross-entropy in chunks of the classes equals its forms in float64, and never holds all logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.errors import KernelError
from autoshard.kernels import triton_linear_cross_entropy
from autoshard.kernels.kernel import Form
from autoshard.kernels.library import implementation_of
from autoshard.kernels.triton_linear_cross_entropy import FUSED, linear_cross_entropy, linear_cross_entropy_backward
from tests.kernels.fused import DEVICE, assert_results, draw, dtypes, wide

pytestmark = pytest.mark.usefixtures("_poisoned_outputs", "_small_chunks")
BACKWARD, FORWARD = FUSED
IGNORE = -100
# The forms of hidden [N, K], and of [B, S, K]; as it is, and with logits made float32.
ROWS, WIDE_ROWS, SEQUENCE, WIDE_SEQUENCE = (2, 3, 0, 1)


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> object:
    """Chunks of 16 classes, so that tiny layers have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_linear_cross_entropy, "LEAST_CLASSES", 16)
        yield


def _case(lead: Sequence[int], classes: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, and targets, some of them ignored."""
    rows = torch.Size(lead).numel()
    target = torch.randint(0, classes, (rows,), device=DEVICE)
    target[::5] = IGNORE
    return draw(*lead, depth, dtype=dtype), draw(classes, depth, dtype=dtype), target


def _check(hidden: Tensor, weight: Tensor, target: Tensor, smoothing: float) -> None:
    """Loss, log-sum-exp and both gradients equal torch's in float64."""
    dtype = hidden.dtype
    loss, lse = linear_cross_entropy(hidden, weight, target, IGNORE, smoothing)
    grad_loss = draw(len(target))
    actual = linear_cross_entropy_backward(grad_loss, hidden, weight, target, lse, IGNORE, smoothing)
    leaves = [hidden.flatten(0, -2).double().requires_grad_(), weight.double().requires_grad_()]
    logits = leaves[0] @ leaves[1].t()
    expected = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    grads = torch.autograd.grad(expected, leaves, grad_loss.double())
    # Logits are rounded to dtype, which moves a loss by what it moves a logit.
    eps = torch.finfo(dtype).eps * max(1.0, float(logits.detach().abs().max()))
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=0, atol=4 * eps + 1e-5)
    torch.testing.assert_close(lse.double(), logits.detach().logsumexp(1), rtol=0, atol=4 * eps + 1e-5)
    for result, wanted in zip(actual, grads, strict=True):
        assert result.dtype == dtype
        scale = float(wanted.abs().max())
        torch.testing.assert_close(result.double(), wanted, rtol=0, atol=16 * eps * scale + 1e-5)


@settings(max_examples=20)
@given(st.integers(1, 19), st.integers(17, 75), st.integers(1, 16), dtypes, st.sampled_from([0.0, 0.1]), st.booleans())
def test_equals_torch(
    rows: int, classes: int, depth: int, dtype: torch.dtype, smoothing: float, has_sequence: bool
) -> None:
    """Results equal torch's at odd sizes, in several chunks with a short last chunk, and with targets in any chunk."""
    torch.manual_seed(0)
    _check(*_case((2, rows) if has_sequence else (rows,), classes, depth, dtype), smoothing)


def _results(form: Form, like: Tensor, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The results of a form in float64, with the logits in float64 also where the form makes them float32."""
    variables = {name: wide(value) for name, value in arguments.items()}
    variables |= {name: compute(arguments) for name, compute in form.derived_variables.items()}
    return tuple(x.double() for x in form.results(like.double(), variables))


@pytest.mark.parametrize("form", [ROWS, WIDE_ROWS, SEQUENCE, WIDE_SEQUENCE])
def test_forms(form: int) -> None:
    """The kernel's results equal those of each form, forward and backward."""
    torch.manual_seed(0)
    lead = (2, 3) if form in (SEQUENCE, WIDE_SEQUENCE) else (6,)
    hidden, weight, target = _case(lead, 40, 5, torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "target": target, "ignore_index": IGNORE, "label_smoothing": 0.1}
    actual = linear_cross_entropy(*arguments.values())
    assert_results(actual, _results(FORWARD.forms[form], actual[0], arguments), torch.float32, scale=16)
    arguments |= {"grad_loss": draw(6), "lse": actual[1]}
    grads = linear_cross_entropy_backward(**arguments)
    assert_results(grads, _results(BACKWARD.forms[form], grads[0], arguments), torch.float32, scale=16)


def test_strided_operands() -> None:
    """Hidden states and weights that are not row-major give torch's results. An expanded gradient gives the
    results of a contiguous one."""
    torch.manual_seed(0)
    hidden, weight, target = _case((2, 7), 50, 6, torch.float32)
    _check(hidden.transpose(0, 1).contiguous().transpose(0, 1), weight.t().contiguous().t(), target, 0.0)
    _, lse = linear_cross_entropy(hidden, weight, target, IGNORE, 0.0)
    whole = linear_cross_entropy_backward(torch.ones(14, device=DEVICE), hidden, weight, target, lse, IGNORE, 0.0)
    expanded = linear_cross_entropy_backward(
        torch.ones((), device=DEVICE).expand(14), hidden, weight, target, lse, IGNORE, 0.0
    )
    assert all(torch.equal(*pair) for pair in zip(whole, expanded, strict=True))


def test_a_target_that_is_no_class_gives_nan() -> None:
    """A target that is no class has the loss NaN and the gradient NaN."""
    hidden, weight, _ = _case((3,), 33, 4, torch.float32)
    target = torch.tensor([1, 33, -1], device=DEVICE)
    loss, lse = linear_cross_entropy(hidden, weight, target, IGNORE, 0.0)
    assert loss.isnan().tolist() == [False, True, True]
    grad, _ = linear_cross_entropy_backward(torch.ones(3, device=DEVICE), hidden, weight, target, lse, IGNORE, 0.0)
    assert grad.isnan().all(1).tolist() == [False, True, True]


class _Largest(TorchDispatchMode):
    """Records the bytes of the largest storage of any result."""

    memory_bytes = 0

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        result = func(*args, **(kwargs or {}))  # type: ignore[operator, misc]
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.memory_bytes = max(self.memory_bytes, tensor.untyped_storage().nbytes())
        return result


def test_the_logits_are_never_held() -> None:
    """The largest tensor that forward and backward make has the size of one chunk's logits."""
    hidden, weight, target = _case((300,), 160, 4, torch.float32)
    with _Largest() as largest:
        _, lse = implementation_of(linear_cross_entropy)(hidden, weight, target, IGNORE, 0.0)
        arguments = (torch.ones(300, device=DEVICE), hidden, weight, target, lse, IGNORE, 0.0)
        implementation_of(linear_cross_entropy_backward)(*arguments)
    assert largest.memory_bytes == 300 * 16 * 4


def test_what_gains_nothing_or_does_not_fit_is_refused() -> None:
    """A single chunk, a missing target, and mixed dtypes are refused."""
    hidden, weight, target = _case((3,), 16, 4, torch.float32)
    with pytest.raises(KernelError, match="all 16 classes fit into one chunk"):
        linear_cross_entropy(hidden, weight, target, IGNORE, 0.0)
    with pytest.raises(KernelError, match="one target"):
        linear_cross_entropy(hidden, weight, target[:2], IGNORE, 0.0)
    with pytest.raises(KernelError, match="one dtype"):
        linear_cross_entropy(hidden.half(), weight, target, IGNORE, 0.0)
