"""Text for people: sizes, times, names and tables."""

from __future__ import annotations

import pytest
from rich.table import Table
from rich.text import Text

from autoshard.ir.text import any_block, as_text, common_name, format_bytes, format_time


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**20 - 1, "1.00 MiB"), (3 * 2**30, "3.00 GiB")),
        (5 * 2**40, "5.00 TiB"),
    ],
)
def test_sizes_are_in_binary_units(size: int, text: str) -> None:
    """Sizes print in binary units, and a negative size has a minus sign."""
    assert format_bytes(size) == text
    assert format_bytes(-size) == (f"-{text}" if size else text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((1234.0, "1234 s"), (999.6, "1000 s"), (90.0, "90 s"), (0.9996, "1 s"), (0.0123, "12.3 ms")),
        *((999.6e-6, "1 ms"), (4e-6, "4 us"), (999.7e-9, "1 us"), (2e-9, "2 ns"), (4e-20, "0 ns")),
    ],
)
def test_times_have_the_unit_that_suits_them(seconds: float, text: str) -> None:
    """Times print with three digits in a suitable unit, and a rounding error prints as zero."""
    assert format_time(seconds) == text


def test_names_that_differ_in_numbers_are_one() -> None:
    """A number in which names differ becomes a star, and a number that they share stays."""
    assert any_block("layers.3.mlp.2.weight") == any_block("layers.4.mlp.2.weight")
    assert any_block("forward: layers.3 add") == "forward: layers.* add"
    assert common_name(["layers.3.mlp.2.weight", "layers.4.mlp.2.weight"]) == "layers.*.mlp.2.weight"


def test_what_terminals_show_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text in files and messages has no colours, and long lines are not wrapped."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    table = Table("layer", "time")
    table.add_row("attention", Text("3 ms", style="red"))
    text = as_text("word " * 100, table)
    assert "\x1b" not in text
    assert text.startswith("word " * 99 + "word")
    assert "3 ms" in text


def test_brackets_and_colons_are_no_markup() -> None:
    """Paths and names are printed as they are, in lines and in tables."""
    path, name, closing = "/home/me/[projects]/model.py:3", "a100:100:b", "/data/[/old]/model.py"
    table = Table(path, name, closing)
    table.add_row(path, name, closing)
    assert all(as_text(line) == line for line in (path, name, closing))
    assert all(as_text(table).count(line) == 2 for line in (path, name, closing))
