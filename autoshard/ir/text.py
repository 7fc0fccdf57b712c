"""Text for people: sizes and times with units, common forms of several names, lines and tables."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_MAX_WIDTH = 110


def as_text(*parts: str | Table) -> str:
    """Return lines and tables as one plain text. Tables fit the terminal and 110 columns; lines are not wrapped."""
    width = min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 0)).columns)
    console = Console(width=width, color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    return capture.get().rstrip()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """Return a table with a heading for each column, and a title unless it is empty."""
    made = Table(*columns, title=title or None, title_justify="left")
    for row in rows:
        made.add_row(*row)
    return made


def any_block(name: str) -> str:
    """Return a name with "*" in place of each number of a block, such as "layers.*.mlp.*.weight"."""
    return re.sub(r"\.\d+\b", ".*", name)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of the error's class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def common_name(names: Sequence[str]) -> str:
    """Return one name for several qualified names with equal numbers of parts, with "*" in place of parts that differ.

    For example, "layers.0.weight" and "layers.1.weight" give "layers.*.weight".
    """
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def format_bytes(size: float) -> str:
    """Return a size in bytes as text with a binary unit: `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < (1024 if unit == "B" else 1023.995):  # above, two decimals round to 1024.00
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def memory_limit_in_words(limit_bytes: float | None, *, is_given: bool) -> str:
    """Return the limit of a device's memory as words of an error.

    For example: `memory_budget=100 bytes (100 B) per device`. `is_given` says whether the user gave the limit.
    """
    if limit_bytes is None:
        return "any memory"
    size = format_bytes(limit_bytes)
    return f"memory_budget={limit_bytes:.0f} bytes ({size}) per device" if is_given else f"a device's memory ({size})"


def format_time(seconds: float) -> str:
    """Return a time in seconds as text with a suitable unit: `12.3 ms`."""
    if abs(seconds) >= 999.5:
        return f"{seconds:.0f} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= 0.9995 * scale:  # below, three digits are less than one unit
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if abs(seconds) >= 1e-12 else "0 ns"  # less than a picosecond is rounding


def format_duration(seconds: float) -> str:
    """Return a long time in seconds as text with a suitable unit: `2.1 days`."""
    for scale, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:,.1f} {unit}"
    return format_time(seconds)
