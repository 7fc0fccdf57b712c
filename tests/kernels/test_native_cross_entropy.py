"""Cross-entropy on torch's fused softmax equals its definition, and writes no probabilities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from autoshard.kernels import native_cross_entropy as module
from autoshard.kernels.cross_entropy import cross_entropy_backward_reference, cross_entropy_reference
from autoshard.kernels.native_cross_entropy import (
    native_cross_entropy,
    native_cross_entropy_backward,
    native_split_cross_entropy,
    native_split_cross_entropy_backward,
)
from autoshard.kernels.split_cross_entropy import (
    split_cross_entropy_backward_reference,
    split_cross_entropy_reference,
)
from tests.kernels.fused import DEVICE
from tests.kernels.observed import Observed

IGNORE = -100
Case = tuple[Tensor, Tensor, int, float]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Arguments of the loss: logits in any layout, some -inf, and ignored rows with infinities."""
    rows, classes = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    logits = (3 * torch.randn(classes, rows, generator=generator, dtype=torch.float64)).to(dtype).t()
    logits = logits if draw(st.booleans()) else logits.contiguous()
    target = torch.randint(0, classes, (rows,), generator=generator)
    smoothing = draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]))
    if smoothing == 0.0 and classes > 1:
        logits[:, target[0]] = torch.where(target == target[0], logits[:, target[0]], -torch.inf)
    ignored = torch.rand(rows, generator=generator) < 0.25
    target[ignored] = IGNORE
    if draw(st.booleans()):
        logits[ignored] = torch.inf
    return logits, target, IGNORE, smoothing


@given(cases(), st.sampled_from([1 << 18, 8]))
def test_equals_the_definition(case: Case, block: int) -> None:
    """The loss, the log-sum-exp of rows that count, and the gradient equal the definition's, for all rows at once or
    for a few."""
    case = (case[0].to(DEVICE), case[1].to(DEVICE), *case[2:])
    logits, target, ignore_index, smoothing = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CPU_BLOCK", block)
        loss, lse = native_cross_entropy(*case)
        expected, expected_lse = cross_entropy_reference(*case)
        grad = torch.randn_like(loss)
        found = native_cross_entropy_backward(grad, logits, target, lse, ignore_index, smoothing)
    narrow = 2e-6 if DEVICE.type == "cpu" else 1e-5  # exponentials on a GPU are of its own unit
    tolerance = 1e-12 if logits.dtype == torch.float64 else narrow
    is_counted = target != IGNORE
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse[is_counted], expected_lse[is_counted], rtol=tolerance, atol=tolerance)
    gradient = cross_entropy_backward_reference(grad, logits, target, expected_lse, ignore_index, smoothing)
    assert (found.dtype, found.stride()) == (gradient.dtype, gradient.stride())
    tolerance = max(tolerance, 1e-2 if logits.dtype == torch.bfloat16 else 0.0)
    torch.testing.assert_close(found, gradient, rtol=tolerance, atol=tolerance)


@given(cases(), st.integers(1, 3), st.sampled_from([1 << 18, 8]))
def test_parts_of_a_split_vocabulary_equal_their_definition(case: Case, ranks: int, block: int) -> None:
    """Each rank's sum, logit and gradient equal the definition's, and together they give the loss and gradient of all
    classes."""
    logits, target, ignore_index, smoothing = case[0].to(DEVICE), case[1].to(DEVICE), *case[2:]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    allowed = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[logits.dtype]
    tolerance = {"rtol": allowed, "atol": allowed}
    top = logits.amax(1).to(dtype)
    top = top.masked_fill(top.isinf(), 0.0)
    is_ignored, grad = target == ignore_index, torch.randn(len(target), device=DEVICE, dtype=dtype)
    _, lse = cross_entropy_reference(logits, target, ignore_index, smoothing)
    totals, gradients, first = torch.zeros_like(top), [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CPU_BLOCK", block)
        for x in logits.chunk(ranks, 1):
            indices, columns = target - first, x.shape[1]
            elsewhere = (indices < 0) | (indices >= columns)
            indices = indices.masked_fill(elsewhere, 0)
            parts = (x, top, indices, elsewhere, 1.0 - smoothing)
            for found, expected in zip(
                native_split_cross_entropy(*parts), split_cross_entropy_reference(*parts), strict=True
            ):
                torch.testing.assert_close(found[~is_ignored], expected[~is_ignored], **tolerance)
            totals += native_split_cross_entropy(*parts)[0]
            rest = (x, lse, grad, indices, elsewhere, is_ignored, smoothing - 1.0, smoothing / logits.shape[1])
            gradients.append(native_split_cross_entropy_backward(*rest))
            torch.testing.assert_close(gradients[-1], split_cross_entropy_backward_reference(*rest), **tolerance)
            first += columns
    torch.testing.assert_close((totals.log() + top)[~is_ignored], lse[~is_ignored], **tolerance)
    whole = cross_entropy_backward_reference(grad, logits, target, lse, ignore_index, smoothing)
    torch.testing.assert_close(torch.cat(gradients, 1), whole, **tolerance)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="one kernel runs on a GPU")
def test_parts_of_a_split_vocabulary_write_the_gradient_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU no tensor is larger than a block of rows, apart from the gradient."""
    monkeypatch.setattr(module, "_CPU_BLOCK", 1 << 10)
    logits, target = torch.randn(256, 64), torch.randint(0, 64, (256,))
    flags, rows = torch.rand(256) < 0.5, torch.randn(256)
    with Observed(logits, target, flags, rows) as forward:
        native_split_cross_entropy(logits, rows, target, flags, 1.0)
    assert forward.elements <= 1 << 10
    with Observed(logits, target, flags, rows) as backward:
        native_split_cross_entropy_backward(logits, rows, rows, target, flags, flags, -1.0, 0.1)
    assert backward.elements == logits.numel()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="one kernel runs on a GPU")
def test_no_probabilities_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU no tensor is larger than a block of rows, apart from the gradient, so that probabilities are never
    whole."""
    monkeypatch.setattr(module, "_CPU_BLOCK", 1 << 10)
    logits, target = torch.randn(256, 64), torch.randint(0, 64, (256,))
    with Observed(logits, target) as forward:
        _, lse = native_cross_entropy(logits, target, IGNORE, 0.0)
    assert forward.elements <= 1 << 10
    grad = torch.randn(256)
    with Observed(logits, target) as backward:
        native_cross_entropy_backward(grad, logits, target, lse, IGNORE, 0.1)
    assert backward.elements == logits.numel()
    assert {"_log_softmax", "_log_softmax_backward_data.out"} <= forward.operators | backward.operators


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_waits_for_a_device(dtype: torch.dtype) -> None:
    """On fake CUDA tensors, forward and backward each run one kernel, and neither reads a value on the host."""
    with FakeTensorMode() as fakes:

        def on_cuda(*shape: int, dtype: torch.dtype) -> Tensor:
            return FakeTensor(fakes, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda"))

        logits, target = on_cuda(8, 16, dtype=dtype), on_cuda(8, dtype=torch.int64)
        with Observed() as mode:
            loss, lse = native_cross_entropy(logits, target, IGNORE, 0.1)
            gradient = native_cross_entropy_backward(torch.empty_like(loss), logits, target, lse, IGNORE, 0.1)
    assert (loss.dtype, gradient.dtype, gradient.shape) == (torch.float32, dtype, logits.shape)
    assert {"autoshard.triton_cross_entropy", "autoshard.triton_cross_entropy_backward"} <= mode.operators
    assert not mode.operators & {"_local_scalar_dense", "nonzero", "exp"}
