"""The second way of tracing, for models that branch on the values of tensors.

`if mask.all():` needs a value that a fake tensor does not have. `ConcreteValues` pairs a traced tensor with a real
tensor, its twin, if all operands of its operator have twins. When Python reads a value, the twin answers, and the read
tensor becomes a guarded output of the trace. So a later call with another value is noticed. Twins of parameters would
mean running the whole model, and are made only if a read depends on a parameter.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.errors import TraceError
from autoshard.tracing.bags import BAGS
from autoshard.tracing.counted import COUNTED, is_counted
from autoshard.tracing.dense import sparse_coo_tensor
from autoshard.tracing.masked import ASSIGNMENTS
from autoshard.tracing.provenance import user_line
from autoshard.tracing.replaced import replaced
from autoshard.tracing.symbolic_counts import SYMBOLIC, SymbolicCounts, ValueUnavailableError

Value = bool | int | float
_READ = torch.ops.aten._local_scalar_dense.default
_EQUAL = torch.ops.aten.equal.default


@dataclass(slots=True)
class ConcreteReads:
    """The values that Python code read during the trace, in order, and the tensors from which it read them."""

    values: list[Value] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, tensor: Tensor, value: Value) -> Value:
        """Record that Python read `value` from `tensor`, and return the value."""
        self.tensors.append(tensor)
        self.values.append(value)
        return value


class ConcreteValues(TorchDispatchMode):
    """Computes a real twin of each traced tensor, and answers Python's reads of values from the twins.

    Args:
        known: pairs of a traced tensor and its real twin.
        counts: records numbers of rows as symbols; None: the program has the example's numbers of rows.
    """

    def __init__(self, known: Iterable[tuple[Tensor, Tensor]], counts: SymbolicCounts | None = None) -> None:
        super().__init__()
        self.reads = ConcreteReads()
        self._counts = counts
        self._twins = WeakTensorKeyDictionary()
        self._stale: set[int] = set()
        for traced, real in known:
            with _disable_current_modes():
                self._twins[traced] = real.detach().clone()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _READ:
            return self.reads.add(args[0], self._run_on_twins(func, args, kwargs))
        if func is _EQUAL:
            return self.reads.add(_is_equal(*args), self._run_on_twins(func, args, kwargs))
        if is_counted(func, args, kwargs):
            result = self._run_counted(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or not self._has_twins((args, kwargs)):
            self._spoil_written(func, args)
        else:
            self._pair(result, self._run_on_twins(func, args, kwargs))
        return result

    def _run_counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._counts is not None and func in SYMBOLIC:
            return SYMBOLIC[func](self._nonzero, *args, **kwargs)
        return COUNTED[func](self._count, *args, **kwargs)

    def _nonzero(self, mask: Tensor) -> Tensor:
        assert self._counts is not None, "sizes are symbols"
        if any(isinstance(size, int) and size == 0 for size in mask.shape):  # symbols of sizes get no guard
            return torch.ops.aten.nonzero_static.default(mask, size=0)
        places = torch.ops.aten.nonzero.default(mask)
        is_known = self._twin(mask) is not None
        number = self._run_on_twins(lambda twin: int(torch.count_nonzero(twin)), (mask,), {}) if is_known else None
        self._counts.add(mask, places, number)
        return places

    def _count(self, function: Callable[[Tensor], Tensor], tensor: Tensor) -> int:
        value = self._run_on_twins(lambda twin: int(function(twin)), (tensor,), {})
        return int(self.reads.add(function(tensor), value))

    def _run_on_twins(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._has_twins((args, kwargs)):
            raise ValueUnavailableError(str(func))
        args, kwargs = pytree.tree_map_only(Tensor, self._twin, (args, kwargs))
        with _disable_current_modes(), torch._C._DisablePythonDispatcher(), torch.no_grad():
            return func(*args, **kwargs)

    def _twin(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, (FakeTensor, FunctionalTensor)):
            return None if tensor.is_meta else tensor
        twin = self._twins.get(tensor)
        return None if twin is None or _storage(twin) in self._stale else twin

    def _has_twins(self, arguments: Any) -> bool:
        return all(self._twin(leaf) is not None for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))

    def _pair(self, traced: Any, real: Any) -> None:
        for traced_leaf, real_leaf in zip(pytree.tree_leaves(traced), pytree.tree_leaves(real), strict=True):
            if isinstance(traced_leaf, Tensor) and isinstance(real_leaf, Tensor):
                self._twins[traced_leaf] = real_leaf

    def _spoil_written(self, func: Any, args: tuple[Any, ...]) -> None:
        """Mark the real twins of the tensors that `func` wrote to, and all views of these twins, as out of date."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            twin = self._twin(value) if argument.is_write and isinstance(value, Tensor) else None
            if twin is not None:
                self._stale.add(_storage(twin))


def _is_equal(first: Tensor, second: Tensor) -> Tensor:
    if first.shape != second.shape:
        return torch.zeros((), dtype=torch.bool, device=first.device)
    return (first == second).all()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def answer_reads(
    known: Iterable[tuple[Tensor, Tensor]] | None, counts: SymbolicCounts | None = None
) -> Iterator[ConcreteReads]:
    """Within the context, answer Python's reads of tensor values; yield the record of these reads.

    `known` and `counts` are those of `ConcreteValues`. If both are None, a read raises torch's error for fake tensors.
    """
    if known is None and counts is None:
        with _Rewrites():
            yield ConcreteReads()
        return
    with ConcreteValues(known or (), counts) as mode, _read_by_item(), _Rewrites():
        yield mode.reads


def _read_by_item() -> contextlib.AbstractContextManager[None]:
    """Return a context in which `tolist` and formatting of traced tensors read numbers by `item`.

    torch's own versions read memory, so `ConcreteValues` would not see them.
    """
    return replaced({(FunctionalTensor, "tolist"): _to_list, (FunctionalTensor, "__format__"): _format})


def _to_list(self: Tensor) -> Any:
    return self.item() if self.dim() == 0 else [_to_list(row) for row in self.unbind()]


def _format(self: Tensor, format_spec: str) -> str:
    return format(self.item(), format_spec) if self.dim() == 0 else object.__format__(self, format_spec)


class _Rewrites(TorchFunctionMode):
    """Replaces calls of torch that would read values of tensors by equal calls that do not."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _REWRITTEN.get(func, func)(*args, **(kwargs or {}))


def _tensor(data: Any, **options: Any) -> Tensor:
    """Return `torch.tensor(data, **options)`, but read scalar tensors in lists by `item`."""
    if isinstance(data, (FakeTensor, FunctionalTensor)):
        return data.detach().clone().to(device=options.get("device"), dtype=options.get("dtype"))
    if isinstance(data, (list, tuple)):
        data = pytree.tree_map_only(Tensor, _to_list, data)
    return torch.tensor(data, **options)


def _resize(x: Tensor, *size: Any, **options: Any) -> Tensor:
    try:
        return x.resize_(*size, **options)
    except RuntimeError as error:  # torch's functionalisation has no other
        where = user_line(sys._getframe(1))
        raise TraceError(
            f"The model resizes a tensor of shape={tuple(x.shape)} in forward{f' at {where}' if where else ''}, but "
            "buffers of a program keep their shapes. If the first call sets them (FakeQuantize for each channel), "
            "call the model once before compile."
        ) from error


_REWRITTEN: Mapping[Any, Callable[..., Any]] = {
    torch.tensor: _tensor,
    Tensor.resize_: _resize,
    torch.sparse_coo_tensor: sparse_coo_tensor,
    **ASSIGNMENTS,
    **BAGS,
}
