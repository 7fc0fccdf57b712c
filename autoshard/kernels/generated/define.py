"""Defines each generated kernel as an operator `autoshard::triton_<operators>_<digest>` of torch.

The operator computes one group, with fixed shapes, strides and dtypes, on GPUs or in Triton's interpreter. An operand
with other strides is first copied. Tests compare a kernel with `Group.run`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from autoshard.kernels.generated.files import load_text, write_file
from autoshard.kernels.generated.group import Group, ValueShape
from autoshard.kernels.generated.source import ElementLayout, Source, write_source
from autoshard.kernels.launch import launch
from autoshard.kernels.library import define

_HEADER = '''"""{title}

Written by autoshard.kernels.generated; changes in this file are overwritten.
"""

import triton
import triton.language as tl
{imports}'''
_IMPORTS = {
    "autoshard.kernels.generated.functions": ("larger", "largest", "smaller", "smallest", "tanh"),
    "autoshard.kernels.triton_activations": ("activate", "slope"),
}


@dataclass(frozen=True, slots=True)
class GeneratedKernel:
    """A Triton kernel that was generated for `group`.

    Args:
        operator: torch's operator that runs the kernel.
        layout: the launch configuration.
        path: the file with the generated source.
    """

    group: Group
    operator: OpOverload
    layout: ElementLayout
    path: Path

    @property
    def name(self) -> str:
        """The operator's name, such as "autoshard::triton_mul_add_1a2b3c4d"."""
        return self.operator._schema.name


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A group of operators, and texts for its kernel's source.

    Args:
        names: a name for each value of the group: operands first, then the results of steps.
        purpose: the first lines of the kernel's docstring.
    """

    group: Group
    names: tuple[str, ...]
    purpose: str


_KERNELS: dict[OpOverload, GeneratedKernel] = {}
_OPERATORS: dict[Group, OpOverload] = {}


def generated_kernel(operator: Any) -> GeneratedKernel | None:
    """Return the generated kernel that `operator` runs, or None if the operator is not a generated one."""
    return _KERNELS.get(operator)


def define_kernels(groups: Sequence[NamedGroup], title: str) -> Mapping[Group, GeneratedKernel]:
    """Define kernels for groups of operators, and return a dict from each group to its kernel.

    All sources are written to one file, whose docstring begins with `title`. A group that has no kernel in this process
    yet gets a new operator.

    Raises:
        KernelError: the file cannot be written, or its folder cannot be made private to this user.
        NoLoopsError: a group cannot be computed by a kernel.
    """
    sources = {named.group: write_source(named.group, named.names, named.purpose) for named in groups}
    if not sources:
        return {}
    text = _file_text(title, [source.text for source in sources.values()])
    path = write_file(text)
    fresh = [group for group in sources if group not in _OPERATORS]
    module = load_text(text, path) if fresh else None
    for group in fresh:
        kernel = _define(group, sources[group], getattr(module, group.name), path)
        _KERNELS[kernel.operator], _OPERATORS[group] = kernel, kernel.operator
    return {group: _KERNELS[_OPERATORS[group]] for group in sources}


def _file_text(title: str, functions: Sequence[str]) -> str:
    body = "\n\n\n".join(functions)
    used = {module: [name for name in names if re.search(rf"\b{name}\(", body)] for module, names in _IMPORTS.items()}
    lines = [f"from {module} import {', '.join(names)}" for module, names in used.items() if names]
    imports = "\n".join(["", *lines, ""]) if lines else ""
    return f"{_HEADER.format(title=title, imports=imports)}\n\n{body}\n"


def _define(group: Group, source: Source, function: Any, path: Path) -> GeneratedKernel:
    taken = ", ".join(f"Tensor x{index}" for index in range(len(group.operands)))
    given = ", ".join(["Tensor"] * len(group.results))
    schema = f"({taken}) -> {given if len(group.results) == 1 else f'({given})'}"
    operator = define(group.name, schema, _launcher(group, source.layout, function), _empty_results(group))
    return GeneratedKernel(group, operator, source.layout, path)


def _empty_results(group: Group) -> Callable[..., Any]:
    def empty_results(*operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        device = _device_of(operands)
        made = tuple(group.values[index].empty(device) for index in group.results)
        return made[0] if len(made) == 1 else made

    return empty_results


def _launcher(group: Group, layout: ElementLayout, function: Any) -> Callable[..., Any]:
    def run(*operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        device = _device_of(operands)
        fitted = [_fit(item, form, device) for item, form in zip(operands, group.operands, strict=True)]
        stored = tuple(group.values[index].empty(device) for index in group.results)
        # The interpreter also computes masked elements, for which NumPy would warn of a logarithm of 0.
        with np.errstate(all="ignore"):
            options = {"num_warps": layout.num_warps, "tunable": layout.tunable}
            launch(function, layout.grid, device, *fitted, *stored, **layout.blocks, **options)
        return stored[0] if len(stored) == 1 else stored

    return run


def _device_of(operands: Sequence[Tensor]) -> torch.device:
    """Return the device of the first operand with dims, because operands without dims may be on the host."""
    return next((item.device for item in operands if item.dim()), operands[0].device)


def _fit(operand: Tensor, form: ValueShape, device: torch.device) -> Tensor:
    """Return `operand`, or a copy of it on `device` with the strides of `form`, for which the kernel was written."""
    if operand.device == device and form.describes(operand):
        return operand
    fitted = form.empty(device)
    once, source = fitted, operand
    for dim, stride in enumerate(form.stride):
        if stride == 0:  # one element in memory stands for all along this dim
            once, source = once.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    once.copy_(source)
    return fitted
