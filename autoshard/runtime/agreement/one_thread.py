"""Lets one thread at a time call a compiled model, because all ranks must make the same calls in the same order."""

from __future__ import annotations

import threading

from autoshard.errors import NotAvailableError


class OneThread:
    """A context for one thread at a time, which may enter it repeatedly. Another thread gets `NotAvailableError`.

    Example:
        >>> within = OneThread()
        >>> with within, within:
        ...     pass
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._name = ""

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise NotAvailableError(
                f"Thread {threading.current_thread().name!r} calls a compiled model that thread {self._name!r} is "
                "running. With a process for each rank, all ranks must make the same calls in the same order, and "
                "threads do not keep the order. Call the model from one thread at a time."
            )
        self._name = threading.current_thread().name

    def __exit__(self, *_: object) -> None:
        self._lock.release()
