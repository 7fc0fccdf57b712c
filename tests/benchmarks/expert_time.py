"""Step time of an expert layer with exchanged tokens, beside the same layer written by hand with torch.

    python -m tests.benchmarks.expert_time [--links loopback delayed 1gbit] [--rounds 30] [--markdown FILE]

Two ranks of one thread are each pinned to a core; see `tests.benchmarks.expert_worker`. Contenders take turns; links
and ratios are described in `tests.benchmarks.pipeline_time`. The target is 1.0, and the first losses must agree.
"""

from __future__ import annotations

import sys

from tests.benchmarks.expert_worker import BY_HAND, CHOSEN, EXPERTS, HIDDEN, INTERMEDIATE, OURS, SEQUENCES, TOKENS
from tests.benchmarks.pipeline_time import LINKS, SETTING, Row, line_of, options_on_links, report, row_of, run_on
from tests.benchmarks.races import commit, date, versions


def measure(link: str, rounds: int) -> Row:
    """Run a case."""
    return row_of(link, "", 1, run_on(link, "expert_worker", {"rounds": rounds}), contenders=(OURS, BY_HAND))


def _head(command: str) -> list[str]:
    return [
        "# Step time of a layer of experts beside torch by hand",
        "",
        f"`{command}`, {date()}, commit {commit()}, {versions()}, {SETTING}. A product and Mixtral's layer: {EXPERTS} "
        f"experts of {HIDDEN} x {INTERMEDIATE}, {CHOSEN} for each of {SEQUENCES} x {TOKENS} tokens, float32, fused "
        f"AdamW. {LINKS} Columns are those of [pipelines](pipeline_time.md).",
        "",
        "| link | ms | ratio | CPU ms | CPU ratio | losses |",
        "|---|---|---|---|---|---|",
    ]


def _line(row: Row) -> str:
    return line_of([row.link, *row.cells(digits=1)])


def main() -> int:
    """Measure, print; 1 if the losses of a case differ."""
    asked = options_on_links(__doc__, rounds=30).parse_args()
    return report((measure(link, asked.rounds) for link in asked.links), _line, _head, "expert_time", asked.markdown)


if __name__ == "__main__":
    sys.exit(main())
