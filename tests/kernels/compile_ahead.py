"""Run as a script, without TRITON_INTERPRET: compile every kernel and write its resources as JSON.

    python tests/kernels/compile_ahead.py sm_80,sm_90,gfx942 typical

compiles the specimens of the usual sizes ("all" takes every one) for these architectures; "ones" takes one of each
kernel, every size and stride of which is 1: Triton makes these constants, which a kernel must not take for tensors.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from autoshard.kernels.kernel import Specimen
from tests.kernels.ahead import TYPICAL_SIZES, compile_ahead, specimens


def main(architectures: str, sizes: str) -> None:
    """Write a list of {kernel, size, architecture, registers, shared_bytes, spilled_bytes}."""
    rows = []
    for architecture in architectures.split(","):
        for specimen in specimens():
            if sizes == "ones":
                if specimen.name in {row["kernel"] for row in rows}:
                    continue
                specimen = _of_ones(specimen)
            elif sizes != "all" and specimen.size not in TYPICAL_SIZES:
                continue
            resources = dataclasses.asdict(compile_ahead(specimen, architecture))
            rows.append({"kernel": specimen.name, "size": specimen.size, "architecture": architecture} | resources)
    json.dump(rows, sys.stdout)


def _of_ones(specimen: Specimen) -> Specimen:
    integers = [name for name, kind in specimen.signature.items() if kind in ("i32", "i64")]
    signature = {**specimen.signature, **dict.fromkeys(integers, "constexpr")}
    return dataclasses.replace(
        specimen, signature=signature, constants={**specimen.constants, **dict.fromkeys(integers, 1)}
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
