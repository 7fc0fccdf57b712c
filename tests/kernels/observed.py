"""Records the operators that ran within a context, and the size of the largest tensor that they made."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Observed(TorchDispatchMode):
    """Records the operators that ran, and the elements of the largest tensor that one made; `known` tensors do not
    count."""

    def __init__(self, *known: Tensor | None) -> None:
        super().__init__()
        self.known = {item.untyped_storage()._cdata for item in known if item is not None}
        self.elements = 0
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operators.add(str(func).removeprefix("aten.").removesuffix(".default"))
        for value in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self.known:
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return found
