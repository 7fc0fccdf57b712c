"""Fake tensors for the values that a rank holds in lowered programs. All have one fake mode and one cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_MOST = 1 << 14
"""The most cached values. Each takes about 2 kB."""

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

_SAME_ON_META = frozenset(
    {
        _aten.clone.default,
        _aten.constant_pad_nd.default,
        _aten.contiguous.default,
        _aten.narrow.default,
        _aten.permute.default,
        _aten.reshape.default,
        _aten.view.default,
        _aten.where.ScalarOther,
        _c10d.all_gather_into_tensor.default,
        _c10d.all_reduce.default,
        _c10d.all_to_all_single.default,
        _c10d.reduce_scatter_tensor.default,
        _c10d.wait_tensor.default,
    }
)
"""Operators of reshards, whose results have the same shape, strides and dtype on every device.

They run on meta tensors, which is 30 times as fast as on fake tensors (0.04 ms in place of 1.2 ms for a view).
"""


class LocalFakes:
    """A cache of fake values, because these are slow to make.

    The key, `form`, contains everything on which the fake value depends. A full cache is emptied.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: dict[Hashable, Any] = {}

    def result(self, form: Hashable, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the fake result of `target(*args, **kwargs)`, from the cache if `form` is there."""
        return self._known(form, lambda: self._evaluate(target, args, kwargs))

    def piece(self, form: Hashable, like: torch.Tensor, on_meta: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a fake tensor with shape, strides and dtype of the result of `on_meta`, on the device of `like`.

        The tensor is cached under `form`. If `like` is a meta tensor, the result is a meta tensor too.
        """

        def made() -> torch.Tensor:
            value = on_meta()
            return value if _is_on_meta(like) else FakeTensor(self._mode, value, like.device)

        return self._known(form, made)

    def _known(self, form: Hashable, made: Callable[[], Any]) -> Any:
        if form not in self._values:
            if len(self._values) >= _MOST:
                self._values.clear()
            self._values[form] = made()
        return self._values[form]

    def _evaluate(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if _is_on_meta(args[0]):
            return target(*args, **kwargs)  # a program on meta, made only to be counted
        if target in _SAME_ON_META and isinstance(args[0], FakeTensor):
            with in_kernel_invocation_manager(self._mode):
                value = target(*args, **kwargs)
            return value if value is args[0] else FakeTensor(self._mode, value, args[0].device)
        with self._mode:
            return target(*args, **kwargs)


def _is_on_meta(value: Any) -> bool:
    """Whether a value is a plain meta tensor, not a fake tensor."""
    return isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, FakeTensor)


LOCAL_FAKES = LocalFakes()
