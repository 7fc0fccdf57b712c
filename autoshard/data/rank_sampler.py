"""`sampler` returns a `RankSampler`: this rank's rows of each batch, for the user's own `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from autoshard.data.rows import RankRows, micro_batches_of, module_of, order_of, rows_of
from autoshard.errors import NotAvailableError, TraceError
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep

_HINT = "load with DataLoader(dataset, sampler=rows, batch_size=rows.batch_size)"


class RankSampler(Sampler[int]):
    """This rank's rows of each global batch, in the batch's order. Made by `sampler`.

    Args:
        length: samples of the dataset. Samples behind the last whole batch are not drawn.
        rows: the rows of a batch that this rank loads.
        shuffle: draw each epoch in another random order, the same on all ranks.
        seed: seed of the random order.
    """

    def __init__(self, length: int, rows: RankRows, *, shuffle: bool = True, seed: int = 0) -> None:
        self.length, self._rows = length, rows
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    @property
    def batch_size(self) -> int:
        """Rows of a step's batch that this rank loads: for `DataLoader(dataset, batch_size=..., sampler=...)`."""
        return len(self._rows.of(self._rows.batch))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which with `seed` determines the random order. Call it before each epoch, on all ranks."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = order_of(self.length, self.epoch, shuffle=self.shuffle, seed=self.seed)
        whole = order[: self.length // self._rows.batch * self._rows.batch].view(-1, self._rows.batch)
        return iter(whole[:, self._rows.of(self._rows.batch)].flatten().tolist())

    def __len__(self) -> int:
        return self.length // self._rows.batch * self.batch_size

    def whole(self, batch: Any) -> Any:
        """Return the global batch as DTensors of this rank's rows; without processes, the rows themselves.

        For a step with micro-batches, each tensor becomes a `CutBatch`, with one DTensor for each micro-batch. Only the
        step can read a `CutBatch`.

        Args:
            batch: a pytree from the loader: tensors of `batch_size` rows, and other values.

        Raises:
            TraceError: a tensor has another number of rows.
        """
        return self._rows.whole(batch, self._rows.batch, _HINT)


def sampler(dataset: Sized, sharded: ShardedModule | TrainStep, *, shuffle: bool = True, seed: int = 0) -> RankSampler:
    """Return a sampler of the rows that this rank needs by the plan of `sharded`.

    The rows of all ranks together are the batch that one device would load. If the plan splits inputs by another dim
    than the first, or two inputs have different splits, each rank loads all rows.

    Args:
        dataset: a dataset for `torch.utils.data.DataLoader`, with a length.
        sharded: result of `compile` for the batch of a step: pass `example_inputs=`, or call it once.
        shuffle: draw each epoch in another random order, the same on all ranks.
        seed: seed of the random order.

    Raises:
        TraceError: `sharded` is not a result of `compile`, or nothing is compiled yet.
        NotAvailableError: the dataset has no length or is smaller than a batch; or the inputs have no common batch; or
            the model is a pipeline.

    Example:
        >>> import torch, autoshard
        >>> model, mesh = torch.nn.Linear(4, 2), autoshard.Mesh({"data": 2})
        >>> dataset = torch.randn(20, 4)
        >>> sharded = autoshard.compile(model, mesh, example_inputs=(dataset[:8],))
        >>> rows = sampler(dataset, sharded, shuffle=False)  # no processes: all ranks are here
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=rows.batch_size, sampler=rows)
        >>> [tuple(sharded(rows.whole(batch)).shape) for batch in loader]
        [(8, 2), (8, 2)]
    """
    module = module_of(sharded, "sampler(...)")
    if module.program is None:
        raise TraceError("sampler(...): nothing has been compiled yet; call the model once, or pass example_inputs=.")
    if module.program.staged is not None:
        raise NotAvailableError(
            f"sampler(...): {module.mesh} cuts the model into stages, which read inputs on meshes of their own. Pass "
            "whole batches, the same on all ranks."
        )
    rows = rows_of(module, module.program, micro_batches_of(sharded), "sampler(...)")
    if not isinstance(dataset, Sized) or len(dataset) < rows.batch:
        found = f"{len(dataset)} samples" if isinstance(dataset, Sized) else "no length"
        raise NotAvailableError(
            f"sampler(...): the dataset has {found}, and a batch {rows.batch} rows. Pass a dataset with __len__, of at "
            "least one batch, or compile for a smaller batch."
        )
    return RankSampler(len(dataset), rows, shuffle=shuffle, seed=seed)
