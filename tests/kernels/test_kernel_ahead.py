"""Every kernel compiles for GPUs on a machine without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoshard.errors import KernelError
from tests.kernels.ahead import ARCHITECTURES, TYPICAL_SIZES, compile_ahead, examples
from tests.kernels.compiled_kernels import MODELS, compiled

# Registers of a thread, and shared memory of a program.
MAX_REGISTERS = {"sm_80": 255, "sm_90": 255, "gfx942": 512}
MAX_SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}
# Two registers: the ptxas of triton 3.6 spills those where that of 3.9 spills none.
MAX_SPILLED_BYTES = 8
EVERY = ",".join(ARCHITECTURES)
KERNELS = {example.name for example in examples()}


def _check(rows: list[dict[str, Any]], architectures: str, record: Callable[[str, object], None]) -> None:
    typical = {str(size) for size in TYPICAL_SIZES}
    for row in rows:
        record(f"{row['kernel']}[{row['size']}] {row['architecture']}", json.dumps(row))
        assert row["registers"] <= MAX_REGISTERS[row["architecture"]], row
        assert row["shared_bytes"] <= MAX_SHARED_BYTES[row["architecture"]], row
        assert row["spilled_bytes"] <= MAX_SPILLED_BYTES or row["size"] not in typical, row
    for architecture in architectures.split(","):
        assert {row["kernel"] for row in rows if row["architecture"] == architecture} == KERNELS


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_almost_without_spills(architecture: str, record_property: Callable[[str, object], None]) -> None:
    """At the usual sizes every kernel compiles for an A100, an H100 and an MI300, and spills at most 8 bytes."""
    _check(compiled(architecture, "typical"), architecture, record_property)


@pytest.mark.slow
def test_sizes_of_one_compile() -> None:
    """Every kernel compiles for an H100 when sizes and strides are 1, which Triton makes constants."""
    assert {row["kernel"] for row in compiled("sm_90", "ones")} == KERNELS


@pytest.mark.slow
def test_compiles_at_every_size(record_property: Callable[[str, object], None]) -> None:
    """Every kernel compiles for short rows and for the longest rows, within the registers and shared memory of each
    GPU."""
    _check(compiled(EVERY, "all"), EVERY, record_property)


@pytest.mark.slow
@pytest.mark.parametrize(("architectures", "models"), [("sm_90", ("mixture",)), (EVERY, MODELS)])
def test_generated_kernels_do_not_spill(
    architectures: str, models: tuple[str, ...], record_property: Callable[[str, object], None]
) -> None:
    """Kernels generated for a mixture of experts, other families, and a block of Llama 3 8B spill nothing."""
    rows = compiled(architectures, "none", ",".join(models))
    for row in rows:
        record_property(f"{row['kernel']} {row['architecture']}", json.dumps(row))
        assert row["spilled_bytes"] == 0, row
    assert {row["size"] for row in rows} == set(models)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
def test_interpreted_kernels_cannot_be_compiled() -> None:
    """Compiling in a process that loaded kernels for the interpreter is refused with the reason."""
    with pytest.raises(KernelError, match="was loaded for the interpreter"):
        compile_ahead(examples()[0], "sm_90")
