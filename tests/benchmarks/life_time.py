"""Step times with loader, trackers and the check of numbers, beside the same step without them.

    python -m tests.benchmarks.life_time [--rounds 100] [--workers 0] [--sizes small large] [--markdown FILE]

Two ranks of one thread, each pinned to a core, train a Llama on packed rows (`tests.benchmarks.life_worker`). All
variants run in the same processes and take turns, in an order that changes with each round. A time is the whole body of
a training loop: the next batch, the step, and its numbers. The trackers are TensorBoard, CSV and a progress line.

A ratio is the median of paired ratios to the step without all three, with its quartiles. The target is 1.01. On a noisy
machine, the ratio of processor times of both ranks is the finer figure.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.life_worker import VARIANTS, WITHOUT
from tests.benchmarks.races import commit, date, paired_quartiles, parser_of, run_order, versions

SIZES: Mapping[str, tuple[int, int]] = {"small": (128, 6), "large": (128, 16)}
"""Tokens of a row, and rows of a step."""
TARGET = 1.01


def line_of(size: str, found: Mapping[str, Any]) -> str:
    """Return a line of the table in Markdown: the step's time, and the ratio of each variant."""
    first = {tuple(round(loss, 4) for loss in item["losses"]) for item in found.values()}
    assert len(first) == 1, f"variants train on other batches: {first}"
    cpu_s = {name: [sum(of_ranks) for of_ranks in item["cpu_s"]] for name, item in found.items()}
    cells = [f"{SIZES[size][0]} x {SIZES[size][1]}", f"{statistics.median(found[WITHOUT]['times_s']) * 1e3:.0f}"]
    for name in list(VARIANTS)[1:]:
        low, middle, high = paired_quartiles(found[name]["times_s"], found[WITHOUT]["times_s"])
        _, of_processors, _ = paired_quartiles(cpu_s[name], cpu_s[WITHOUT])
        cells.append(f"{middle:.3f} ({low:.2f} to {high:.2f}); {of_processors:.3f}")
    return f"| {' | '.join(cells)} |"


def head(command: str) -> list[str]:
    """Return the page in front of its lines."""
    names = " | ".join(list(VARIANTS)[1:])
    return [
        "# Step time with loader, trackers and the check of numbers",
        "",
        f"`{command}`, {date()}, commit {commit()}, {versions()}. Two Gloo ranks of one thread, each pinned to a core. "
        "A Llama of 4 layers of 256 (2048 words), float32, fused AdamW, clipped gradients. Ratios: median of paired "
        "ratios to the step without all three, its quartiles in brackets; then that of processor times of both ranks. "
        f"The target is {TARGET}.",
        "",
        f"| tokens x rows | ms without | {names} |",
        f"|{'---|' * (len(VARIANTS) + 1)}",
    ]


def main() -> None:
    parser = parser_of(__doc__, rounds=100)
    parser.add_argument("--workers", type=int, default=0, help="worker processes of the loader")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--markdown", type=Path, help="write the page there too")
    asked = parser.parse_args()
    lines = head(" ".join(["python -m tests.benchmarks.life_time", *sys.argv[1:]]))
    for size in asked.sizes:
        tokens, batch = SIZES[size]
        with tempfile.TemporaryDirectory() as folder:
            order = {"tokens": tokens, "batch": batch, "rounds": asked.rounds, "workers": asked.workers}
            found = run_order("life_worker", {**order, "folder": folder}, 2)
        lines.append(line_of(size, found))
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    if asked.markdown is not None:
        asked.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
