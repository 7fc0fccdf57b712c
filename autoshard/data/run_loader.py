"""`loader` returns a `Loader`: the batches of a run, of which each rank loads its rows, and which keeps its place.

Three numbers are the place: the epoch, the samples of the epoch that the user has got, and the seed. They are the same
on all ranks, so a checkpoint holds for another number of ranks or workers, for another plan and another batch size.

`torchdata.StatefulDataLoader` is not used: it saves a state for each process and worker, and another number of workers
cannot load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset, default_collate

from autoshard.data.rows import RankRows, batch_of, micro_batches_of, module_of, rows_of
from autoshard.data.sources import (
    BatchSource,
    Collate,
    Indexed,
    IndexedSource,
    Place,
    Reading,
    StreamSource,
    batches_in,
    first_samples,
)
from autoshard.errors import CheckpointError, NotAvailableError, TraceError
from autoshard.ir.request import CompiledProgram
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep

T = TypeVar("T")

OPTIONS = (
    *("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "timeout", "worker_init_fn"),
    "multiprocessing_context",
)
"""Options of torch's `DataLoader` that `loader` takes."""

_HINT = "the first dim of every tensor of a batch must be its samples"


class Loader:
    """The batches of a run. Made by `loader`.

    An iteration yields the batches from the present place to the end of the epoch. The next iteration is the next
    epoch. A batch counts as read when it is yielded; batches that workers have read ahead do not count.

    Args:
        source: yields this rank's rows of each batch.
        reading: how the source reads.
    """

    def __init__(self, source: BatchSource, reading: Reading) -> None:
        self._source, self._reading = source, reading
        self._place = Place()
        self._position: Any = None

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0. It rises when an iteration is asked for a batch behind the last."""
        return self._place.epoch

    @property
    def batch_size(self) -> int:
        """Samples of a batch on all ranks."""
        return self._reading.rows.batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. If the loader is in this epoch already, its place stays."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise NotAvailableError(f"set_epoch({epoch!r}): pass the number of an epoch, from 0.")
        if epoch != self.epoch:
            self._place, self._position = Place(epoch), None

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch.

        Raises:
            TypeError: the dataset has no length.
        """
        if self._source.length is None:
            raise TypeError("The dataset has no length, so its loader has none.")
        return batches_in(self._source.length, self._reading)

    def __iter__(self) -> Iterator[Any]:
        for loaded in self._source.read(self._reading, self._place, self._position):
            batch = self._reading.rows.whole(loaded.rows, loaded.count, _HINT)
            self._place = replace(self._place, samples=self._place.samples + loaded.count)
            self._position = loaded.position
            yield batch
        self._place, self._position = Place(self._place.epoch + 1), None

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data, the same on all ranks."""
        return {
            "epoch": self._place.epoch,
            "samples": self._place.samples,
            "seed": self._reading.seed,
            "shuffle": self._reading.shuffle,
            "length": self._source.length,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place that `state_dict` returned. The order of samples becomes the saved order.

        Raises:
            CheckpointError: the state is no place, or is in the middle of an epoch of a dataset of another length.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise CheckpointError(f"The state of a loader has no {', '.join(missing)}: pass a result of state_dict().")
        length = self._source.length
        if state["length"] != length and state["samples"]:
            raise CheckpointError(
                f"The loader was saved behind sample {state['samples']} of an epoch of {state['length']}, but the "
                f"dataset has {length} samples now, in another order. Give the same dataset, or set_epoch."
            )
        self._reading = replace(self._reading, seed=state["seed"], shuffle=state["shuffle"])
        self._place, self._position = Place(state["epoch"], state["samples"]), state["position"]


def loader(
    dataset: Any,
    step: ShardedModule | TrainStep,
    *,
    batch_size: int,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Collate | None = None,
    **options: Any,
) -> Loader:
    """Return the batches of a run: each rank loads the rows that the plan of `step` gives it. All ranks must call.

    Pass a batch as `step(**batch)` or `step(*batch)`. The order of samples depends on `seed` and the epoch alone, not
    on ranks, workers or the plan. Each sample is in one batch of an epoch. The last batch may have fewer samples; its
    loss is the loss of these samples.

    Args:
        dataset: a dataset with indices and a length; or an iterable, which every rank reads as a whole. It is read in
            its own order, by at most one worker, and must begin anew at each `iter`.
        step: a result of `compile`. If it has no program of this batch size yet, it is compiled for the first samples.
        batch_size: samples of a batch on all ranks; a multiple of the step's `micro_batches`.
        shuffle: draw each epoch in another order. Default: True for a dataset with indices.
        seed: seed of the order.
        drop_last: leave out a last batch of fewer samples.
        collate_fn: makes a batch of a list of samples: a dict, tuple or tensor, whose tensors begin with the samples.
            Each rank collates its own rows, so pad to a length that does not depend on them. Default: torch's
            `default_collate`.
        options: options of torch's `DataLoader`: `num_workers`, `prefetch_factor`, `persistent_workers`, `pin_memory`,
            `timeout`, `worker_init_fn`, `multiprocessing_context`.

    Raises:
        NotAvailableError: an argument is not as said above, or the dataset is empty.
        RankMismatchError: ranks pass other arguments, or datasets of other lengths.
        TraceError: `step` is not a result of `compile`; or it has no program of this batch size, and the dataset is an
            iterable.

    Example:
        >>> import torch, autoshard
        >>> model = torch.nn.Linear(4, 2)
        >>> step = autoshard.compile(model, autoshard.Mesh({"data": 2}))
        >>> batches = autoshard.data.loader(torch.randn(19, 4), step, batch_size=8)
        >>> [tuple(step(batch).shape) for batch in batches], len(batches), batches.epoch
        ([(8, 2), (8, 2), (3, 2)], 3, 1)
    """
    module, parts = module_of(step, "loader(...)"), micro_batches_of(step)
    _check_numbers(batch_size, parts, seed)
    is_stream = not isinstance(dataset, Indexed) or isinstance(dataset, IterableDataset)
    _check_options(options)
    source = _stream_of(dataset, shuffle, options) if is_stream else _indexed(dataset, batch_size, drop_last)
    collate = default_collate if collate_fn is None else collate_fn
    asked = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    module.engine.agree(lambda: {"loader(...)": str({**asked, "samples": source.length})})
    rows = _rows(step, module, parts, batch_size, None if is_stream else dataset, collate)
    if not is_stream and not drop_last:
        _refuse_mixed(step, module, rows, dataset, collate)
    options.setdefault("pin_memory", rows.device.type == "cuda")
    in_any_order = not is_stream if shuffle is None else shuffle
    return Loader(source, Reading(rows, collate, in_any_order, seed, drop_last, options))


def _check_numbers(batch_size: int, micro_batches: int, seed: int) -> None:
    for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise NotAvailableError(f"loader({name}={value!r}): pass a whole number of at least {least}.")
    if batch_size % micro_batches:
        raise NotAvailableError(
            f"loader(batch_size={batch_size}): the step has micro_batches={micro_batches}, which must divide it."
        )


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise NotAvailableError(
            f"loader({unknown[0]}=...) is not known. The loader chooses the samples of each rank itself; options of "
            f"torch's DataLoader that it takes are {', '.join(OPTIONS)}."
        )


def _indexed(dataset: Indexed, batch_size: int, drop_last: bool) -> IndexedSource:
    least = batch_size if drop_last else 1
    if len(dataset) < least:
        raise NotAvailableError(
            f"loader(batch_size={batch_size}, drop_last={drop_last}): the dataset has {len(dataset)} samples, so an "
            f"epoch would have no batch. Pass a dataset of at least {least}."
        )
    return IndexedSource(dataset)


def _stream_of(dataset: Any, shuffle: bool | None, options: dict[str, Any]) -> StreamSource:
    """Return the source of an iterable dataset. Options that such a source cannot use are removed from `options`."""
    if not isinstance(dataset, Iterable) or isinstance(dataset, Iterator):
        kind = "an iterator, which ends after one epoch" if isinstance(dataset, Iterator) else "no dataset"
        raise NotAvailableError(
            f"loader(...): a {type(dataset).__name__} is {kind}. Pass a dataset with __getitem__ and __len__, or an "
            "iterable that begins anew at each iter()."
        )
    if shuffle:
        raise NotAvailableError(
            f"loader(shuffle=True): a {type(dataset).__name__} is read in its own order, as its samples have no "
            "indices. Shuffle within the dataset, by the epoch that its set_epoch(epoch) is given."
        )
    if options.get("num_workers", 0) > 1:
        raise NotAvailableError(
            f"loader(num_workers={options['num_workers']}): one worker reads an iterable dataset, in its order. Pass "
            "num_workers=1, or a dataset with __getitem__ and __len__."
        )
    options.pop("persistent_workers", None)
    return StreamSource(dataset, len(dataset) if isinstance(dataset, Sized) else None)


def _rows(
    step: ShardedModule | TrainStep, module: ShardedModule, parts: int, batch_size: int, dataset: Any, collate: Collate
) -> RankRows:
    """Return this rank's rows of each batch, by the plan of the program for batches of `batch_size` samples.

    If there is no such program yet, it is compiled for the first samples of `dataset`. `dataset` is None for a stream.
    """
    program = _program_for(module, batch_size // parts)
    if program is None and dataset is None:
        raise TraceError(
            f"loader(batch_size={batch_size}): the step has no program of this batch size. Compile with "
            "example_inputs= of a batch, or call the step once."
        )
    if program is None:
        _call(step.compile_for, module, collate(list(first_samples(dataset, batch_size))))
        program = module.program
    assert program is not None, "it is compiled"
    repeats = isinstance(step, TrainStep) and (parts > 1 or not step.plans_any_batch)
    return rows_of(module, program, parts, "loader(...)", repeats=repeats)


def _program_for(module: ShardedModule, rows: int) -> CompiledProgram | None:
    """Return a program for inputs of `rows` rows, if possible the program that ran last; None if there is none."""
    last = () if module.program is None else (module.program,)
    return next((program for program in (*last, *module.programs) if batch_of(program) == rows), None)


def _refuse_mixed(step: Any, module: ShardedModule, rows: RankRows, dataset: Any, collate: Collate) -> None:
    """Raise `NotAvailableError` now, not at the end of an epoch, if the step cannot weigh the rows of a last batch."""
    count = len(dataset) % rows.batch
    if not rows.repeats or rows.micro_batches > 1 or not count:
        return
    weights = _call(step.loss_weights, module, collate(list(first_samples(dataset, rows.batch))))
    if weights is not None and weights.refusal is not None:
        raise NotAvailableError(
            f"loader(batch_size={rows.batch}): the last batch of an epoch has {count} samples, but the step's plan, "
            f"recipe or constraints are for batches of {rows.batch}. {weights.refusal} Or pass drop_last=True."
        )


def _call(function: Callable[..., T], module: ShardedModule, batch: Any) -> T:
    """Call `function` with a batch on the device, as `function(**batch)`, `function(*batch)` or `function(batch)`."""
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    moved = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(module.engine.device), batch)
    if isinstance(moved, dict):
        return function(**moved)
    if isinstance(moved, tuple | list):
        return function(*moved)
    return function(moved)
