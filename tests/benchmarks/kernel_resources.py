"""Registers, shared memory and spills of every kernel, compiled for GPUs on a machine without a GPU.

    python -m tests.benchmarks.kernel_resources [sm_80,sm_90,gfx942] [typical | all] [gpt,llama,... | none]

Prints Markdown for handwritten kernels at usual or all sizes, and for kernels generated for models
(`tests.kernels.compiled_kernels`).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton

from tests.kernels.ahead import ARCHITECTURES
from tests.kernels.compiled_kernels import MODELS, compiled


def main(architectures: str = ",".join(ARCHITECTURES), sizes: str = "typical", models: str = ",".join(MODELS)) -> None:
    """Print the tables; compiling takes some minutes."""
    lines = [f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}", ""]
    lines += _table("size", architectures.split(","), compiled(architectures, sizes))
    if models != "none":
        lines += ["", "Generated for models, by the model:", ""]
        lines += _table("model", architectures.split(","), compiled(architectures, "none", models))
    sys.stdout.write("\n".join([*lines, ""]))


def _table(size: str, architectures: Sequence[str], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return a table with a row for each kernel and size, with the maxima over its compilations."""
    found: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for row in rows:
        used = (row["registers"], row["shared_bytes"], row["spilled_bytes"])
        own = found.setdefault((row["kernel"], row["size"]), {})
        own[row["architecture"]] = tuple(map(max, own.get(row["architecture"], used), used))
    titles = " | ".join(f"{name}: registers, shared KiB, spilled B" for name in architectures)
    yield f"| kernel | {size} | {titles} |"
    yield "|---|---|" + "---|" * len(architectures)
    for (kernel, of), used_by in found.items():
        cells = (used_by.get(name) for name in architectures)
        shown = ("" if used is None else f"{used[0]}, {used[1] / 1024:.1f}, {used[2]}" for used in cells)
        yield f"| `{kernel}` | {of} | " + " | ".join(shown) + " |"


if __name__ == "__main__":
    main(*sys.argv[1:])
