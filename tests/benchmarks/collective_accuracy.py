"""How far predicted collective times are from published measurements above 1 MB.

Run: python -m tests.benchmarks.collective_accuracy

Reads tests/data/collectives.jsonl, each row with its source. The link constants in cost_models/data were fitted to
these rows, so this is the error of the fit; rows of node types without a data file are counted, not priced.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from cost_models.collectives import all_gather_time, all_reduce_time, reduce_scatter_time
from cost_models.constants import names
from cost_models.hardware import Cluster
from cost_models.topology import GroupLinks

ROWS = Path(__file__).parents[1] / "data" / "collectives.jsonl"
TIMES = {"all_reduce": all_reduce_time, "all_gather": all_gather_time, "reduce_scatter": reduce_scatter_time}


def read_rows() -> list[dict]:
    """The measured rows whose node type has a data file."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["node"] in names("nodes")]


def predict_s(row: Mapping) -> float:
    """Predicted seconds of one row."""
    cluster = Cluster(row["node"], nodes=row["nodes"], devices_per_node=row["devices_per_node"])
    group = cluster.axis_links({"all": cluster.size})["all"]
    return TIMES[row["collective"]](row["size_bytes"], _without_switch(group) if row["ring"] else group)


def errors(rows: list[dict]) -> dict[tuple[str, int, str], list[float]]:
    """Relative errors (predicted / measured - 1) by (node type, nodes, source repository)."""
    found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for row in rows:
        key = (row["node"], row["nodes"], row["source"].split()[0])
        found[key].append(predict_s(row) / (row["time_us"] * 1e-6) - 1)
    return found


def median_error(values: list[float]) -> float:
    """Median absolute relative error."""
    return statistics.median(abs(value) for value in values)


def _without_switch(group: GroupLinks) -> GroupLinks:
    intra = group.intra and dataclasses.replace(group.intra, in_network_efficiency=0.0)
    return dataclasses.replace(group, intra=intra)


def main() -> None:
    """Print a line per group, then all together."""
    found = errors(read_rows())
    out = sys.stdout.write
    for (node, nodes, source), values in sorted(found.items()):
        bias = math.exp(statistics.mean(math.log1p(value) for value in values)) - 1
        accuracy = f"median {median_error(values):6.1%}  bias {bias:+6.1%}"
        out(f"{node:16} x{nodes:<3} {source:44} {len(values):3} rows  {accuracy}\n")
    every = [value for values in found.values() for value in values]
    out(f"all: {len(every)} rows, median {median_error(every):.1%}\n")


if __name__ == "__main__":
    main()
