"""Each kernel beside torch.compile and eager on this machine's GPU: medians, side by side in one process.

    make gpu-bench        (or: python -m tests.benchmarks.gpu_kernels --output results.json)
    python -m tests.benchmarks.gpu_kernels --dry-run --device h200

Each implementation runs on the same inputs, in bfloat16, after a warm-up; the cache of the device is emptied between
runs (`triton.testing.do_bench`). Beside the times stand what the cost model predicts, and the bandwidth that ours
reaches, as a share of what copying a tensor reaches on this device. Attention, which arithmetic bounds, is compared
with each of torch's backends, and the fastest counts. Forward and backward are timed apart.

A dry run needs no GPU: every case runs on the meta device, which finds wrong calls and results of other shapes, and is
listed with its predicted time.
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from autoshard.ir.printer import format_bytes
from autoshard.kernels.registry import FUSED
from autoshard.kernels.triton_add_norm import add_layer_norm, add_rms_norm, add_rms_norm_backward
from autoshard.kernels.triton_attention import triton_attention
from autoshard.kernels.triton_attention_backward import triton_attention_backward
from autoshard.kernels.triton_gated import gated, gated_backward
from autoshard.kernels.triton_gelu import bias_gelu, bias_gelu_backward
from autoshard.kernels.triton_rotary import rotary
from cost_models.compute import attention_time, memory_time
from cost_models.device import Device, device
from cost_models.work import AttentionShape

_TOKENS, _HIDDEN, _INNER, _HEADS, _SIZE = 8192, 4096, 14336, 32, 128
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Args:
        name: kernel and shape.
        ours, plain: the kernel, and the same in ordinary operators; no arguments. Of an attention `plain` makes what is
            timed, under the backend that is to be timed.
        moved_bytes: what has to be read and written; 0 where arithmetic bounds.
        attention: the shape, of an attention.
    """

    name: str
    ours: Callable[[], Any]
    plain: Callable[[], Any]
    moved_bytes: int = 0
    attention: AttentionShape | None = None

    def predicted_s(self, device: Device) -> float:
        """What the cost model says that ours takes."""
        if self.attention is not None:
            return attention_time(self.attention, "bf16", device)
        return device.launch_latency_s + memory_time(self.moved_bytes, device)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in milliseconds, and ours as a share of the copy's bandwidth (None where arithmetic bounds)."""

    name: str
    ours_ms: float
    predicted_ms: float
    compiled_ms: float
    eager_ms: float
    bandwidth_share: float | None


def _draw(*shape: int) -> Tensor:
    """Normal numbers, on the default device."""
    return torch.randn(shape, dtype=torch.bfloat16)


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


def _attention(size: int, length: int) -> Iterator[Case]:
    q, k, v, grad = (_draw(1, _HEADS // 2, length, size).requires_grad_() for _ in range(4))
    constants = (0.0, True, size**-0.5, 0, [0] * 4, list(q.shape))
    with torch.no_grad():
        out, lse = triton_attention(q, k, v, None, None, *constants)

    def forward() -> Any:
        with torch.no_grad():
            return triton_attention(q, k, v, None, None, *constants)

    def plain() -> Any:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward() -> Any:
        with torch.no_grad():
            return triton_attention_backward(grad, q, k, v, None, out, lse, None, *constants)

    def plain_backward() -> Callable[[], Any]:
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return lambda: torch.autograd.grad(expected, (q, k, v), grad, retain_graph=True)

    name = f"attention, head {size}, {length}"
    shape = AttentionShape(_HEADS // 2, length, length, size, size, causal=True)
    yield Case(name, forward, lambda: plain, attention=shape)
    yield Case(f"{name}, backward", backward, plain_backward, attention=shape._replace(backward=True))


def cases() -> Iterator[Case]:
    """All comparisons; each makes its inputs when it is asked for."""
    yield from _pointwise()
    yield from _norms()
    yield from _rotary()
    for size in (64, 128):
        for length in (2048, 8192, 32768):
            yield from _attention(size, length)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of copying one gibibyte."""
    source = torch.empty(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * _bytes(source) / (_median_ms(lambda: target.copy_(source)) / 1e3)


def measure(case: Case, bandwidth: float, device: Device) -> Row:
    """The medians of one comparison; attention's eager one is that of torch's fastest backend."""
    ours, predicted = _median_ms(case.ours), 1e3 * case.predicted_s(device)
    if case.attention is not None:
        eager = _fastest_backend_ms(case)
        return Row(case.name, ours, predicted, eager, eager, None)
    share = case.moved_bytes / (ours / 1e3) / bandwidth
    return Row(case.name, ours, predicted, _median_ms(torch.compile(case.plain)), _median_ms(case.plain), share)


def _fastest_backend_ms(case: Case) -> float:
    """The median of attention under the fastest of torch's backends that take it."""
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                found.append(_median_ms(case.plain()))
        except RuntimeError as error:  # "No available kernel"
            Console(stderr=True).print(f"{case.name}: not with {backend.name}: {error}", markup=False)
    return min(found)


def dry_run(device: Device) -> Table:
    """Every case, run on the meta device, with its predicted time.

    Raises:
        ValueError: a kernel's first result has another shape than what it is compared with.
    """
    table = Table("kernel", "predicted ms", "moves", title=f"Dry run, predicted for {device.name}")
    with torch.device("meta"):
        for case in cases():
            made, plain = case.ours(), case.plain() if case.attention is None else case.plain()()
            shapes = [tuple((item[0] if isinstance(item, tuple) else item).shape) for item in (made, plain)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{case.name} gives {shapes[0]}, and what it is compared with {shapes[1]}.")
            moved = format_bytes(case.moved_bytes) if case.moved_bytes else "products"
            table.add_row(case.name, f"{1e3 * case.predicted_s(device):.3f}", moved)
    return table


def _median_ms(function: Callable[[], Any]) -> float:
    median = do_bench(function, warmup=50, rep=200, return_mode="median")
    assert isinstance(median, float)
    return median


def _show(rows: list[Row], bandwidth: float) -> None:
    title = f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s"
    columns = ("kernel", "ours ms", "predicted ms", "compiled ms", "eager ms", "of copy", "against best")
    table = Table(*columns, title=title)
    for row in rows:
        share = "" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}"
        best = min(row.compiled_ms, row.eager_ms) / row.ours_ms
        times = (row.ours_ms, row.predicted_ms, row.compiled_ms, row.eager_ms)
        table.add_row(row.name, *(f"{time_ms:.3f}" for time_ms in times), share, f"{best:.2f}x")
    Console().print(table)


def main(arguments: list[str]) -> None:
    """Measure, print, and save where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="run on the meta device, and list predicted times")
    parser.add_argument("--device", default="h200", help="of cost_models/data/devices, for predicted times")
    options = parser.parse_args(arguments)
    priced = device(options.device)
    if options.dry_run:
        Console().print(dry_run(priced))
        return
    if not torch.cuda.is_available():
        sys.exit("make gpu-bench measures Triton kernels on a GPU, and this machine has none that torch sees.")
    bandwidth = copy_bandwidth()
    with torch.device("cuda"):
        rows = [measure(case, bandwidth, priced) for case in cases()]
    _show(rows, bandwidth)
    if options.output is not None:
        versions = {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name()}
        taken = {**versions, "date": time.strftime("%Y-%m-%d"), "copy_bytes_per_s": bandwidth}
        options.output.write_text(json.dumps(taken | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
