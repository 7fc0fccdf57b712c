"""`Checkpoints`, the public class: it decides when to save, where, and how many checkpoints to keep."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.checkpoints import folder as folders
from autoshard.checkpoints.files import Stored, Writer, Written
from autoshard.checkpoints.ranks import Processes, Ranks, processes_of
from autoshard.checkpoints.snapshot import PartSnapshot, Spread, differing, suffix_of, take
from autoshard.checkpoints.state import TrainingState, mesh_of, model_of, plan_of
from autoshard.checkpoints.trees import own_slots
from autoshard.checkpoints.values import unpacked
from autoshard.errors import CheckpointError
from autoshard.ir.plan import Plan
from autoshard.runtime.train_step import TrainStep

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    """The first rank's decision before a save.

    `folder` is the folder to write. `differing` has the keyword arguments of `save` whose objects differ between ranks.
    """

    folder: Path
    differing: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Saving:
    """A save in progress after `at` steps.

    The future `ended` is done when the checkpoint is complete, or has the error of the save.
    """

    at: int
    ended: Future[None]


class Checkpoints:
    """Saves and loads the checkpoints of a run, in one folder on a file system that all ranks share.

    A checkpoint holds the model, its optimizer, the loss scale, random states, the number of steps done and the plan.
    It also holds the objects that you pass by keyword to `save`. Nothing is pickled, so `load` runs no code from a
    file. If a run crashes during a save, the previous checkpoint stays the latest; see docs/reference/checkpoints.md.

    Args:
        folder: folder of all checkpoints. Each checkpoint is a folder in it, such as `step-1000` after 1,000 steps.
        every: number of steps from one checkpoint to the next. `save` does nothing after other steps. Default: 1.
        keep: number of checkpoints to keep. Older checkpoints are deleted as soon as a new checkpoint is complete.
            None (default) keeps all.
        asynchronous: True (default): `save` copies this rank's shards to host memory and returns; a thread writes the
            copy. False: `save` writes without a copy, and returns when the checkpoint is complete.
        timeout_s: seconds to wait for another rank. A rank that is still reading or writing does not count as late.
            None (default): the value of `Options(timeout_s=)`; 60 for a plain module.

    Raises:
        CheckpointError: `every` or `keep` is not a whole number above 0, or `timeout_s` is not above 0.

    Example:
        >>> import tempfile, autoshard
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> step = autoshard.compile(model, autoshard.Mesh({"data": 2}), optimizer=optimizer, loss_fn=lambda y: y.sum())
        >>> checkpoints = autoshard.Checkpoints(tempfile.mkdtemp(), every=2, keep=1)
        >>> start = checkpoints.load(step)
        >>> for number in range(start, 4):
        ...     loss = step(torch.ones(2, 4))
        ...     _ = checkpoints.save(step, at=number + 1)
        >>> checkpoints.wait()
        >>> start, checkpoints.latest.name, checkpoints.load(step)
        (0, 'step-4', 4)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int | None = None,
        asynchronous: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        for name, value in (("every", every), ("keep", 1 if keep is None else keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{name}={value!r}: pass a whole number of at least 1.")
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise CheckpointError(f"timeout_s={timeout_s!r}: pass a number of seconds above 0.")
        self.folder, self.timeout_s = Path(folder), timeout_s
        self.every, self.keep, self.asynchronous = every, keep, asynchronous
        self._ranks: dict[Processes | None, Ranks] = {}
        self._saving: _Saving | None = None

    @property
    def latest(self) -> Path | None:
        """The folder of the latest complete checkpoint that this process sees; None if there is none.

        If the saved model was compiled, the folder contains its plan as `plan.json`.
        """
        return folders.latest(self.folder)

    def save(self, step: TrainStep | nn.Module, /, *, at: int, force: bool = False, **stateful: Any) -> bool:
        """Save a checkpoint if `at` is a multiple of `every`. All ranks must call this, with the same `at`.

        With `asynchronous`, training goes on during the write. If the previous checkpoint is still being written,
        `save` first waits for it.

        Args:
            step: the result of `compile`, or a plain module.
            at: number of steps done, counted from the start of the whole run.
            force: save even if `at` is not a multiple of `every`.
            stateful: further objects to save, by keyword, each with `state_dict` and `load_state_dict`. Examples are a
                learning rate schedule, a data loader, or the optimizer of a model that was compiled without one.

        Returns:
            True if this call saves a checkpoint; False if no checkpoint is due.

        Raises:
            CheckpointError: with `asynchronous`, the previous save failed; the checkpoint of this call is still being
                written, and training can go on. Otherwise this save failed. Also if an argument is invalid.
            LostRankError: another rank ended, or did not take part within `timeout_s`. The message names the rank.
        """
        if isinstance(at, bool) or not isinstance(at, int) or at < 0:
            raise CheckpointError(f"at={at!r}: pass the number of steps that are done.")
        if at % self.every and not force:
            return False
        failure = self._end()
        self._begin(step, at, stateful)
        if failure is not None:
            raise failure
        return True

    def wait(self) -> None:
        """Wait until the last save is complete; return at once if nothing is being written.

        Call this on all ranks at the end of a run, before `destroy_process_group`. A program that ends without `wait`
        still finishes the write, but drops an error of the write.

        Raises:
            CheckpointError: the last save failed.
            LostRankError: another rank ended, or did not take part within `timeout_s`.
        """
        failure = self._end()
        if failure is not None:
            raise failure

    def load(self, step: TrainStep | nn.Module, /, **stateful: Any) -> int:
        """Load the latest complete checkpoint in place. All ranks must call this.

        Mesh, plan and number of ranks may differ from those of the save. Pass `example_inputs=` to `compile`, so that
        each rank reads only its shards. Otherwise each rank reads whole parameters, and a model on the meta device
        cannot be loaded.

        Args:
            step: the result of `compile`, or a plain module.
            stateful: objects to load in place, under the keywords with which they were saved. Saved objects that you do
                not name are ignored.

        Returns:
            The number of steps done at the save; 0 if there is no checkpoint, and nothing is changed.

        Raises:
            CheckpointError: the checkpoint is damaged, belongs to another model, or lacks a keyword, or the last `save`
                failed. Every rank raises. Nothing has been changed, unless a `load_state_dict` of your own failed.
            LostRankError: another rank ended, or did not take part within `timeout_s`.
        """
        self.wait()
        state, ranks = TrainingState(step, stateful), self._ranks_of(step)
        _, name = ranks.merge(f"Looking for checkpoints in {self.folder}", lambda: None, lambda _: self._latest_name())
        if name is None:
            return 0
        action = f"Loading {self.folder / name}"
        stored = ranks.do(action, partial(Stored, self.folder / name))
        names = ranks.do(action, lambda: state.wanted(stored, ranks.rank, ranks.size))
        found = _read(stored, dict.fromkeys(names.values()), ranks, action)
        rests = ranks.do(
            action,
            lambda: {key: own_slots(unpacked(found[name]), suffix_of(name)) for key, name in names.items()},
        )
        places = ranks.do(action, lambda: state.places(stored, rests, names))
        tensors = _read(stored, places, ranks, action)
        ranks.do(action, lambda: state.load(rests, tensors))
        _LOGGER.info("loaded %s", self.folder / name)
        return stored.manifest.step

    def _latest_name(self) -> str | None:
        found = self.latest
        return None if found is None else found.name

    def _ranks_of(self, step: Any) -> Ranks:
        processes = processes_of(model_of(step))
        if processes not in self._ranks:
            self._ranks[processes] = Ranks.of(model_of(step), self.timeout_s)
        return self._ranks[processes]

    def _end(self) -> CheckpointError | None:
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        if not saving.ended.done():
            _LOGGER.info("waiting for the checkpoint of step %d", saving.at)
        try:
            saving.ended.result()
        except CheckpointError as error:
            return error
        return None

    def _begin(self, step: Any, at: int, stateful: Mapping[str, Any]) -> None:
        state, ranks = TrainingState(step, stateful), self._ranks_of(step)
        with torch.no_grad():
            parts = take(state.parts(at), ranks, copies=self.asynchronous)
        write = partial(self._write, parts, at, ranks, mesh_of(step), plan_of(step))
        if not self.asynchronous:
            write()
            return
        executor = ThreadPoolExecutor(1, "autoshard-checkpoint")
        self._saving = _Saving(at, executor.submit(write))
        executor.shutdown(wait=False)

    def _write(self, parts: list[PartSnapshot], at: int, ranks: Ranks, mesh: str, plan: Plan | None) -> None:
        action = f"Saving step {at} to {self.folder}"
        digests = {part.keyword: part.digest() for part in parts if part.spread is Spread.UNKNOWN and ranks.size > 1}
        _, begun = ranks.merge(action, lambda: {"at": str(at), **digests}, partial(self._begin_together, at))
        own = {part.keyword for part in parts if part.spread is Spread.PER_RANK} | begun.differing
        items = {name: item for part in parts for name, item in part.to_write(ranks, differs=part.keyword in own)}
        parts.clear()
        writer = Writer(begun.folder, ranks.rank)
        ranks.merge(
            action,
            partial(writer.write, items),
            lambda everyone: self._finish(writer, everyone, at, mesh, plan),
            undo=partial(folders.discard, begun.folder),
        )
        _LOGGER.info("saved step %d to %s", at, self.folder)

    def _begin_together(self, at: int, everyone: Sequence[Mapping[str, str]]) -> _Begun:
        """On the first rank: choose the folder to write, and find the keywords whose objects differ between ranks.

        Raises `CheckpointError` if ranks save at different steps, or save other keywords.
        """
        calls = [(digests["at"], *sorted(digests)) for digests in everyone]
        if len(set(calls)) > 1:
            raise CheckpointError(f"Ranks save different things: {calls}. Call save(...) alike on every rank.")
        return _Begun(folders.begin(self.folder, at), frozenset(differing(everyone)))

    def _finish(self, writer: Writer, everyone: Sequence[Written], at: int, mesh: str, plan: Plan | None) -> None:
        """On the first rank, after all ranks have written: make the checkpoint complete, and delete old checkpoints."""
        writer.finish(everyone, at, mesh, None if plan is None else json.dumps(plan.to_json(), indent=1) + "\n")
        folders.commit(writer.folder, at)
        folders.keep_latest(self.folder, self.keep)


def _read(stored: Stored, state: dict[str, Any], ranks: Ranks, action: str) -> dict[str, Any]:
    """Read items of a checkpoint into `state`, and return `state`.

    `state` maps names in the checkpoint to tensors, which are filled in place, or to None, which is replaced by the
    item's bytes. No rank reads before every rank has checked the bytes that it needs.
    """
    read = ranks.do(action, lambda: stored.plan_reads(state))
    ranks.do(action, read)
    return state
