"""Descriptions of Triton kernels: the calls that they may replace, their conditions, and their specialisations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from autoshard.kernels.launch import Tile

# Specimens of kernels over rows have rows of these sizes: several rows per program, one row, and the longest row.
SPECIMEN_COLUMNS = (200, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Specimen:
    """One representative specialisation of a `@triton.jit` function.

    Args:
        function: the `@triton.jit` function.
        signature: the triton type of every argument in order, such as `{"x_ptr": "*bf16", "rows": "i32"}`;
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
        operator: the operator that it may replace.
        replacement: an operator with the same arguments and results, so that rewriting a node only changes its
            target. Results may have wider dtypes: statistics are float32 where ATen's are half.
        why_not: called with the operator's own arguments, real or fake. Returns the reason that the kernel does not
            apply, one sentence, or None. It ignores the device, because plans for a GPU are made without one.
        specimens: specialisations for tests and cost models.
    """

    operator: OpOverload
    replacement: OpOverload
    why_not: Callable[..., str | None]
    specimens: tuple[Specimen, ...]

    @property
    def name(self) -> str:
        """The replacement's name, such as "autoshard::triton_layer_norm"."""
        return self.replacement._schema.name


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One way to write the computation of a fused kernel as calls of other operators; also its reference.

    The operator of the first result depends only on the result's dtype. So most calls are known not to match before
    the form is written for their shape.

    Args:
        compose: `compose(like, *variables)` returns the results, or the only one. `like` is a tensor with the first
            result's shape, dtype and device; the variables are named as the kernel's arguments. None stands for a
            result that this form lacks, which no operator may then read.
        constants: computes the kernel's other arguments by name from `like`.
        free: for variables of `compose` that the kernel does not take, by name: functions of its arguments.
        dims: the number of dims of the first result; None for any number above 0.
    """

    compose: Callable[..., Any]
    constants: Callable[[Tensor], Mapping[str, object]] = lambda like: {}
    free: Mapping[str, Callable[[Mapping[str, Any]], object]] = field(default_factory=dict)
    dims: int | None = None

    def may_yield(self, like: Tensor) -> bool:
        """Whether the first result can be like this: a float tensor with the right number of dims."""
        return like.is_floating_point() and like.dim() > 0 and self.dims in (None, like.dim())

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of `compose`'s arguments after `like`."""
        return tuple(signature(self.compose).parameters)[1:]

    def results(self, like: Tensor, variables: Mapping[str, Any]) -> tuple[Any, ...]:
        """The results of `compose`, as a tuple."""
        results = self.compose(like, *(variables[name] for name in self.variables))
        return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """An implementation of several operators at once, in Triton except for `biased_product`.

    Args:
        operator: our operator that runs the kernel; functional and opaque.
        why_not: called with its arguments, real or fake; returns the reason that it does not apply, or None.
        forms: the calls that it may replace.
        specimens: specialisations for tests and cost models.
        allowed_readers: the only operators outside the kernel that may read a value which the kernel computes again. A
            costly value pays off only if it is not computed elsewhere too. None: any operator may read it.
        keeps_place: whether the call stays at the position of its first result, beside the communication that it
            hides. Otherwise it moves as early as its operands allow.
    """

    operator: OpOverload
    why_not: Callable[..., str | None]
    forms: tuple[Form, ...]
    specimens: tuple[Specimen, ...]
    allowed_readers: frozenset[OpOverload] | None = None
    keeps_place: bool = False

    @property
    def name(self) -> str:
        """The operator's name, such as "autoshard::triton_gated"."""
        return self.operator._schema.name

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the operator's arguments."""
        return tuple(argument.name for argument in self.operator._schema.arguments)

    @property
    def tensors(self) -> frozenset[str]:
        """The names of the arguments that are tensors or optional tensors."""
        arguments = self.operator._schema.arguments
        return frozenset(item.name for item in arguments if str(item.type) in ("Tensor", "Optional[Tensor]"))


def specimen(function: Any, types: str, tile: Tile, size: int, **constants: object) -> Specimen:
    """A `Specimen` from the types of the run-time arguments in order, separated by spaces.

    Args:
        function: the `@triton.jit` function; its last two arguments are BLOCK_R and BLOCK_C.
        types: triton types, such as `"*bf16 i32"`; None is an absent pointer.
        tile: the values of BLOCK_R and BLOCK_C, and the warps.
        size: elements of a row.
        constants: the values of the other `constexpr` arguments.
    """
    blocks = {"BLOCK_R": tile.rows, "BLOCK_C": tile.columns}
    return block_specimen(function, types, size, tile.num_warps, **constants, **blocks)


def block_specimen(function: Any, types: str, size: int, num_warps: int, **constants: object) -> Specimen:
    """A `Specimen` of a function with any block sizes among its constants; arguments as for `specimen`."""
    names, kinds = list(function.arg_names), types.split()
    absent = {name: None for name, kind in zip(names, kinds, strict=False) if kind == "None"}
    kinds_of = dict(zip(names, kinds, strict=False)) | dict.fromkeys(absent, "constexpr")
    kinds_of |= dict.fromkeys(names[len(kinds) :], "constexpr")
    return Specimen(function, kinds_of, size, absent | constants, num_warps)
