"""One thread at a time: ranks that are processes must make the same calls in the same order.

Two threads of a process would take turns otherwise on each rank, and collectives of unlike calls would meet.
"""

from __future__ import annotations

import threading

from autoshard.errors import NotAvailableError


class OneThread:
    """A context that one thread of this process is within, several times over; it is an error for a second thread.

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
                "running. With a process for each rank, all ranks must make the same calls in the same order, which "
                "threads do not keep. Call it from one thread at a time."
            )
        self._name = threading.current_thread().name

    def __exit__(self, *_: object) -> None:
        self._lock.release()
