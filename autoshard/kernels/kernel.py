"""Descriptions of kernels: the calls that a kernel may replace, its conditions, and examples of its compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from autoshard.kernels.launch import Tile

# Sizes of rows in example compilations: several rows per program, one row, and the longest row.
EXAMPLE_COLUMNS = (200, 4096, 16384)


@dataclass(frozen=True, slots=True)
class ExampleCompilation:
    """The argument types and constants for which a `@triton.jit` function is compiled once, as an example.

    Args:
        signature: from the name of every argument, in order, to its Triton type, such as `{"x_ptr": "*bf16", "rows":
            "i32"}`. Arguments in `constants` have the type "constexpr".
        size: elements of a row.
        constants: the values of the `constexpr` arguments. An absent pointer is None.
        num_warps: warps per program.
    """

    function: Any
    signature: Mapping[str, str]
    size: int
    constants: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4

    @property
    def name(self) -> str:
        """The name of the `@triton.jit` function."""
        return self.function.fn.__name__


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton implementation of one operator.

    Args:
        operator: the operator that the kernel may replace.
        replacement: an operator with the same arguments and results that runs the kernel. A pass only changes the
            target of a node. Results may have wider dtypes: statistics are float32 where ATen's have 16 bits.
        why_not: takes the operator's arguments, real or fake. Returns None if the kernel applies, else the reason in
            one sentence. It ignores the device, because plans for a GPU are made without one.
    """

    operator: OpOverload
    replacement: OpOverload
    why_not: Callable[..., str | None]
    examples: tuple[ExampleCompilation, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One way to write the computation of a fused kernel as calls of other operators.

    A pass searches a graph for these calls and replaces them by the kernel. Tests use the calls as the reference.

    `compose` may choose the operator of the first result by the dtype of `like`, but not by its shape. So the search
    can discard most calls before it traces `compose` for their shapes.

    Args:
        compose: `compose(like, *variables)` returns a tuple of results, or the only result. `like` is a tensor with the
            first result's shape, dtype and device. The variables have the names of the kernel's arguments. None stands
            for a result of the kernel that these calls do not compute.
        constants: maps `like` to the kernel's arguments that are not variables, by name.
        derived_variables: a function for each variable of `compose` that is no argument of the kernel, by the
            variable's name. The function takes a dict of the kernel's arguments by name, and returns the variable's
            value.
        dims: the number of dims of the first result, or None for any number above 0.
    """

    compose: Callable[..., Any]
    constants: Callable[[Tensor], Mapping[str, object]] = lambda like: {}
    derived_variables: Mapping[str, Callable[[Mapping[str, Any]], object]] = field(default_factory=dict)
    dims: int | None = None

    def may_yield(self, like: Tensor) -> bool:
        """Whether `like` can be the first result of the form: a float tensor with `dims` dims."""
        return like.is_floating_point() and like.dim() > 0 and self.dims in (None, like.dim())

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the arguments of `compose` after `like`, in order."""
        return tuple(signature(self.compose).parameters)[1:]

    def results(self, like: Tensor, variables: Mapping[str, Any]) -> tuple[Any, ...]:
        """Call `compose` with variables by name, and return its results as a tuple."""
        results = self.compose(like, *(variables[name] for name in self.variables))
        return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A kernel that computes several operators at once. All are Triton kernels except `biased_product`.

    Args:
        operator: the operator of the library "autoshard" that runs the kernel. It is functional and opaque.
        why_not: takes the operator's arguments, real or fake. Returns None if the kernel applies, else the reason.
        forms: the groups of calls that the kernel may replace.
        allowed_readers: operators outside the kernel that may read the kernel's intermediate values. With another
            reader, the value would be computed both outside and inside the kernel, so the kernel is not used. None
            allows any reader.
        keeps_place: whether the kernel's call stays at the position of its first result, beside the communication that
            it hides. Otherwise the call moves as early as its operands allow.
    """

    operator: OpOverload
    why_not: Callable[..., str | None]
    forms: tuple[Form, ...]
    examples: tuple[ExampleCompilation, ...]
    allowed_readers: frozenset[OpOverload] | None = None
    keeps_place: bool = False

    @property
    def name(self) -> str:
        """The operator's name with its namespace, such as "autoshard::triton_gated"."""
        return self.operator._schema.name

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the operator's arguments, in order."""
        return tuple(argument.name for argument in self.operator._schema.arguments)

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the arguments that are tensors or optional tensors."""
        arguments = self.operator._schema.arguments
        return frozenset(item.name for item in arguments if str(item.type) in ("Tensor", "Optional[Tensor]"))


def example(function: Any, types: str, tile: Tile, size: int, **constants: object) -> ExampleCompilation:
    """Return an `ExampleCompilation` of a function that has BLOCK_R and BLOCK_C as its last arguments.

    Args:
        types: the Triton types of the arguments that are not `constexpr`, in order and separated by spaces, such as
            `"*bf16 i32"`. The word None stands for an absent pointer.
        tile: the values of BLOCK_R and BLOCK_C, and the warps.
        size: elements of a row.
        constants: the values of the other `constexpr` arguments.
    """
    blocks = {"BLOCK_R": tile.rows, "BLOCK_C": tile.columns}
    return block_example(function, types, size, tile.num_warps, **constants, **blocks)


def block_example(function: Any, types: str, size: int, num_warps: int, **constants: object) -> ExampleCompilation:
    """Return an `ExampleCompilation` of a function whose block sizes are among `constants`.

    The other arguments have the same meaning as in `example`. `num_warps` is the number of warps of a program.
    """
    names, kinds = list(function.arg_names), types.split()
    absent = {name: None for name, kind in zip(names, kinds, strict=False) if kind == "None"}
    kinds_of = dict(zip(names, kinds, strict=False)) | dict.fromkeys(absent, "constexpr")
    kinds_of |= dict.fromkeys(names[len(kinds) :], "constexpr")
    return ExampleCompilation(function, kinds_of, size, absent | constants, num_warps)
