"""Compilation of Triton kernels without a GPU, and the resources that the compiled kernels use.

Needs a process in which the kernels were not loaded for Triton's interpreter (no TRITON_INTERPRET=1). The
compiler, ptxas and cuobjdump come with triton. For NVIDIA, registers and stack are what `cuobjdump
--dump-resource-usage` prints; for AMD, what the assembly's metadata say. A stack that is not zero holds spilled
registers.
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
from autoshard.kernels import triton_adam
from autoshard.kernels.kernel import ExampleCompilation
from autoshard.kernels.registry import FUSED, KERNELS

ARCHITECTURES = ("sm_80", "sm_90", "gfx942")
"""A100 and its like, H100 and later, MI300."""

TYPICAL_SIZES = (4096, 64, 128)
"""The sizes that models usually have: at these no kernel may spill."""

_WARP, _WAVEFRONT = 32, 64
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_VECTOR_REGISTERS = re.compile(r"\.vgpr_count:\s+(\d+)")
_SCRATCH = re.compile(r"\.private_segment_fixed_size:\s+(\d+)")


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a compiled kernel.

    Args:
        registers: registers of each thread.
        shared_bytes: shared memory of each program, in bytes.
        spilled_bytes: stack of each thread, in bytes; 0 when nothing is spilled.
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int


def examples() -> tuple[ExampleCompilation, ...]:
    """All representative compilations."""
    kernels = [*(kernel for found in KERNELS.values() for kernel in found), *FUSED]
    return (*(example for kernel in kernels for example in kernel.examples), *triton_adam.examples())


def compile_ahead(example: ExampleCompilation, architecture: str) -> Resources:
    """Compile a kernel for an architecture.

    Args:
        example: the kernel to compile.
        architecture: "sm_80" (A100), "sm_90" (H100, H200), "gfx942" (MI300), and so on.

    Returns:
        The resources it uses.

    Raises:
        KernelError: the kernel was loaded for the interpreter, the architecture is unknown, or the compiled code cannot
            be inspected.
    """
    if not isinstance(example.function, triton.JITFunction):
        raise KernelError(
            f"Triton kernel {example.name} was loaded for the interpreter and cannot be compiled; "
            "compile in a process without TRITON_INTERPRET=1."
        )
    source = ASTSource(
        fn=example.function,
        signature=dict(example.signature),
        constexprs=dict(example.constants),
        attrs=_alignments(example),
    )
    target = _target(architecture)
    options = {"num_warps": example.num_warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        registers, spilled = _read_assembly(compiled.asm["amdgcn"], example.name)
    else:
        registers, spilled = _inspect(compiled.asm["cubin"], example.name)
    return Resources(registers, compiled.metadata.shared, spilled)


def _target(architecture: str) -> GPUTarget:
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), _WARP)
    if architecture.startswith("gfx9"):
        return GPUTarget("hip", architecture, _WAVEFRONT)
    raise KernelError(f"architecture={architecture!r} is unknown; use 'sm_90' and the like, or 'gfx942'.")


def _alignments(example: ExampleCompilation) -> dict[tuple[int, ...], list[list[object]]]:
    """Pointers are aligned to 16 bytes, as torch allocates them; strides are multiples of 16 if rows are."""
    is_even = example.size % 16 == 0
    return {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(example.signature.items())
        if kind.startswith("*") or (is_even and kind == "i32" and "stride" in name)
    }


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


def _read_assembly(assembly: str, name: str) -> tuple[int, int]:
    """(vector registers, bytes of scratch memory) of each thread, from AMD's assembly."""
    registers, scratch = _VECTOR_REGISTERS.findall(assembly), _SCRATCH.findall(assembly)
    if not registers or not scratch:
        raise KernelError(f"the assembly of kernel {name} tells no resource usage.")
    return max(map(int, registers)), max(map(int, scratch))
