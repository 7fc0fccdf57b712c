"""Attention on torch's fused kernels equals its definition, in memory that grows linearly with the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.kernels import native_attention as module
from autoshard.kernels.attention import (
    attention_backward_reference,
    attention_reference,
    fake_attention,
    fake_attention_backward,
)
from autoshard.kernels.native_attention import native_attention, native_attention_backward
from tests.kernels.observed import Observed

SEED = torch.tensor(5)
EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of attention: heads in groups, masks of all broadcasts, causal shards of a sequence, and dropout."""
    batch, groups, shared, head = (draw(st.integers(1, most)) for most in (2, 2, 2, 5))
    queries, keys = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    value_size = draw(st.sampled_from([head, head + 1]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    heads = groups * shared
    kind = draw(st.sampled_from(["heads", "rows", "packed"]))
    q, k, v = (
        _lying(kind, drawn(batch, heads, queries, head)),
        _lying(kind, drawn(batch, groups, keys, head)),
        _lying(kind, drawn(batch, groups, keys, value_size)),
    )
    shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries, keys)]
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    mask = {"none": None, "bool": drawn(*shape) > -0.5, "float": drawn(*shape)}[kind]
    is_causal, shift = draw(st.booleans()), draw(st.integers(-3, 10))
    offset = [0, 0, max(shift, 0), max(-shift, 0)]
    dropout_p = draw(st.sampled_from([0.0, 0.0, 0.4]))
    whole = [batch, heads, queries + offset[2], keys + offset[3]]
    return q, k, v, mask, SEED, dropout_p, is_causal, 0.4, 3, offset, whole


def _lying(kind: str, x: Tensor) -> Tensor:
    """x [B, H, S, D] as it lies, or stored as [B, S, H, D], or stored as a third of longer rows."""
    if kind == "heads":
        return x
    rows = x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return (rows if kind == "rows" else torch.cat([rows] * 3, 2).narrow(2, 0, rows.shape[2])).transpose(1, 2)


@given(calls(), st.sampled_from([1 << 22, 8]))
def test_equals_the_definition(arguments: tuple[Any, ...], block_elements: int) -> None:
    """Output, log-sum-exp and gradients equal the definition's, with all queries at once or in blocks
    of few queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_ELEMENTS", block_elements)
        found = native_attention(*arguments)
        expected = attention_reference(*arguments)
        _assert_close(found, expected, arguments[0].dtype)
        grad_out = torch.randn_like(expected[0])
        q, k, v, mask, *rest = arguments
        given_backward = (grad_out, q, k, v, mask, *expected, *rest)
        gradients = native_attention_backward(*given_backward)
    _assert_close(gradients, attention_backward_reference(*given_backward), q.dtype)


@given(calls(), st.sampled_from([1 << 22, 8]))
def test_lies_as_fakes_say(arguments: tuple[Any, ...], block_elements: int) -> None:
    """Results and gradients of the kernels, and those of the definition, have the strides of the fake tensors."""
    q, k, v, mask, *rest = arguments
    for forward, backward in (
        (native_attention, native_attention_backward),
        (attention_reference, attention_backward_reference),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_BLOCK_ELEMENTS", block_elements)
            found = forward(*arguments)
            gradients = backward(torch.randn_like(found[0]), q, k, v, mask, *found, *rest)
        assert _strides(found) == _strides(fake_attention(*arguments))
        assert _strides(gradients) == _strides(fake_attention_backward(found[0], q, k, v))


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_no_queries_or_no_keys(queries: int, keys: int, is_masked: bool) -> None:
    """Without queries or keys the output and the gradients are zeros, although torch's kernel for CPUs would divide by
    zero."""
    q, k = torch.randn(1, 2, queries, 4), torch.randn(1, 2, keys, 4)
    mask = torch.zeros(1, 1, queries, keys) if is_masked else None
    rest = (None, 0.0, False, 0.5, 0, [0] * 4, [1, 2, queries, keys])
    out, lse = native_attention(q, k, k, mask, *rest)
    assert torch.equal(out, torch.zeros_like(q))
    gradients = native_attention_backward(out, q, k, k, mask, out, lse, *rest)
    assert all(map(torch.equal, gradients, map(torch.zeros_like, (q, k, k))))


def _strides(tensors: tuple[Tensor, ...]) -> list[list[int]]:
    """Strides of the dims that are longer than one."""
    return [
        [step for step, size in zip(item.stride(), item.shape, strict=True) if size > 1 and item.numel()]
        for item in tensors
    ]


def _assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2}[dtype]
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"masked": True}, {"dropout_p": 0.2}, {"shift": 512}])
def test_memory_is_linear(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from the mask, no tensor of forward and backward has as many elements as there are scores."""
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 1 << 14)
    size, shift = 1024, options.get("shift", 0)
    q, k, v = torch.randn(3, 1, 2, size, 8).unbind()
    mask = torch.rand(1, 1, size, size) > 0.1 if options.get("masked") else None
    constants = (SEED, options.get("dropout_p", 0.0), True, 0.3, 0, [0, 0, shift, 0], [1, 2, size + shift, size])
    with Observed(mask) as mode:
        out, lse = native_attention(q, k, v, mask, *constants)
        native_attention_backward(torch.ones_like(out), q, k, v, mask, out, lse, *constants)
    assert mode.elements <= 4 * size * 2 * 8 + (1 << 14)


class _Strides(TorchDispatchMode):
    """Records the strides of chosen operands in each call of an operator."""

    def __init__(self, operator: Any, *places: int) -> None:
        super().__init__()
        self._operator, self._places = operator, places
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._operator:
            self.found.append(tuple(args[place].stride() for place in self._places))
        return func(*args, **(kwargs or {}))


CUDA_KERNELS = [
    (torch.bfloat16, {}, "flash"),
    (torch.float16, {}, "flash"),
    (torch.bfloat16, {"keys": 48}, "efficient"),
    (torch.bfloat16, {"shift": 32}, "flash"),
    (torch.float32, {}, "efficient"),
    (torch.bfloat16, {"masked": True}, "efficient"),
    (torch.bfloat16, {"head": 512}, "efficient"),
    (torch.bfloat16, {"prefers": True}, "cudnn"),
    (torch.float16, {"prefers": True, "shift": 32}, "cudnn"),
    (torch.bfloat16, {"prefers": True, "head": 256}, "flash"),
    (torch.float32, {"prefers": True}, "efficient"),
]


@pytest.mark.parametrize("kind", ["heads", "rows", "packed"])
@pytest.mark.parametrize(("dtype", "options", "kernel"), CUDA_KERNELS)
def test_kernels_on_cuda(
    dtype: torch.dtype, options: dict[str, Any], kernel: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake CUDA tensors, the expected kernel of torch runs, and results have the strides that the trace assumes."""
    monkeypatch.setattr(module, "_prefers_cudnn", lambda device: options.get("prefers", False))
    size, head, shift = 64, options.get("head", 32), options.get("shift", 0)
    keys = options.get("keys", size)
    with FakeTensorMode() as fakes:

        def on_cuda(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return FakeTensor(fakes, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda"))

        by_heads = (on_cuda(2, heads, rows, head) for heads, rows in ((4, size), (2, keys), (2, keys)))
        q, k, v = (_lying(kind, x) for x in by_heads)
        mask = on_cuda(2, 1, size, size, dtype=torch.bool) if options.get("masked") else None
        constants = (None, 0.0, True, 0.3, 0, [0, 0, shift, 0], [2, 4, size + shift, size])
        with Observed() as mode, _Strides(EFFICIENT_BACKWARD, 5) as results:
            out, lse = native_attention(q, k, v, mask, *constants)
            assert (out.shape, lse.shape) == ((2, 4, size, head), (2, 4, size))
            gradients = native_attention_backward(torch.empty_like(out), q, k, v, mask, out, lse, *constants)
        made = fake_attention(q, k, v, mask, *constants)
        assert _strides((out, lse)) == _strides(made)
        assert _strides(gradients) == _strides(fake_attention_backward(out, q, k, v))
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]
    assert {result[2] for (result,) in results.found} <= {4 * head}
    name = f"_scaled_dot_product_{kernel}_attention"
    assert {name, f"{name}_backward"} <= mode.operators
    assert not mode.operators & {"bmm", "matmul", "_softmax", "_local_scalar_dense"}


@pytest.mark.parametrize("kind", ["heads", "rows", "packed"])
def test_cudnn_reads_results_that_always_lie_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's backward gets results and their gradients in one layout, whichever layouts the caller's have."""
    monkeypatch.setattr(module, "_prefers_cudnn", lambda device: True)
    constants = (None, 0.0, True, 0.3, 0, [0, 0, 0, 0], [2, 4, 16, 16])
    with FakeTensorMode() as fakes:
        wide = FakeTensor(fakes, torch.empty((2, 4, 16, 32), dtype=torch.bfloat16, device="meta"), torch.device("cuda"))
        q = _lying(kind, wide)
        with _Strides(CUDNN_BACKWARD, 0, 4) as given:
            out, lse = native_attention(q, q, q, None, *constants)
            for one in ("heads", "rows", "packed"):
                for other in ("heads", "rows", "packed"):
                    results = (_lying(one, wide), q, q, q, None, _lying(other, wide), lse)
                    native_attention_backward(*results, *constants)
        assert set(given.found) == {(out.stride(), out.stride())}


@pytest.mark.gpu
@pytest.mark.parametrize("order", [("heads", "rows"), ("rows", "heads"), ("packed", "heads")])
@pytest.mark.parametrize("size", [8, 160])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_of_any_layout_on_a_gpu(dtype: torch.dtype, size: int, order: tuple[str, str]) -> None:
    """Gradients of the same q, k and v are within 3 % of the definition's norm for any layout of the result and
    its gradient."""
    torch.manual_seed(0)
    heads = 2 + ["heads", "rows", "packed"].index(order[0])  # shapes that no other call of the process had
    q, k, v, grad = (_lying("rows", torch.randn(3, heads, size, 8, device="cuda").to(dtype)) for _ in range(4))
    constants = (None, 0.0, True, 0.35, 0, [0, 0, 0, 0], [3, heads, size, size])
    out, lse = native_attention(q, k, v, None, *constants)
    wide = (q.double(), k.double(), v.double())
    expected = attention_backward_reference(grad.double(), *wide, None, out.double(), lse.double(), *constants)
    for kind in order:
        given = (_lying(kind, grad.contiguous()), q, k, v, None, _lying(kind, out.contiguous()), lse)
        for mine, theirs in zip(native_attention_backward(*given, *constants), expected, strict=True):
            assert (mine.double() - theirs).norm() <= 3e-2 * theirs.norm(), kind


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["heads", "rows", "packed"])
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize(("shift", "is_causal", "masked"), [(0, True, False), (0, False, False), (96, True, False),
                                                           (-32, True, False), (0, False, True)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype: torch.dtype, shift: int, is_causal: bool, masked: bool, head: int, kind: str) -> None:
    """For each kernel of torch, results and gradients differ from the definition in float64 by at most
    3 % of the norm."""
    torch.manual_seed(0)
    queries, keys = 160, 160 + max(shift, 0)
    q, k, v, grad = (
        _lying(kind, torch.randn(2, heads, rows, head, device="cuda").to(dtype))
        for heads, rows in ((4, queries), (2, keys), (2, keys), (4, queries))
    )
    mask = torch.rand(2, 1, queries, keys, device="cuda") > 0.3 if masked else None
    offset = [0, 0, max(shift, 0), max(-shift, 0)]
    constants = (None, 0.0, is_causal, head**-0.5, 0, offset, [2, 4, queries + offset[2], keys + offset[3]])
    out, lse = native_attention(q, k, v, mask, *constants)
    found = (out, lse, *native_attention_backward(grad, q, k, v, mask, out, lse, *constants))
    wide = (q.double(), k.double(), v.double())
    expected, norm = attention_reference(*wide, mask, *constants)
    gradients = attention_backward_reference(grad.double(), *wide, mask, expected, norm, *constants)
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-3  # of float32, products on tensor cores
    for name, mine, theirs in zip(("out", "lse", "dq", "dk", "dv"), found, (expected, norm, *gradients), strict=True):
        finite = theirs.isfinite()
        assert torch.equal(finite, mine.isfinite()), name
        error = (mine.double() - theirs)[finite].norm() / theirs[finite].norm()
        assert error <= bound, (name, float(error))
