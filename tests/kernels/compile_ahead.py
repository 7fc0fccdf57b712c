"""Run as a script, without TRITON_INTERPRET: compile every kernel and write its resources as JSON.

    python tests/kernels/compile_ahead.py 80,90 4096

compiles the specimens for rows of 4096 elements ("all" takes every width) for sm_80 and sm_90.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from itertools import chain

from autoshard.kernels.ahead import compile_ahead
from autoshard.kernels.kernel import SPECIMEN_COLUMNS
from autoshard.kernels.registry import KERNELS


def main(capabilities: str, columns: str) -> None:
    """Write a list of {kernel, columns, capability, registers, shared_bytes, spilled_bytes}."""
    rows = []
    for kernel in chain.from_iterable(KERNELS.values()):
        for width, specimen in zip(SPECIMEN_COLUMNS, kernel.specimens, strict=True):
            if columns not in ("all", str(width)):
                continue
            for capability in map(int, capabilities.split(",")):
                resources = dataclasses.asdict(compile_ahead(specimen, capability))
                place = {"kernel": specimen.name, "columns": width, "capability": capability}
                rows.append(place | resources)
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
