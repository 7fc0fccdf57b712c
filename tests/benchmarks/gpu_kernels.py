"""Time kernels beside Liger-Kernel, torch.compile and eager on this machine's GPU: medians in one process.

    make gpu-bench        (or: python -m tests.benchmarks.gpu_kernels --only 'attention*' --output page.md)
    python -m tests.benchmarks.gpu_kernels --dry-run --device h200

Each implementation runs on the same inputs in bfloat16 after a warm-up. The device's cache is emptied between runs
(`triton.testing.do_bench`). Beside the times stand the cost model's prediction and our bandwidth, as a share of a
tensor copy's bandwidth on this device. Attention is compared with the fastest of torch's backends. Forward and backward
are timed separately, except for cross-entropy, whose gradient Liger-Kernel computes in the forward. Liger-Kernel is
optional (`gpu_liger.py`). Blocks of Llama 3 8B come last.

The page is written anew after each row, with versions, date and the met targets. A dry run needs no GPU. It runs every
case on the meta device, finds wrong calls and wrong shapes, and lists each case with its predicted time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import autoshard
from autoshard.ir.text import format_bytes
from cost_models.device import Device, device
from tests.benchmarks import gpu_liger
from tests.benchmarks.gpu_block import (
    LENGTHS,
    Sizes,
    compile_ours,
    flops_of,
    generated_cases,
    make_block,
    predict_s,
    step_of,
)
from tests.benchmarks.gpu_case import Case, Kind, bytes_of
from tests.benchmarks.gpu_cases import cases
from tests.benchmarks.gpu_page import Row, page

_RESULTS = Path(__file__).with_name("results")
# What one library or another raises where it cannot; it is told on the page.
_FAILURES = (
    *(RuntimeError, TypeError, ValueError, AttributeError, ImportError, AssertionError),
    *(triton.TritonError, autoshard.AutoshardError),
)
Median = Callable[..., float]
"""A function's median time in milliseconds; `grad_to_none` as for `triton.testing.do_bench`."""


def copy_bandwidth(median: Median) -> float:
    """Bytes per second, read and written, of copying one gibibyte."""
    source = torch.empty(2**29, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * bytes_of(source) / (median(lambda: target.copy_(source)) / 1e3)


class Bench:
    """Time implementations, and note failures, so that expensive GPU time still measures the remaining cases.

    Args:
        priced: the device of the predictions.
        median: times a function.
        compiler: `torch.compile`.
    """

    def __init__(self, priced: Device, median: Median, compiler: Callable[[Any], Any] = torch.compile) -> None:
        self._priced, self._median, self._compiler = priced, median, compiler
        self._notes: list[str] = []

    def measure(self, case: Case) -> Row:
        """Time one case. For attention, the eager time is that of torch's fastest backend."""
        ours = self._time("ours", lambda: case.ours)
        eager = self._fastest_backend(case) if case.kind is Kind.ATTENTION else self._plain("eager", case, lambda x: x)
        compiles = case.compiles and case.kind is not Kind.ATTENTION
        return Row(
            case.name,
            case.kind,
            1e3 * case.predicted_s(self._priced),
            ours,
            self._plain("torch.compile", case, self._compiler) if compiles else None,
            eager,
            self._liger(case),
            case.moved_bytes,
            case.flops,
            self._taken_notes(),
        )

    def measure_block(self, length: int, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Row:
        """Time a block's forward and backward."""
        block, inputs = make_block(length, sizes, dtype)
        ours = self._step("ours", lambda: compile_ours(block, inputs), inputs)
        compiled = self._step("torch.compile", lambda: self._compiler(block), inputs)
        eager = self._step("eager", lambda: block, inputs)
        predicted = 1e3 * predict_s(length, self._priced)
        name = f"Llama block, forward and backward, {length}"
        times = (predicted, ours, compiled, eager, None)
        return Row(name, Kind.BLOCK, *times, 0, flops_of(length, sizes), self._taken_notes())

    def _plain(self, name: str, case: Case, wrap: Callable[[Any], Any]) -> float | None:
        def prepare() -> Callable[[], Any]:
            plain = wrap(case.plain)
            return lambda: case.run_plain(plain)

        return self._time(name, prepare)

    def _liger(self, case: Case) -> float | None:
        if case.liger is None or gpu_liger.version() is None:
            return None
        return self._time("Liger", case.liger.prepare)

    def _step(self, name: str, make: Callable[[], Any], inputs: Sequence[Any]) -> float | None:
        dropped: list[torch.Tensor] = []

        def prepare() -> Callable[[], Any]:
            step, with_gradients = step_of(make(), tuple(inputs))
            dropped[:] = with_gradients
            return step

        return self._time(name, prepare, dropped)

    def _fastest_backend(self, case: Case) -> float | None:
        found = []
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                found.append(self._time(backend.name, case.plain))
        return min((time_ms for time_ms in found if time_ms is not None), default=None)

    def _time(
        self, name: str, prepare: Callable[[], Callable[[], Any]], grad_to_none: list[torch.Tensor] | None = None
    ) -> float | None:
        try:
            function = prepare()
            return self._median(function, grad_to_none=grad_to_none)
        except _FAILURES as error:
            self._notes.append(f"{name}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
            return None
        finally:
            torch.compiler.reset()

    def _taken_notes(self) -> tuple[str, ...]:
        notes = tuple(self._notes)
        self._notes.clear()
        return notes


def dry_run(priced: Device, lengths: Sequence[int] = LENGTHS) -> Table:
    """Run every case on the meta device, plan every block, and return rows with predicted times.

    Raises:
        ValueError: a kernel's first result and its reference have unlike shapes.
        TypeError: an installed Liger-Kernel takes other arguments.
    """
    table = Table("kernel", "bound by", "predicted ms", "moves", "Liger", title=f"Dry run, predicted for {priced.name}")
    with torch.device("meta"):
        for case in all_cases(priced):
            check(case)
            moved = format_bytes(case.moved_bytes) if case.moved_bytes else f"{case.flops / 1e12:.3f} TFLOP"
            liger = "" if case.liger is None else case.liger.function
            table.add_row(case.name, case.kind.value, f"{1e3 * case.predicted_s(priced):.3f}", moved, liger)
    for length in lengths:
        flops = f"{flops_of(length, Sizes()) / 1e12:.3f} TFLOP"
        predicted_ms = 1e3 * predict_s(length, priced)
        table.add_row(f"Llama block, forward and backward, {length}", "block", f"{predicted_ms:.3f}", flops, "")
    return table


def check(case: Case) -> None:
    """Raise `ValueError` unless a kernel and its reference give results of one shape."""
    made = case.ours()
    plain = case.plain()() if case.kind is Kind.ATTENTION else case.run_plain(case.plain)
    shapes = [tuple((item[0] if isinstance(item, tuple) else item).shape) for item in (made, plain)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{case.name} gives {shapes[0]}, and what it is compared with {shapes[1]}.")
    if case.liger is not None and gpu_liger.version() is not None:
        case.liger.check()


def all_cases(priced: Device) -> Iterator[Case]:
    """The cases of hand-written kernels, then of kernels generated for a block."""
    yield from cases()
    yield from generated_cases(priced)


def _median_ms(function: Callable[[], Any], grad_to_none: list[torch.Tensor] | None = None) -> float:
    median = do_bench(function, warmup=50, rep=200, grad_to_none=grad_to_none, return_mode="median")
    assert isinstance(median, float)
    return median


def _rows(bench: Bench, priced: Device, only: str) -> Iterator[Row]:
    with torch.device("cuda"):
        for case in all_cases(priced):
            if fnmatch(case.name, only):
                yield bench.measure(case)
        for length in LENGTHS:
            if fnmatch(f"Llama block, forward and backward, {length}", only):
                yield bench.measure_block(length, Sizes())


def main(arguments: list[str]) -> None:
    """Measure and write the page, or with `--dry-run` list the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    day = time.strftime("%Y-%m-%d")
    parser.add_argument("--output", type=Path, default=_RESULTS / f"gpu_kernels_{day}.md", help="the page")
    parser.add_argument("--only", default="*", help="a pattern of names, as of files")
    parser.add_argument("--tune", action="store_true", help="measure block sizes first (autoshard.tune_kernels)")
    parser.add_argument("--dry-run", action="store_true", help="run on the meta device, and list predicted times")
    parser.add_argument("--device", default="h200", help="of cost_models/data/devices, for predicted times")
    options = parser.parse_args(arguments)
    priced = device(options.device)
    if options.dry_run:
        Console().print(dry_run(priced))
        return
    if not torch.cuda.is_available():
        sys.exit("make gpu-bench measures Triton kernels on a GPU, and this machine has none that torch sees.")
    if options.tune:
        autoshard.tune_kernels()
    with torch.device("cuda"):
        bandwidth = copy_bandwidth(_median_ms)
    facts = {
        "device": torch.cuda.get_device_name(),
        "date": day,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "Liger-Kernel": gpu_liger.version() or "not installed: pip install liger-kernel",
        "block sizes": "measured" if options.tune else "the heuristic's",
        "copy": f"{bandwidth / 1e12:.3f} TB/s read and written",
        "predicted for": priced.name,
    }
    rows: list[Row] = []
    for row in _rows(Bench(priced, _median_ms), priced, options.only):
        rows.append(replace(row, copy_bytes_per_s=bandwidth))
        options.output.write_text(page(facts, rows), encoding="utf-8")
        sys.stdout.write(f"{rows[-1].cells()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
