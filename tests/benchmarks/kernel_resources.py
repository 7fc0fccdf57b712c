"""Registers, shared memory and spills of every kernel, compiled for GPUs on this machine, which needs none.

    python -m tests.benchmarks.kernel_resources [sm_80,sm_90,gfx942] [typical | all] [gpt,llama,... | none]

prints them as Markdown: hand-written kernels at usual or all sizes, and those that are generated for the models of
`tests/kernels/generated/compile_generated.py`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from tests.kernels.ahead import ARCHITECTURES

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "tests" / "kernels" / "compile_ahead.py"
_GENERATED = _ROOT / "tests" / "kernels" / "generated" / "compile_generated.py"
_FAMILIES = "gpt,llama,mixture,vit,encoder-decoder,block"


def main(architectures: str = ",".join(ARCHITECTURES), sizes: str = "typical", families: str = _FAMILIES) -> None:
    """Print the tables; compiling takes some minutes."""
    lines = [f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}", ""]
    lines += _table("size", architectures.split(","), _compile(_SCRIPT, architectures, sizes))
    if families != "none":
        lines += ["", "Generated for models, by the model:", ""]
        lines += _table("model", architectures.split(","), _compile(_GENERATED, architectures, families))
    sys.stdout.write("\n".join([*lines, ""]))


def _compile(script: Path, *arguments: str) -> list[dict[str, Any]]:
    """A script's rows, from a process in which kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(_ROOT)
    command = [sys.executable, str(script), *arguments]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _table(size: str, architectures: Sequence[str], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of a table with a row for each kernel and size: the most that any of its compilations uses."""
    found: dict[tuple[str, str], dict[str, tuple[int, int, int]]] = {}
    for row in rows:
        used = (row["registers"], row["shared_bytes"], row["spilled_bytes"])
        own = found.setdefault((row["kernel"], str(row["size"])), {})
        before = own.get(row["architecture"], used)
        own[row["architecture"]] = (max(before[0], used[0]), max(before[1], used[1]), max(before[2], used[2]))
    yield (
        f"| kernel | {size} | "
        + " | ".join(f"{name}: registers, shared KiB, spilled B" for name in architectures)
        + " |"
    )
    yield "|---|---|" + "---|" * len(architectures)
    for (kernel, of), used_by in found.items():
        cells = (used_by.get(name) for name in architectures)
        shown = ("" if used is None else f"{used[0]}, {used[1] / 1024:.1f}, {used[2]}" for used in cells)
        yield f"| `{kernel}` | {of} | " + " | ".join(shown) + " |"


if __name__ == "__main__":
    main(*sys.argv[1:])
