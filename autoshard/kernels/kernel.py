"""What is known of a Triton kernel: which calls it may stand in for, when, and how to compile it ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from autoshard.kernels.launch import Tile

# Specimens of kernels over rows are made for rows of these many elements: several rows a program, one, the longest.
SPECIMEN_COLUMNS = (200, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Specimen:
    """One representative compilation of a `@triton.jit` function.

    Args:
        function: the `@triton.jit` function.
        signature: every argument's triton type in order, e.g. `{"x_ptr": "*bf16", "rows": "i32"}`;
            "constexpr" for those in `constants`.
        size: elements of a row.
        constants: the values of the `constexpr` arguments (None for an absent pointer).
        num_warps: warps per program.
    """

    function: Any
    signature: Mapping[str, str]
    size: int
    constants: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.fn.__name__


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton implementation of one operator.

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


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One way to write what a fused kernel computes as calls of other operators; also its reference.

    Which operator gives the first result depends on the result's dtype alone, so that most calls are seen not to be of
    a form before it is written down for their shape.

    Args:
        compose: `compose(like, *variables)`, where `like` is a tensor with the first result's shape, dtype and device,
            and the variables' names are those of the kernel's own arguments; gives its results, or the one. None
            stands for a result that this form does not have, which is then not to be read.
        constants: from `like`, the kernel's other arguments by name.
        free: variables of `compose` that the kernel does not take, by name: their value from its arguments.
        dims: how many dims the first result has; None for any number but none.
    """

    compose: Callable[..., Any]
    constants: Callable[[Tensor], Mapping[str, object]] = lambda like: {}
    free: Mapping[str, Callable[[Mapping[str, Any]], object]] = field(default_factory=dict)
    dims: int | None = None

    def may_yield(self, like: Tensor) -> bool:
        """Whether the first result may be like this: a float tensor of the right number of dims."""
        return like.is_floating_point() and like.dim() > 0 and self.dims in (None, like.dim())

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of `compose`'s arguments after `like`."""
        return tuple(signature(self.compose).parameters)[1:]

    def results(self, like: Tensor, variables: Mapping[str, Any]) -> tuple[Any, ...]:
        """What `compose` gives, as a tuple."""
        results = self.compose(like, *(variables[name] for name in self.variables))
        return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """An implementation of several operators at once, in Triton but for `biased_product`.

    Args:
        operator: the operator of ours that runs the kernel; functional and opaque.
        why_not: called with its arguments (fake tensors will do); None where it applies, else the reason.
        forms: the calls that it may stand in for.
        specimens: compilations that tests and cost models may ask for.
        readers_of_anew: the operators that alone may read, elsewhere, a value that the kernel computes anew: where it
            is dear, the kernel pays only if the value is then computed nowhere else. None where any may read it.
        keeps_place: whether the call stays where its first result was computed, beside the communication that it hides,
            rather than come as early as its operands allow.
    """

    operator: OpOverload
    why_not: Callable[..., str | None]
    forms: tuple[Form, ...]
    specimens: tuple[Specimen, ...]
    readers_of_anew: frozenset[OpOverload] | None = None
    keeps_place: bool = False

    @property
    def name(self) -> str:
        """The operator's name, e.g. "autoshard::triton_gated"."""
        return self.operator._schema.name

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the operator's arguments."""
        return tuple(argument.name for argument in self.operator._schema.arguments)

    @property
    def tensors(self) -> frozenset[str]:
        """The names of the arguments that are tensors, or may be None in place of one."""
        arguments = self.operator._schema.arguments
        return frozenset(item.name for item in arguments if str(item.type) in ("Tensor", "Optional[Tensor]"))


def specimen(function: Any, types: str, tile: Tile, size: int, **constants: object) -> Specimen:
    """A `Specimen` from the types of the run-time arguments in order, separated by spaces.

    Args:
        function: the `@triton.jit` function; its last two arguments are BLOCK_R and BLOCK_C.
        types: triton types, e.g. `"*bf16 i32"`; None is an absent pointer.
        tile: the values of BLOCK_R and BLOCK_C, and the warps.
        size: elements of a row.
        constants: the values of the other `constexpr` arguments.
    """
    blocks = {"BLOCK_R": tile.rows, "BLOCK_C": tile.columns}
    return block_specimen(function, types, size, tile.num_warps, **constants, **blocks)


def block_specimen(function: Any, types: str, size: int, num_warps: int, **constants: object) -> Specimen:
    """As `specimen`, for a function with any block sizes among its constants."""
    names, kinds = list(function.arg_names), types.split()
    absent = {name: None for name, kind in zip(names, kinds, strict=False) if kind == "None"}
    kinds_of = dict(zip(names, kinds, strict=False)) | dict.fromkeys(absent, "constexpr")
    kinds_of |= dict.fromkeys(names[len(kinds) :], "constexpr")
    return Specimen(function, kinds_of, size, absent | constants, num_warps)
