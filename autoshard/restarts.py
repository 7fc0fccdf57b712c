"""Runs that go on by themselves: `run` calls a training function that loads, trains, saves and ends on a signal.

A launcher such as `torchrun --max-restarts` starts all processes again when a process ends, hangs or lacks memory. The
training function then begins anew: ranks meet, plan for the ranks that are there, and load the latest checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from autoshard.checkpoints import Checkpoints
from autoshard.checkpoints.ranks import control_of
from autoshard.checkpoints.state import model_of
from autoshard.errors import NotAvailableError
from autoshard.runtime.agreement.control_group import ControlGroup
from autoshard.runtime.agreement.failure_reports import report_failure
from autoshard.runtime.launch import world_size
from autoshard.runtime.train_step import TrainStep

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

STOPPED = 128 + signal.SIGTERM
"""Exit status of a process whose run ended on SIGTERM, with its state saved and steps left: 143."""


class Run:
    """The current start of a run. `autoshard.run` makes it, and passes it to the training function.

    Attributes:
        checkpoints: the checkpoints of the run.
        ranks: the number of processes of this start; a restart may have another number.
        rank: the number of this process, from 0.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.ranks = world_size()
        self.rank = dist.get_rank() if _has_group() else int(os.environ.get("RANK", "0"))

    def steps(self, step: TrainStep | nn.Module, until: int, /, **stateful: Any) -> Iterator[int]:
        """Load the latest checkpoint, then yield the number of each step that is left, up to `until - 1`.

        All ranks must iterate together, and the loop body calls `step` once. After each step, a checkpoint is saved if
        it is due, and after the last step in any case. If any rank gets SIGTERM, all ranks save after the current step,
        and their processes end with status 143.

        Args:
            step: a result of `compile`, which must have got `example_inputs=`; or a plain module.
            until: the number of steps of the whole run, counted over all starts.
            stateful: further objects to load and save, by keyword, with `state_dict` and `load_state_dict`. Examples
                are a learning rate schedule and a data loader.

        Raises:
            CheckpointError: a checkpoint is damaged, belongs to another model, or cannot be written. Or an object in
                `stateful` lacks the two methods.
            LostRankError: another rank stopped, or showed no sign of life in time.
            NotAvailableError: `until` is not a whole number of at least 0.
            SystemExit: with status 143, after SIGTERM, if steps are left.
        """
        if isinstance(until, bool) or not isinstance(until, int) or until < 0:
            raise NotAvailableError(f"until={until!r}: pass the number of steps of the whole run.")
        return self._steps(step, until, stateful)

    def _steps(self, step: TrainStep | nn.Module, until: int, stateful: dict[str, Any]) -> Iterator[int]:
        saved = done = self.checkpoints.load(step, **stateful)
        control = control_of(model_of(step), self.checkpoints.timeout_s)
        with _noticing_sigterm() as told:
            while done < until and not _is_told(told, control, done):
                yield done
                done += 1
                if self.checkpoints.save(step, at=done, force=done == until, **stateful):
                    saved = done
            if done < until and saved < done:
                self.checkpoints.save(step, at=done, force=True, **stateful)
            self.checkpoints.wait()
        if done < until:
            _LOGGER.warning("SIGTERM: the run ends; %d of %d steps are done and saved", done, until)
            sys.exit(STOPPED)


def run(train: Callable[[Run], T], *, checkpoints: Checkpoints) -> T:
    """Call `train(run)`, which trains from the latest checkpoint on, however often the run is started.

    Each process calls this function, under `torchrun --max-restarts` or alone. `torchrun` starts all processes again if
    one fails. Each process uses the accelerator of its local rank. The errors of ranks are in the summary that
    `torchrun` prints, and in the errors of the ranks that wait for them.

    Args:
        train: builds the model, compiles for `run.ranks` ranks, and loops over `run.steps`. All state outside the
            checkpoint begins anew at each start.
        checkpoints: the run's checkpoints: `Checkpoints(folder, every=1000)`.

    Returns:
        The result of `train`, after the last checkpoint is complete.

    Raises:
        SystemExit: with status 143 (128 + SIGTERM), if any rank gets SIGTERM and steps are left. The run is saved.
        NotAvailableError: `train` is not callable, or `checkpoints` is not a `Checkpoints`.
        Exception: each error of `train`, on the rank where it occurs.

    Example:
        >>> import tempfile, autoshard
        >>> def train(run):
        ...     model = nn.Linear(4, 2)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     step = autoshard.compile(
        ...         model, autoshard.Mesh({"data": run.ranks}), optimizer=optimizer, loss_fn=lambda y: y.sum(),
        ...         example_inputs=(torch.ones(2, 4),),
        ...     )
        ...     return [number for number in run.steps(step, 3) if step(torch.ones(2, 4)).isfinite()]
        >>> folder = tempfile.mkdtemp()
        >>> [autoshard.run(train, checkpoints=autoshard.Checkpoints(folder, every=2)) for _ in range(2)]
        [[0, 1, 2], []]
    """
    if not callable(train):
        raise NotAvailableError(f"train={train!r} is a {type(train).__name__}; pass a function of one argument.")
    if not isinstance(checkpoints, Checkpoints):
        raise NotAvailableError(
            f"checkpoints={checkpoints!r} is a {type(checkpoints).__name__}; pass autoshard.Checkpoints(folder)."
        )
    _choose_device()
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # the launcher reads the error there
        return cast(T, record(_train)(train, checkpoints))
    return _train(train, checkpoints)


def _train(train: Callable[[Run], T], checkpoints: Checkpoints) -> T:
    had_group = _has_group()
    try:
        result = train(Run(checkpoints))
        checkpoints.wait()
    except Exception as error:
        report_failure(error)
        raise
    if _has_group() and not had_group:
        dist.destroy_process_group()
    return result


def _choose_device() -> None:
    """Make the accelerator with the number of this process's local rank the current one.

    Does nothing if the process sees no such accelerator. A launcher may show each process only one accelerator.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.accelerator.is_available() and local_rank < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local_rank)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _noticing_sigterm() -> Iterator[threading.Event]:
    """Within the context, SIGTERM sets the yielded event, and does not end the process.

    SLURM and `torchrun` send SIGTERM to ranks. In a thread other than the main thread, signals are left alone.
    """
    told, before = threading.Event(), signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def note(_: int, __: FrameType | None) -> None:
        told.set()

    if threading.current_thread() is not threading.main_thread():
        yield told  # signals are for the main thread alone
        return
    signal.signal(signal.SIGTERM, note)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_told(told: threading.Event, control: ControlGroup | None, done: int) -> bool:
    """Whether any rank got SIGTERM. All ranks call this together, before step `done` begins."""
    return told.is_set() if control is None else control.any(told.is_set(), f"begin step {done}")
