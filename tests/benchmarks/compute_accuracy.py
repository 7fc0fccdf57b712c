"""Errors of predicted times of matrix products and attention against published measurements.

Run: python -m tests.benchmarks.compute_accuracy

Reads tests/data/matmuls.jsonl and tests/data/attention.jsonl, each row with its source. The tile model has two fitted
numbers, tile_overhead and tile_load_share. Both come from the products of A100 f16, H100 f8 and H100 bf16. The
attention curves come from the same figures. Errors on these rows are errors of the fit. H200, the best shapes ("MAMF")
and "unfused" took no part in the fit.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from cost_models.compute import matmul_time
from cost_models.device import device
from cost_models.work import AttentionShape, MatmulShape
from tests.benchmarks.attention_times import attention_time, unfused_attention_time

DATA = Path(__file__).parents[1] / "data"


def matmul_errors() -> dict[tuple[str, str], list[float]]:
    """Relative errors of the predicted rate (predicted / measured - 1) by (device, dtype)."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in _rows("matmuls"):
        shape = MatmulShape(row["m"], row["n"], row["k"], row["batch"])
        time = matmul_time(*shape, row["dtype"], device(row["device"]))
        found[row["device"], row["dtype"]].append(shape.flops / time / (row["tflops"] * 1e12) - 1)
    return found


def attention_errors() -> dict[str, list[float]]:
    """Return relative errors of the predicted rate by kernel.

    "unfused" goes through memory, whose bandwidth bounds long sequences. The model does not describe "unfused, short"
    and "unfused, causal", whose mask is made and added by separate operators.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for row in _rows("attention"):
        label = row["kernel"]
        if label == "unfused" and (row["causal"] or row["sequence"] < 2048):
            label += ", causal" if row["causal"] else ", short"
        found[label].append(_attention_rate(row) / (row["tflops"] * 1e12) - 1)
    return found


def _attention_rate(row: Mapping) -> float:
    length, depth, unit = row["sequence"], row["depth"], device(row["device"])
    shape = AttentionShape(row["heads"], length, length, depth, depth, row["causal"], row["backward"])
    if row["kernel"] == "unfused":
        return shape.flops / unfused_attention_time(shape, row["dtype"], unit)
    return shape.flops / attention_time(shape, row["dtype"], unit.with_attention(row["kernel"]))


def mean_error(values: Iterable[float]) -> float:
    """Mean absolute relative error."""
    return statistics.mean(abs(value) for value in values)


def median_error(values: Iterable[float]) -> float:
    """Median absolute relative error."""
    return statistics.median(abs(value) for value in values)


def _rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Print a line per device and dtype, and per attention kernel."""
    groups = {f"product {unit} {dtype}": values for (unit, dtype), values in matmul_errors().items()}
    groups |= {f"attention {kernel}": values for kernel, values in attention_errors().items()}
    for label, values in groups.items():
        bias = statistics.mean(values)
        accuracy = f"mean {mean_error(values):6.1%}  median {median_error(values):6.1%}  bias {bias:+6.1%}"
        sys.stdout.write(f"{label:32} {len(values):3} rows  {accuracy}\n")


if __name__ == "__main__":
    main()
