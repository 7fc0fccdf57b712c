"""What is known of a Triton kernel: the operator it may stand in for, when, and how to compile it ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class Specimen:
    """One representative compilation of a `@triton.jit` function.

    Args:
        function: the `@triton.jit` function.
        signature: every argument's triton type in order, e.g. `{"x_ptr": "*bf16", "rows": "i32"}`;
            "constexpr" for those in `constants`.
        constants: the values of the `constexpr` arguments (None for an absent pointer).
        num_warps: warps per program.
    """

    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.fn.__name__


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton implementation of an operator.

    Args:
        operator: the operator that it may stand in for.
        replacement: takes the same arguments and gives the same results, so that rewriting a node is
            changing its target. Results may be wider: statistics are float32 where ATen's are half.
        why_not: called with the operator's own arguments (fake tensors will do); None where the kernel
            applies, else the reason, one sentence. It does not look at the device: plans for a GPU are made
            on machines without one.
        specimens: compilations that tests and cost models may ask for.
    """

    operator: OpOverload
    replacement: OpOverload
    why_not: Callable[..., str | None]
    specimens: tuple[Specimen, ...]

    @property
    def name(self) -> str:
        """The replacement's name, e.g. "autoshard::triton_layer_norm"."""
        return self.replacement._schema.name


def specimen(function: Any, types: str, constants: Mapping[str, object], num_warps: int = 4) -> Specimen:
    """A `Specimen` from the types of the run-time arguments in order, separated by spaces.

    A type `None` is an absent pointer; arguments after the last type are the `constexpr` ones.
    """
    names = list(function.arg_names)
    given = types.split()
    signature = {name: kind if kind != "None" else "constexpr" for name, kind in zip(names, given, strict=False)}
    signature |= dict.fromkeys(names[len(given) :], "constexpr")
    absent = {name: None for name, kind in zip(names, given, strict=False) if kind == "None"}
    return Specimen(function, signature, absent | dict(constants), num_warps)
