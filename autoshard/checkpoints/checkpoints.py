"""`Checkpoints`: when to save, where, and how many to keep."""

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
from autoshard.checkpoints.ranks import Ranks
from autoshard.checkpoints.snapshot import PartSnapshot, Spread, differing, suffix_of, take
from autoshard.checkpoints.state import TrainingState, mesh_of, plan_of, ranks_of
from autoshard.checkpoints.trees import own_slots
from autoshard.errors import CheckpointError
from autoshard.ir.plan import Plan
from autoshard.runtime.train_step import TrainStep

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What ranks agreed on before they write.

    Args:
        folder: where to.
        differing: keywords under which ranks hold different things.
    """

    folder: Path
    differing: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Saving:
    """A save under way: after how many steps, and its end."""

    at: int
    ended: Future[None]


class Checkpoints:
    """The checkpoints of a run in one folder, which all ranks see.

    A checkpoint holds the model, its optimizer, random numbers, the number of steps, the plan, and whatever is passed
    by keyword. No file of it is pickled, so loading a stranger's runs no code. It is complete or invisible: a crash
    at any moment leaves the one before. See docs/reference/checkpoints.md.

    Args:
        folder: where checkpoints lie, each in a folder of its own: `step-1000`.
        every: `save` saves where the number of steps is a multiple of this.
        keep: so many of the latest stay, and older ones are deleted; None: all stay.
        asynchronous: `save` blocks for a copy of this rank's shards to the host's memory, and writes beside training;
            False: it writes without a copy, and returns when the checkpoint is complete.
        timeout_s: seconds that ranks wait for one that neither saves or loads with them nor shows a sign of life; None:
            as many as `Options(timeout_s=)` has, and 60 for a plain module.
        trust_pickle: `load` also reads checkpoints of earlier releases. They are pickles: loading one runs whatever
            code is in it. What this release writes has none, and runs none.

    Raises:
        CheckpointError: `every` or `keep` is no whole number above 0, or `timeout_s` is not above 0.

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
        trust_pickle: bool = False,
    ) -> None:
        for name, value in (("every", every), ("keep", 1 if keep is None else keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{name}={value!r}: pass a whole number of at least 1.")
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise CheckpointError(f"timeout_s={timeout_s!r}: pass a number of seconds above 0.")
        self.folder, self.timeout_s, self.trust_pickle = Path(folder), timeout_s, trust_pickle
        self.every, self.keep, self.asynchronous = every, keep, asynchronous
        self._ranks: Ranks | None = None
        self._saving: _Saving | None = None

    @property
    def latest(self) -> Path | None:
        """The folder of the latest complete checkpoint, as this process sees it; its plan is `plan.json` in there."""
        return folders.latest(self.folder)

    def save(self, step: TrainStep | nn.Module, /, *, at: int, **stateful: Any) -> bool:
        """Save, if it is due. Called by all ranks, which go on while it is written.

        One checkpoint is written at a time: if the one before is still being written, this waits for it.

        Args:
            step: what `compile` gave, with or without an optimizer; or a plain module.
            at: how many steps are done.
            stateful: whatever else is to be saved, with `state_dict` and `load_state_dict`: a schedule, an optimizer of
                your own, a data loader.

        Returns:
            Whether it was due.

        Raises:
            CheckpointError: the checkpoint *before* could not be written, which names file and tensor. This one is
                being written all the same, and training can go on.
            LostRankError: a rank ended, or showed no sign of life for `timeout_s`; it is named.
        """
        if isinstance(at, bool) or not isinstance(at, int) or at < 0:
            raise CheckpointError(f"at={at!r}: pass the number of steps that are done.")
        if at % self.every:
            return False
        failure = self._end()
        self._begin(step, at, stateful)
        if failure is not None:
            raise failure
        return True

    def wait(self) -> None:
        """Wait until what was saved is complete.

        Raises:
            CheckpointError: it could not be written.
            LostRankError: see `save`.
        """
        failure = self._end()
        if failure is not None:
            raise failure

    def load(self, step: TrainStep | nn.Module, /, **stateful: Any) -> int:
        """Load the latest complete checkpoint, in place, whatever mesh, plan and number of ranks saved it.

        Each rank reads its shards. Compile with `example_inputs=` before, so that they are where the plan has them.

        Args:
            step: as for `save`.
            stateful: of what was saved, what is wanted, by the same keywords.

        Returns:
            How many steps were done when it was saved; 0 where there is none.

        Raises:
            CheckpointError: on every rank: the checkpoint is damaged, or of another model. Nothing has been changed
                then.
            LostRankError: see `save`.
        """
        self.wait()
        state, ranks = TrainingState(step, stateful), self._ranks_of(step)
        _, name = ranks.merge(f"Looking for checkpoints in {self.folder}", lambda: None, lambda _: self._latest_name())
        if name is None:
            return 0
        what = f"Loading {self.folder / name}"
        stored = ranks.do(what, partial(Stored, self.folder / name, trust_pickle=self.trust_pickle))
        names = ranks.do(what, lambda: state.wanted(stored, ranks.rank, ranks.size))
        found = _read(stored, dict.fromkeys(names.values()), ranks, what)
        rests = ranks.do(
            what,
            lambda: {key: own_slots(stored.unpacked(found[name]), suffix_of(name)) for key, name in names.items()},
        )
        places = ranks.do(what, lambda: state.places(stored, rests, names))
        tensors = _read(stored, places, ranks, what)
        ranks.do(what, lambda: state.load(rests, tensors))
        _LOGGER.info("loaded %s", self.folder / name)
        return stored.manifest.step

    def _latest_name(self) -> str | None:
        found = self.latest
        return None if found is None else found.name

    def _ranks_of(self, step: Any) -> Ranks:
        if self._ranks is None:
            self._ranks = ranks_of(step, self.timeout_s)
        return self._ranks

    def _end(self) -> CheckpointError | None:
        """Wait for the save under way; why it failed."""
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
        """Take what is saved, and write it, in a thread if that is wanted."""
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
        """Write a snapshot, and make it a complete checkpoint."""
        what = f"Saving step {at} to {self.folder}"
        digests = {part.keyword: part.digest() for part in parts if part.spread is Spread.UNKNOWN and ranks.size > 1}
        _, begun = ranks.merge(what, lambda: {"at": str(at), **digests}, partial(self._begin_together, at))
        own = {part.keyword for part in parts if part.spread is Spread.OWN} | begun.differing
        items = {name: item for part in parts for name, item in part.to_write(ranks, differs=part.keyword in own)}
        parts.clear()
        writer = Writer(begun.folder, ranks.rank)
        ranks.merge(
            what,
            partial(writer.write, items),
            lambda everyone: self._finish(writer, everyone, at, mesh, plan),
            undo=partial(folders.discard, begun.folder),
        )
        _LOGGER.info("saved step %d to %s", at, self.folder)

    def _begin_together(self, at: int, everyone: Sequence[Mapping[str, str]]) -> _Begun:
        """On the first rank: where to write, and what ranks hold differently."""
        asked = [(digests["at"], *sorted(digests)) for digests in everyone]
        if len(set(asked)) > 1:
            raise CheckpointError(f"Ranks save different things: {asked}. Call save(...) alike on every rank.")
        return _Begun(folders.begin(self.folder, at), frozenset(differing(everyone)))

    def _finish(self, writer: Writer, everyone: Sequence[Written], at: int, mesh: str, plan: Plan | None) -> None:
        """On the first rank: make complete what all ranks have written."""
        writer.finish(everyone, at, mesh, None if plan is None else json.dumps(plan.to_json(), indent=1) + "\n")
        folders.commit(writer.folder, at)
        folders.keep_latest(self.folder, self.keep)


def _read(stored: Stored, state: dict[str, Any], ranks: Ranks, what: str) -> dict[str, Any]:
    """Read into `state`, once every rank has found undamaged what it needs."""
    reads = ranks.do(what, lambda: stored.plan_reads(state))
    ranks.do(what, reads.run)
    return state
