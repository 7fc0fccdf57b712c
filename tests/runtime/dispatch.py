"""Record the operators that a block of code dispatches."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class RecordDispatch(TorchDispatchMode):
    """A mode that records the names of operators, on plain tensors and on DTensors apart."""

    def __init__(self) -> None:
        super().__init__()
        self.local: list[str] = []
        self.on_dtensors: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        (self.on_dtensors if DTensor in types else self.local).append(str(func))
        return func(*args, **(kwargs or {}))
