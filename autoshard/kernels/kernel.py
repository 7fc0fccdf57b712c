"""Descriptions of fused kernels: the calls of other operators that a kernel may replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import Tensor
from torch._ops import OpOverload


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
        """Names of the arguments of `compose` after `like`, in order. `*args` stands for the derived variables."""
        parameters = signature(self.compose).parameters.values()
        names = [item.name for item in parameters if item.kind is not item.VAR_POSITIONAL]
        return tuple(dict.fromkeys((*names[1:], *self.derived_variables)))

    def results(self, like: Tensor, variables: Mapping[str, Any]) -> tuple[Any, ...]:
        """Call `compose` with variables by name, and return its results as a tuple."""
        results = self.compose(like, *(variables[name] for name in self.variables))
        return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A Triton kernel that computes several operators at once.

    Args:
        operator: the operator of the library "autoshard" that runs the kernel, a result of `define_kernel`.
        forms: the groups of calls that the kernel may replace.
        allowed_readers: operators outside the kernel that may read the kernel's intermediate values. With another
            reader, the value would be computed both outside and inside the kernel, so the kernel is not used. None
            allows any reader.
    """

    operator: OpOverload
    forms: tuple[Form, ...]
    allowed_readers: frozenset[OpOverload] | None = None

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
