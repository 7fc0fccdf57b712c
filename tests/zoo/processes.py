"""Run each architecture in a process, forked from a process that has imported torch and the libraries."""

from __future__ import annotations

import logging
import multiprocessing
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch

from tests.zoo.check import Result, check, start
from tests.zoo.table import ARCHITECTURES


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a process: wall seconds, seconds for the search, and gigabytes (1e9 bytes) of data."""

    seconds: float = 600.0
    search_seconds: float = 5.0
    gigabytes: float = 8.0


def run_all(names: Sequence[str], limits: Limits, jobs: int) -> Iterator[Result]:
    """Yield results as they arrive, with `jobs` processes at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *sorted({ARCHITECTURES[name].library.module for name in names})])
    waiting, running = list(reversed(names)), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Run(context, waiting.pop(), limits))
        wait([run.results for run in running], timeout=0.5)
        for run in list(running):
            result = run.poll()
            if result is not None:
                running.remove(run)
                yield result


class _Run:
    """A run of one architecture in its own process."""

    def __init__(self, context: multiprocessing.context.ForkServerContext, name: str, limits: Limits) -> None:
        self.results, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(name, limits, writer), daemon=True)
        self._process.start()
        writer.close()
        self._deadline = time.monotonic() + limits.seconds
        self._limits = limits
        self._last = start(ARCHITECTURES[name])

    def poll(self) -> Result | None:
        """The final result, or None while the process runs within its time."""
        try:
            while self.results.poll():
                self._last = self.results.recv()
        except EOFError:
            return self._end("")
        if time.monotonic() < self._deadline:
            return None
        return self._end(f"took more than {self._limits.seconds:.0f} s")

    def _end(self, reason: str) -> Result:
        if reason:
            self._process.kill()
        self._process.join()
        unfinished = self._last.stage != "done" and not self._last.reason
        if unfinished:
            self._last.reason = reason or f"its process ended with exit code {self._process.exitcode}"
        return self._last


def _work(name: str, limits: Limits, writer: Connection) -> None:
    """Run an architecture in this process and send each state of the result. An exception becomes the
    result's reason."""
    quiet()
    size = int(limits.gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    result = start(ARCHITECTURES[name])

    def report(state: Result) -> None:
        nonlocal result
        result = state
        writer.send(state)

    try:
        report(check(ARCHITECTURES[name], limits.search_seconds, report))
    except Exception as error:  # noqa: BLE001  whatever went wrong is what the table is for
        result.traceback = traceback.format_exc()
        result.reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        writer.send(result)
    writer.close()


def quiet() -> None:
    """Use one thread, and silence the warnings of libraries."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for library in ("transformers", "diffusers"):
        if library in sys.modules:
            sys.modules[library].logging.set_verbosity_error()
    for noisy in ("torch", "autoshard.tracing"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
