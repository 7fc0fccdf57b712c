"""Run as a script, without TRITON_INTERPRET: compile every kernel and write its resources as JSON.

    python tests/kernels/compile_ahead.py sm_80,sm_90,gfx942 typical

compiles the specimens of the usual sizes ("all" takes every one) for these architectures.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from autoshard.kernels.ahead import compile_ahead
from autoshard.kernels.kernel import TYPICAL_SIZES
from autoshard.kernels.registry import specimens


def main(architectures: str, sizes: str) -> None:
    """Write a list of {kernel, size, architecture, registers, shared_bytes, spilled_bytes}."""
    rows = []
    for architecture in architectures.split(","):
        for specimen in specimens(architecture):
            if sizes != "all" and specimen.size not in TYPICAL_SIZES:
                continue
            resources = dataclasses.asdict(compile_ahead(specimen, architecture))
            rows.append({"kernel": specimen.name, "size": specimen.size, "architecture": architecture} | resources)
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
