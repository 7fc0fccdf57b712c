"""`Ranges` switches the named ranges of compiled programs on and off, for torch's profiler and for NVTX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

PREFIX = "autoshard "
"""Prefix of the names of all ranges in torch's profiler."""


class Ranges:
    """Puts work into ranges of torch's profiler while `are_on` is true. Otherwise programs run without ranges.

    Args:
        marks_cuda: also put work into NVTX ranges, for Nsight Systems.
    """

    def __init__(self, *, marks_cuda: bool = False) -> None:
        self.are_on = False
        self._marks_cuda = marks_cuda

    def begin(self, name: str) -> record_function:
        """Begin a range, and return an object for `end`."""
        found = record_function(PREFIX + name)
        found.__enter__()
        if self._marks_cuda:
            torch.cuda.nvtx.range_push(PREFIX + name)
        return found

    def end(self, begun: record_function) -> None:
        """End the range that `begin` began last."""
        if self._marks_cuda:
            torch.cuda.nvtx.range_pop()
        begun.__exit__(None, None, None)

    def around(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager for a range, which does nothing while the ranges are off."""
        return self._around(name) if self.are_on else nullcontext()

    @contextmanager
    def _around(self, name: str) -> Iterator[None]:
        begun = self.begin(name)
        try:
            yield
        finally:
            self.end(begun)
