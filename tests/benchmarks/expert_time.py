"""Step time of a layer of experts whose tokens are exchanged, beside the same written by hand with torch.

    python -m tests.benchmarks.expert_time [--links loopback delayed 1gbit] [--rounds 30] [--markdown FILE]

Two ranks of one thread, each pinned to a core; see `tests.benchmarks.expert_worker`. Contenders take turns; links and
ratios are those of `tests.benchmarks.pipeline_time`. The target is 1.0; the first losses must agree.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from tests.benchmarks.expert_worker import (
    BANDWIDTH_BYTES_PER_S,
    BY_HAND,
    CHOSEN,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LATENCY_S,
    OURS,
    SEQUENCES,
    TOKENS,
)
from tests.benchmarks.pipeline_time import DELAYED, LOSS_TOLERANCE, Row, row_of
from tests.benchmarks.step_rows import LOOPBACK
from tests.benchmarks.step_time import commit, date, run_order, versions
from tests.benchmarks.two_hosts import TwoHosts

_WORKER = ("-m", "tests.benchmarks.expert_worker")
_RANKS = 2


def measure(link: str, rounds: int) -> Row:
    """Run a case."""
    with nullcontext() if link in (LOOPBACK, DELAYED) else TwoHosts(link) as hosts:
        found = run_order(_WORKER, {"is_delayed": link == DELAYED, "rounds": rounds}, _RANKS, hosts)
    return row_of(link, "", 1, found, contenders=(OURS, BY_HAND))


def page(rows: Sequence[Row], command: str) -> str:
    """All cases, in Markdown."""
    lines = [
        "# Step time of a layer of experts beside torch by hand",
        "",
        f"`{command}`, {date()}, commit {commit()}, {versions()}, {_RANKS} Gloo ranks of one thread, each pinned to a "
        f"core. A product and Mixtral's layer: {EXPERTS} experts of {HIDDEN} x {INTERMEDIATE}, {CHOSEN} for each of "
        f"{SEQUENCES} x {TOKENS} tokens, float32, fused AdamW. `{DELAYED}`: links of {LATENCY_S * 1e3:g} ms and "
        f"{BANDWIDTH_BYTES_PER_S * 8 / 1e9:g} Gbit/s. Columns are those of [pipelines](pipeline_time.md).",
        "",
        "| link | ms | ratio | CPU ms | CPU ratio | losses |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def _line(row: Row) -> str:
    cells = [
        row.link,
        " / ".join(f"{seconds * 1e3:.1f}" for seconds in row.step_s),
        f"{row.ratio:.2f} ({row.quartiles[0]:.2f} to {row.quartiles[1]:.2f})",
        " / ".join(f"{seconds * 1e3:.1f}" for seconds in row.cpu_s),
        f"{row.cpu_ratio:.2f}",
        f"{row.loss_error:.0e}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Measure, print; 1 if the losses of a case differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=[LOOPBACK, DELAYED], help="loopback, delayed, 1gbit, ...")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--markdown", type=Path, help="write the page there too")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that emulated hosts are taken down
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # emulated hosts set theirs
    rows = []
    for link in asked.links:
        rows.append(measure(link, asked.rounds))
        sys.stdout.write(_line(rows[-1]) + "\n")
        sys.stdout.flush()
    if asked.markdown is not None:
        command = " ".join(["python -m tests.benchmarks.expert_time", *sys.argv[1:]])
        asked.markdown.write_text(page(rows, command))
    return int(max(row.loss_error for row in rows) > LOSS_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
