"""Operator calls that a calibration runs and times, with the work that the cost models count for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cost_models.compute import curve_bytes, known_time
from cost_models.device import Device
from cost_models.operators import work
from cost_models.throughput import MEMORY, kernel_of
from cost_models.work import TensorInfo, Work

TOUCHED_BYTES = 64 * 2**20
MOST_COPIES = 256
ROWS = (32, 512, 4096)
COLUMNS = 768
VECTORS = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)
"""Numbers of float32 elements of the added vectors. Operands and result together take 48 KiB to 192 MiB."""
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}


def cycled(operator: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], object]:
    """Return a function that calls an operator, each time on the next of several copies of its operands.

    Copies of operands and results take about `TOUCHED_BYTES` of memory in all, so they are not in the first caches. In
    a step, too, an operator reads values computed long before, and writes to memory that another value used meanwhile.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    results = [leaf for leaf in pytree.tree_leaves(operator(*arguments, **options)) if isinstance(leaf, Tensor)]
    size = sum(leaf.numel() * leaf.element_size() for leaf in (*leaves, *results))
    count = max(1, min(MOST_COPIES, TOUCHED_BYTES // max(1, size)))
    sets = [pytree.tree_map(lambda leaf: _copy(leaf), arguments) for _ in range(count)]
    kept = deque[Any]((operator(*each, **options) for each in sets), maxlen=count)  # the system maps their pages now
    turns = cycle(sets)
    return lambda: kept.append(operator(*next(turns), **options))


def _copy(leaf: Any) -> Any:
    """Return a copy of a tensor with the same strides, or any other object itself."""
    return (
        torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)
        if isinstance(leaf, Tensor)
        else leaf
    )


@dataclass(frozen=True, slots=True)
class KernelSample:
    """One operator call to time, made by `of`.

    `name` is that of the throughput curve of which the sample is a point: the operator's kernel, or "memory". `prepare`
    holds the operands, and returns a function that runs the call once (`cycled`).
    """

    name: str
    work: Work
    prepare: Callable[[], Callable[[], object]]

    @classmethod
    def of(
        cls, operator: Any, *arguments: Any, name: str | None = None, runs: Any = None, **options: Any
    ) -> KernelSample:
        """Make a sample of a call of an `OpOverload` on `arguments` and `options`.

        The call runs once, to learn the shapes of its results.

        Args:
            name: name of the sample's curve; None: the operator's kernel (`kernel_of`).
            runs: the function that is timed, because programs call it in place of the operator; None: the operator.
        """
        runs = operator if runs is None else runs
        inputs = [_info(leaf) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        results = runs(*arguments, **options)
        outputs = [_info(leaf) for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
        plain = tuple(None if isinstance(argument, Tensor) else argument for argument in arguments)
        done = work(str(operator), inputs, outputs, plain)
        return cls(name or kernel_of(str(operator)), done, lambda: cycled(runs, *arguments, **options))

    @property
    def bytes_moved(self) -> float:
        """Bytes at which the sample is a point of its throughput curve."""
        return curve_bytes(self.work)

    @property
    def key(self) -> str:
        """Name of the sample's measurement in a calibration."""
        return f"kernel.{self.name}.{round(self.bytes_moved)}"

    def point(self, seconds: float, device: Device) -> tuple[float, float]:
        """Return (bytes, seconds), the sample's point on its curve, for a run of `seconds`.

        Launches and products that are priced separately on `device` are subtracted from the seconds. At least a tenth
        is left.
        """
        return self.bytes_moved, max(seconds - known_time(self.work, device), 0.1 * seconds)


def memory_samples() -> Iterator[KernelSample]:
    """Yield samples of sums of two vectors, from sizes that fit the first cache to sizes that fit no cache."""
    for size in VECTORS:
        yield KernelSample.of(torch.ops.aten.add.Tensor, torch.randn(size), torch.randn(size), name=MEMORY)


_UNARY = ("tanh", "exp", "log", "sigmoid", "silu", "gelu", "erf", "rsqrt", "cos", "sin")
_BACKWARD = ("tanh", "sigmoid", "silu", "gelu")


def aten_samples(rows: Sequence[int] = ROWS) -> Iterator[KernelSample]:
    """Yield samples of operators that compute much per byte, or read with strides, on float32 [n, 768], n in `rows`."""
    aten = torch.ops.aten
    weight, bias = torch.ones(COLUMNS), torch.zeros(COLUMNS)
    for count in rows:
        x, grad = torch.rand(count, COLUMNS) + 0.5, torch.randn(count, COLUMNS)
        for name in _UNARY:
            yield KernelSample.of(getattr(aten, name).default, x)
        for name in _BACKWARD:
            yield KernelSample.of(getattr(aten, f"{name}_backward").default, grad, x)
        yield KernelSample.of(aten._softmax.default, x, -1, False)
        yield KernelSample.of(aten._softmax_backward_data.default, grad, torch.softmax(x, -1), -1, torch.float32)
        yield KernelSample.of(aten.native_layer_norm.default, x, [COLUMNS], weight, bias, 1e-5)
        _, mean, rstd = aten.native_layer_norm.default(x, [COLUMNS], weight, bias, 1e-5)
        masks = [True, True, True]
        backward = aten.native_layer_norm_backward.default
        yield KernelSample.of(backward, grad, x, [COLUMNS], mean, rstd, weight, bias, masks)
        heads = x.view(count, 16, COLUMNS // 16).permute(1, 0, 2)
        yield KernelSample.of(aten.clone.default, heads, memory_format=torch.contiguous_format)
        rows_of = torch.randint(0, 1024, (count,))
        yield KernelSample.of(aten.embedding_dense_backward.default, grad, rows_of, 1024, -1, False)


def _info(tensor: Tensor) -> TensorInfo:
    name = _DTYPES.get(tensor.dtype, "i64" if tensor.dtype == torch.int64 else str(tensor.dtype).rpartition(".")[2])
    return TensorInfo(tuple(tensor.shape), tensor.element_size(), name)
