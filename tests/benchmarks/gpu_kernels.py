"""Each kernel beside torch.compile and eager on this machine's GPU: medians, side by side in one process.

    make gpu-bench        (or: python -m tests.benchmarks.gpu_kernels --output results.json)

Each implementation runs on the same inputs, in bfloat16, after a warm-up; the cache of the device is emptied between
runs (`triton.testing.do_bench`). Beside the times stands the bandwidth that ours reaches, as a share of what copying a
tensor reaches on this device. Attention, which arithmetic bounds, is compared with torch's best backend. Forward and
backward are timed apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from triton.testing import do_bench

from autoshard.kernels.quantise import dequantise_sum_reference, quantise_reference
from autoshard.kernels.registry import FUSED
from autoshard.kernels.triton_add_norm import add_layer_norm, add_rms_norm, add_rms_norm_backward
from autoshard.kernels.triton_attention import flash_attention
from autoshard.kernels.triton_attention_backward import flash_attention_backward
from autoshard.kernels.triton_embedding import embedding, embedding_backward
from autoshard.kernels.triton_gated import gated, gated_backward
from autoshard.kernels.triton_gelu import bias_gelu, bias_gelu_backward
from autoshard.kernels.triton_permutation import combine, combine_backward, permute
from autoshard.kernels.triton_quantise import triton_dequantise_sum, triton_quantise
from autoshard.kernels.triton_rotary import rotary

_TOKENS, _HIDDEN, _INNER, _HEADS, _SIZE = 8192, 4096, 14336, 32, 128
_VOCABULARY = 128256
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Args:
        name: kernel and shape.
        ours, plain: the kernel, and the same in ordinary operators; no arguments.
        moved_bytes: what has to be read and written; 0 where arithmetic bounds.
    """

    name: str
    ours: Callable[[], Any]
    plain: Callable[[], Any]
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in milliseconds, and ours as a share of the copy's bandwidth (None where arithmetic bounds)."""

    name: str
    ours_ms: float
    compiled_ms: float
    eager_ms: float
    bandwidth_share: float | None


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _form(operator: Any, index: int = 0) -> Callable[..., Any]:
    """A form of a fused kernel, as a function."""
    return next(kernel for kernel in FUSED if kernel.operator is operator).forms[index].compose


def _pointwise() -> Iterator[Case]:
    grad, gate, up = (_draw(_TOKENS, _INNER) for _ in range(3))
    bias, plain = _draw(_INNER), _form(gated_backward)
    yield Case("gated", lambda: gated(gate, up, "silu"), lambda: F.silu(gate) * up, 3 * _bytes(up))
    yield Case(
        "gated backward",
        lambda: gated_backward(grad, gate, up, "silu"),
        lambda: plain(gate, grad, gate, up),
        5 * _bytes(up),
    )
    yield Case(
        "bias gelu", lambda: bias_gelu(up, bias, list(up.shape), "gelu"), lambda: F.gelu(up + bias), 2 * _bytes(up)
    )
    slope = _form(bias_gelu_backward)
    yield Case(
        "bias gelu backward",
        lambda: bias_gelu_backward(grad, up, bias, "gelu"),
        lambda: slope(up, grad, up, bias),
        3 * _bytes(up),
    )


def _norms() -> Iterator[Case]:
    x, residual, weight, bias = _draw(_TOKENS, _HIDDEN), _draw(_TOKENS, _HIDDEN), _draw(_HIDDEN), _draw(_HIDDEN)
    rms, layer, backward = _form(add_rms_norm), _form(add_layer_norm), _form(add_rms_norm_backward)
    out, rstd, total = add_rms_norm(x, residual, weight, _EPS)
    yield Case(
        "add, RMS norm",
        lambda: add_rms_norm(x, residual, weight, _EPS),
        lambda: rms(x, x, residual, weight, _EPS),
        4 * _bytes(x),
    )
    yield Case(
        "add, layer norm",
        lambda: add_layer_norm(x, residual, weight, bias, _EPS),
        lambda: layer(x, x, residual, weight, bias, _EPS),
        4 * _bytes(x),
    )
    yield Case(
        "add, RMS norm backward",
        lambda: add_rms_norm_backward(out, residual, total, rstd, weight, [1, _HIDDEN]),
        lambda: backward(x, out, residual, total, rstd, weight),
        4 * _bytes(x),
    )


def _rotary() -> Iterator[Case]:
    q, k = _draw(1, _TOKENS, _HEADS, _SIZE).transpose(1, 2), _draw(1, _TOKENS, _HEADS // 4, _SIZE).transpose(1, 2)
    cos, sin, plain = _draw(1, 1, _TOKENS, _SIZE), _draw(1, 1, _TOKENS, _SIZE), _form(rotary, 1)
    yield Case(
        "rotary", lambda: rotary(q, k, cos, sin, False, False), lambda: plain(q, q, k, cos, sin), 2 * _bytes(q, k)
    )


def _lookups() -> Iterator[Case]:
    table, grad = _draw(_VOCABULARY, _HIDDEN), _draw(_TOKENS, _HIDDEN)
    tokens = torch.randint(_VOCABULARY, (_TOKENS,), device=table.device)
    yield Case("embedding", lambda: embedding(table, tokens), lambda: F.embedding(tokens, table), 2 * _bytes(grad))
    yield Case(
        "embedding backward",
        lambda: embedding_backward(grad, tokens, _VOCABULARY, -1, False),
        lambda: torch.ops.aten.embedding_dense_backward(grad, tokens, _VOCABULARY, -1, False),
        _bytes(grad, table),
    )


def _experts() -> Iterator[Case]:
    x, y = _draw(_TOKENS, _HIDDEN), _draw(2 * _TOKENS, _HIDDEN)
    shares, order = _draw(2 * _TOKENS).float(), torch.randperm(2 * _TOKENS, device=x.device)
    inverse, weighed, backward = order.argsort(), _form(combine), _form(combine_backward)
    yield Case("permute", lambda: permute(x, order, 2), lambda: x[order // 2], _bytes(x, y))
    yield Case(
        "combine",
        lambda: combine(y, shares, inverse, 2),
        lambda: weighed(x, y, shares, inverse, 2),
        _bytes(x, y),
    )
    yield Case(
        "combine backward",
        lambda: combine_backward(x, y, shares, inverse, 2),
        lambda: backward(y, x, y, shares, inverse, 2, _TOKENS),
        _bytes(x, y, y),
    )


def _quantised() -> Iterator[Case]:
    x, dtype = _draw(_TOKENS, _INNER), torch.float8_e4m3fn
    codes, scales = triton_quantise(x, dtype, 256)
    rows, each = codes.view(8, -1), scales.view(8, -1)
    yield Case(
        "quantise", lambda: triton_quantise(x, dtype, 256), lambda: quantise_reference(x, dtype, 256), _bytes(x, codes)
    )
    yield Case(
        "dequantise and sum of 8",
        lambda: triton_dequantise_sum(rows, each, x.dtype, 256),
        lambda: dequantise_sum_reference(rows, each, x.dtype, 256),
        _bytes(codes) + _bytes(x) // 8,
    )


def _attention(size: int, length: int) -> Iterator[Case]:
    q, k, v, grad = (_draw(1, 16, length, size).requires_grad_() for _ in range(4))
    scale = size**-0.5
    with torch.no_grad():
        out, lse = flash_attention(q, k, v, scale, is_causal=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward() -> Any:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward() -> Any:
        return torch.autograd.grad(expected, (q, k, v), grad, retain_graph=True)

    name = f"attention, head {size}, {length}"
    yield Case(name, lambda: flash_attention(q, k, v, scale, is_causal=True), forward)
    yield Case(
        f"{name}, backward",
        lambda: flash_attention_backward(grad, q, k, v, out, lse, scale, is_causal=True),
        backward,
    )


def cases() -> Iterator[Case]:
    """All comparisons; each makes its inputs when it is asked for."""
    yield from _pointwise()
    yield from _norms()
    yield from _rotary()
    yield from _lookups()
    yield from _experts()
    yield from _quantised()
    for size in (64, 128):
        for length in (2048, 8192, 32768):
            yield from _attention(size, length)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of copying one gibibyte."""
    source = torch.empty(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * _bytes(source) / (_median_ms(lambda: target.copy_(source)) / 1e3)


def measure(case: Case, bandwidth: float) -> Row:
    """The medians of one comparison. What has a graph of autograd is timed eagerly only."""
    ours, eager = _median_ms(case.ours), _median_ms(case.plain)
    compiled = _median_ms(torch.compile(case.plain)) if case.moved_bytes else eager
    share = case.moved_bytes / (ours / 1e3) / bandwidth if case.moved_bytes else None
    return Row(case.name, ours, compiled, eager, share)


def _median_ms(function: Callable[[], Any]) -> float:
    median = do_bench(function, warmup=50, rep=200, return_mode="median")
    assert isinstance(median, float)
    return median


def _show(rows: list[Row], bandwidth: float) -> None:
    title = f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s"
    table = Table("kernel", "ours ms", "compiled ms", "eager ms", "of copy", "against best", title=title)
    for row in rows:
        share = "" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}"
        best = min(row.compiled_ms, row.eager_ms) / row.ours_ms
        table.add_row(
            row.name, f"{row.ours_ms:.3f}", f"{row.compiled_ms:.3f}", f"{row.eager_ms:.3f}", share, f"{best:.2f}x"
        )
    Console().print(table)


def main(arguments: list[str]) -> None:
    """Measure, print, and save where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("make gpu-bench measures Triton kernels on a GPU, and this machine has none that torch sees.")
    bandwidth = copy_bandwidth()
    rows = [measure(case, bandwidth) for case in cases()]
    _show(rows, bandwidth)
    if options.output is not None:
        versions = {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name()}
        taken = {**versions, "date": time.strftime("%Y-%m-%d"), "copy_bytes_per_s": bandwidth}
        options.output.write_text(json.dumps(taken | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
