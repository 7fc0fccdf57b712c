"""Liger-Kernel's functions for `tests.benchmarks.gpu_kernels`, if the package is installed.

    pip install liger-kernel        (the signatures are of version 0.8.5)

Reference: Hsu et al., "Liger Kernel: efficient Triton kernels for LLM training" (2024). The package has no attention
over whole sequences, no bias before a norm, and no permutation, grouped product or optimizer. Some functions overwrite
their inputs. Repeated runs then compute other numbers with equal work.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def version() -> str | None:
    """Return the installed version, or None."""
    return importlib.metadata.version("liger-kernel") if importlib.util.find_spec("liger_kernel") else None


@dataclass(frozen=True, slots=True)
class Liger:
    """A call of one of Liger's autograd functions.

    Args:
        function: its name in `liger_kernel.ops`.
        arguments: arguments of its `apply`.
        grads: gradients of its first results; without gradients the forward is timed.
        with_forward: with `grads`, whether the forward is timed with the backward.
    """

    function: str
    arguments: tuple[Any, ...]
    grads: tuple[Tensor, ...] = ()
    with_forward: bool = False

    def check(self) -> None:
        """Raise `TypeError` if the installed function does not take these arguments."""
        inspect.signature(self._function.forward).bind(None, *self.arguments)

    def prepare(self) -> Callable[[], Any]:
        """Return the function to be timed."""
        leaves = tuple(
            x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in self.arguments
        )
        inputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]

        def forward() -> tuple[Tensor, ...]:
            results = self._function.apply(*leaves)
            return results if isinstance(results, tuple) else (results,)

        def backward(results: tuple[Tensor, ...]) -> Any:
            used = results[: len(self.grads)]
            grads = [grad.to(result.dtype) for grad, result in zip(self.grads, used, strict=True)]
            return torch.autograd.grad(used, inputs, grads, retain_graph=True, allow_unused=True)

        if not self.grads:
            return torch.no_grad()(forward)
        if self.with_forward:
            return lambda: backward(forward())
        results = forward()
        return lambda: backward(results)

    @property
    def _function(self) -> Any:
        return getattr(importlib.import_module("liger_kernel.ops"), self.function)
