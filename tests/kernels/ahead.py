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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autoshard.errors import KernelError
from autoshard.kernels.candidates import Choice
from autoshard.kernels.tuning import Launch
from tests.kernels.calls import CALLS, run

ARCHITECTURES = ("sm_80", "sm_90", "gfx942")
"""A100 and its like, H100 and later, MI300."""

SIZES = (200, 4096, 16384)
"""Elements of a row: several rows for each program, one row, and the longest row."""

TYPICAL_SIZES = (4096,)
"""The sizes that models usually have: at these no kernel may spill."""

_ROWS = 1 << 17
_META = torch.device("meta")
_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
    torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class ExampleCompilation:
    """The argument types and constants for which a `@triton.jit` function is compiled.

    Args:
        signature: from the name of every argument, in order, to its Triton type, such as `{"x_ptr": "*bf16", "rows":
            "i32"}`. Arguments in `constants` have the type "constexpr".
        size: elements of a row, or the model of a generated kernel.
        constants: the values of the `constexpr` arguments. An absent pointer is None.
        num_warps: warps per program.
        aligned: names of the arguments that are pointers, or multiples of 16.
    """

    function: Any
    signature: Mapping[str, str]
    size: int | str
    constants: Mapping[str, object]
    num_warps: int
    aligned: frozenset[str]

    @property
    def name(self) -> str:
        """The name of the `@triton.jit` function."""
        return self.function.fn.__name__


def launched(call: Callable[[], object], size: int | str) -> list[ExampleCompilation]:
    """The kernels that a call on the meta device launches. None of them runs."""
    found: list[ExampleCompilation] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "is_interpreted", True)
        patch.setattr(Launch, "run", lambda launch, choice: found.append(_example(launch, choice, size)))
        call()
    return found


def _example(launch: Launch, choice: Choice, size: int | str) -> ExampleCompilation:
    names = list(launch.kernel.arg_names)
    given = dict(zip(names, launch.arguments, strict=False))
    signature = {name: _type_of(given.get(name)) for name in names}
    absent = {name: None for name, value in given.items() if value is None}
    aligned = {
        name for name, value in given.items() if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)
    }
    constants = {**absent, **launch.constants, **launch.blocks(choice)}
    return ExampleCompilation(launch.kernel, signature, size, constants, choice.num_warps, frozenset(aligned))


def _type_of(argument: object) -> str:
    if isinstance(argument, Tensor):
        return f"*{_TYPES[argument.dtype]}"
    if isinstance(argument, int):
        return "i32" if abs(argument) < 1 << 31 else "i64"
    return "fp32" if isinstance(argument, float) else "constexpr"


def examples() -> tuple[ExampleCompilation, ...]:
    """The kernels that bfloat16 calls of every hand-written kernel launch, each once for each of `SIZES`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [
            item
            for size in SIZES
            for name in CALLS
            for item in launched(lambda name=name, size=size: run(name, _ROWS, size, _META), size)
        ]
    finally:
        torch.set_default_dtype(before)
    return tuple({str(item): item for item in found}.values())


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
    """The compiler's attributes of the arguments in `aligned`: pointers and integers that are multiples of 16."""
    return {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(example.signature.items())
        if name in example.aligned and kind != "constexpr"
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
