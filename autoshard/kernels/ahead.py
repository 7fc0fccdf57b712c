"""Compilation of Triton kernels without a GPU, and the resources that the compiled kernels use.

Needs a process in which the kernels were not loaded for Triton's interpreter (no TRITON_INTERPRET=1). The
compiler, ptxas and cuobjdump come with triton. Registers and stack are what `cuobjdump --dump-resource-usage`
prints; a stack that is not zero holds spilled registers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autoshard.errors import KernelError
from autoshard.kernels.kernel import Specimen

_WARP = 32
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel uses.

    Args:
        registers: registers of each thread.
        shared_bytes: shared memory of each program, in bytes.
        spilled_bytes: stack of each thread, in bytes; 0 when nothing is spilled.
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int


def compile_ahead(specimen: Specimen, capability: int) -> Resources:
    """Compile a kernel for an NVIDIA architecture.

    Args:
        specimen: what to compile.
        capability: e.g. 80 for sm_80 (A100), 90 for sm_90 (H100).

    Returns:
        The resources it uses.

    Raises:
        KernelError: the kernel was loaded for the interpreter, or the compiled code cannot be inspected.
    """
    if not isinstance(specimen.function, triton.JITFunction):
        raise KernelError(
            f"Triton kernel {specimen.name} was loaded for the interpreter and cannot be compiled; "
            "compile in a process without TRITON_INTERPRET=1."
        )
    source = ASTSource(
        fn=specimen.function,
        signature=dict(specimen.signature),
        constexprs=dict(specimen.constants),
        attrs=_alignments(specimen),
    )
    target = GPUTarget("cuda", capability, _WARP)
    options = {"num_warps": specimen.num_warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=target, options=options)
    registers, stack = _inspect(compiled.asm["cubin"], specimen.name)
    return Resources(registers, compiled.metadata.shared, stack)


def _alignments(specimen: Specimen) -> dict[tuple[int, ...], list[list[object]]]:
    """Pointers are aligned to 16 bytes, as torch allocates them."""
    kinds = enumerate(specimen.signature.values())
    return {(index,): [["tt.divisibility", 16]] for index, kind in kinds if kind.startswith("*")}


def _inspect(cubin: bytes, name: str) -> tuple[int, int]:
    """(registers, bytes of stack) of each thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usages = _USAGE.findall(text)
    if not usages:
        raise KernelError(f"cuobjdump tells no resource usage of kernel {name}; it printed {text!r}.")
    return max(int(usage[0]) for usage in usages), max(int(usage[1]) + int(usage[3]) for usage in usages)
