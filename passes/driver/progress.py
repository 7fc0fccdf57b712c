"""Show the progress of a search on the terminal, and let Ctrl-C end the search with the best plan so far."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autoshard.ir.text import format_time
from passes.solver.search_control import SearchControl

Show = Callable[[str, float, float], None]
"""A function that shows a search's progress.

It takes the problem's name, the best step time so far in seconds (infinite if there is none) and a lower bound.
"""


@contextmanager
def search_bar(time_budget_s: float, progress: bool | None) -> Iterator[Show | None]:
    """Show a bar on standard error that fills as the time budget runs out. Yield the function that updates it.

    Without a bar, None is yielded. On a terminal the bar disappears when the search ends. Elsewhere its last state
    stays.

    Args:
        time_budget_s: seconds that the search may take.
        progress: whether to show the bar; None: if standard error is a terminal.
    """
    console = Console(stderr=True)
    if not (console.is_terminal if progress is None else progress):
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task("searching", total=time_budget_s)
        start = time.monotonic()

        def show(what: str, best: float, lower_bound: float) -> None:
            found = "none yet" if math.isinf(best) else format_time(best)
            text = f"{what}: best {found}, at least {format_time(lower_bound)} (Ctrl-C keeps the best)"
            bar.update(task, description=text, completed=time.monotonic() - start)

        yield show


@contextmanager
def interruptible(control: SearchControl) -> Iterator[None]:
    """Let the first Ctrl-C stop the search of `control`, and the next raise KeyboardInterrupt.

    While a problem is built, the first Ctrl-C raises too, see `SearchControl.stop`. Other threads, and programs with
    their own SIGINT handler, are unaffected.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if control.is_stopped:
            signal.default_int_handler(number, frame)
        control.stop()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
