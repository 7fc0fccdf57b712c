"""Measure the memory of this process's tensors operator by operator, like an allocator's peak on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.runtime.agreement.digests import table_on


class LiveMemory(TorchDispatchMode):
    """Count the bytes of living storages: results of operators within this context, and given storages.

    Memory that a kernel allocates and frees inside one operator is not counted.

    Args:
        held: living tensors: parameters, buffers, inputs.
        apart: tensors that are not counted, with their views.
    """

    def __init__(self, held: Iterable[Tensor] = (), apart: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._apart = {StorageWeakRef(tensor.untyped_storage()) for tensor in apart}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0
        for tensor in held:
            self._add(tensor)

    @property
    def live_bytes(self) -> int:
        """Bytes in use now."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _add(self, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in self._apart:
            self._live[reference.cdata] = (reference, storage.nbytes())


def peak_bytes_of(step: Any, held: Iterable[Tensor]) -> int:
    """Return the largest number of bytes in use during `step()` with `held`, the least of three runs.

    Gloo's threads hold the tensors of a collective a moment beyond the wait, long enough to count in one step of a
    hundred. The table by which ranks digest their comparisons is left out, because the table belongs to the process.
    """
    held = [tensor.detach() for tensor in held]
    tables = [table_on(device) for device in {tensor.device for tensor in held}]
    peaks = []
    for _ in range(3):
        with LiveMemory(held, tables) as memory:
            step()
        peaks.append(memory.peak_bytes)
    return min(peaks)
