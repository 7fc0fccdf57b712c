"""Registers, shared memory and spills of every kernel, compiled for GPUs on this machine, which needs none.

python -m tests.benchmarks.kernel_resources [sm_80,sm_90,gfx942] [typical | all]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "tests" / "kernels" / "compile_ahead.py"


def main(architectures: str = "sm_80,sm_90,gfx942", sizes: str = "typical") -> None:
    """Print the table; compiling takes a minute or two."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(_ROOT)
    command = [sys.executable, str(_SCRIPT), architectures, sizes]
    text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    table = Table(
        Column("kernel", no_wrap=True, overflow="ignore"),
        "size",
        "architecture",
        "registers",
        "shared KiB",
        "spilled bytes",
    )
    for row in json.loads(text):
        shared = f"{row['shared_bytes'] / 1024:.1f}"
        numbers = (row["size"], row["architecture"], row["registers"], shared, row["spilled_bytes"])
        table.add_row(row["kernel"], *map(str, numbers))
    Console(width=110).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
