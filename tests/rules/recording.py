"""Calls of operators, recorded while PyTorch runs: what rules are tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.registry import bound_rule, has_rule
from autoshard.testing.run_strategy import check_strategy


@dataclass(frozen=True)
class Call:
    """One call with its arguments as they were."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for calls that rules cannot tell apart."""
        return repr(pytree.tree_map_only(Tensor, _describe, (str(self.op), self.args, self.kwargs)))


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}{list(tensor.stride())}"


class Recorder(TorchDispatchMode):
    """Records the functional calls of operators below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}
        self.unruled: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if has_rule(func):
            copies = pytree.tree_map_only(Tensor, _copy, (tuple(args), dict(kwargs)))
            call = Call(func, *copies)
            self.calls.setdefault(call.key, call)
        else:
            self.unruled[str(func)] = self.unruled.get(str(func), 0) + 1
        return func(*args, **kwargs)


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides where they do not overlap."""
    if tensor.layout != torch.strided:
        return tensor
    return tensor.detach().clone(memory_format=torch.preserve_format)


def record(function: Callable[[], Any]) -> Recorder:
    """What `function` calls, forward, and backward where its results need gradients."""
    recorder = Recorder()
    with recorder:
        results = [leaf for leaf in pytree.tree_leaves(function()) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.randn_like(result) for result in results])
    return recorder


@dataclass
class Tally:
    """How much was tried."""

    calls: int = 0
    strategies: int = 0

    def check(self, calls: Iterable[Call], meshes: Iterable[Mesh]) -> None:
        """Try every strategy of every call on every mesh."""
        for call in calls:
            rules = self._rule(call)
            for rule in rules:
                self.calls += 1
                for mesh in meshes:
                    for strategy in enumerate_strategies(rule, mesh):
                        self.strategies += 1
                        check_strategy(call.op, call.args, call.kwargs, rule, strategy, mesh)

    def _rule(self, call: Call) -> Iterator[Any]:
        with torch.no_grad():
            results = pytree.tree_leaves(call.op(*call.args, **call.kwargs))
        tensors = [leaf for leaf in results if isinstance(leaf, Tensor)]
        rule = bound_rule(call.op, call.args, call.kwargs, tensors)
        if rule is not None:
            yield rule
