"""Errors of predicted collective times against published measurements, in sample and with each source left out.

Run: python -m tests.benchmarks.collective_accuracy

Reads tests/data/collectives.jsonl, each row with its source. The link constants in cost_models/data were fitted to
these rows, so the first table is the error of the fit. In the second table each source (a repository) is left out in
turn. The constants of its fabrics and networks are fitted to the remaining rows, from neutral values. A link without
other measurements takes the constants of the measured link nearest in bandwidth.

Rows below 1 MiB measure latency, and are separate. Rows with a flag are shown and not counted. A flag marks a network
that its own source calls misconfigured, or a size that the source does not print.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cost_models import constants
from cost_models.collectives import (
    all_gather_time,
    all_reduce_algorithms,
    all_reduce_time,
    point_to_point_time,
    reduce_scatter_time,
)
from cost_models.hardware import Cluster, NodeType, node_type
from cost_models.step import ALONE
from cost_models.topology import GroupLinks, Link
from cost_models.units import MIB

ROWS = Path(__file__).parents[1] / "data" / "collectives.jsonl"
TIMES = {"all_reduce": all_reduce_time, "all_gather": all_gather_time, "reduce_scatter": reduce_scatter_time}
SMALL_WEIGHT = 0.3  # of a source's rows below 1 MiB in a fit, against those above
FACTORS = (1.5, 1.2, 1.07, 1.02)
LONG_HOP_S = 6e-6  # hops of networks are longer, those of fabrics shorter

Links = Mapping[str, Link]  # by fabric or network of the data files


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement, with its node type and the names of its fabric and network files."""

    node: NodeType
    nodes: int
    devices_per_node: int
    collective: str
    is_ring: bool
    size_bytes: int
    time_s: float
    source: str
    flag: str
    fabric: str
    network: str

    @property
    def is_small(self) -> bool:
        """Whether the message is below 1 MiB, so that latency decides its time."""
        return self.size_bytes < MIB

    @property
    def links(self) -> set[str]:
        """The names of the fabric and, if there are several nodes, of the network."""
        return {self.fabric, self.network} if self.nodes > 1 else {self.fabric}


def read_rows() -> list[Row]:
    """The measured rows."""
    return [_row(json.loads(line)) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def _row(row: Mapping) -> Row:
    kind = node_type(row["node"])
    if "network" in row:
        kind = kind.with_network(**row["network"])
    texts = constants.load("nodes", row["node"]).texts
    return Row(
        node=kind,
        nodes=row["nodes"],
        devices_per_node=row["devices_per_node"],
        collective=row["collective"],
        is_ring=row["ring"],
        size_bytes=row["size_bytes"],
        time_s=row["time_us"] * 1e-6,
        source=row["source"].split()[0],
        flag=row.get("flag", ""),
        fabric=texts["fabric"],
        network=texts.get("network", ""),
    )


def predict_s(row: Row, links: Links | None = None) -> float:
    """Return the predicted seconds of a row, with constants of the data files or fitted constants."""
    kind = row.node if links is None else _with_links(row, links)
    cluster = Cluster(kind, row.nodes, row.devices_per_node, ALONE)
    if row.collective == "sendrecv":
        return point_to_point_time(row.size_bytes, kind.intra)
    group: GroupLinks = cluster.group_links({"all": cluster.size}, ("all",))
    if row.is_ring and row.collective == "all_reduce":
        return all_reduce_algorithms(row.size_bytes, group)["ring"]
    return TIMES[row.collective](row.size_bytes, group)


def _with_links(row: Row, links: Links) -> NodeType:
    """The row's node with the constants of `links` on its fabric and network, at their own nominal bandwidth."""

    def change(link: Link, name: str) -> Link:
        return replace(links[name], bandwidth_bytes_per_s=link.bandwidth_bytes_per_s) if name in links else link

    inter = row.node.inter and change(row.node.inter, row.network)
    return replace(row.node, intra=change(row.node.intra, row.fabric), inter=inter)


def errors(rows: Iterable[Row], links: Links | None = None) -> list[float]:
    """Relative errors: predicted / measured - 1."""
    return [predict_s(row, links) / row.time_s - 1 for row in rows]


def median_error(values: Iterable[float]) -> float:
    """Median absolute relative error."""
    return statistics.median(abs(value) for value in values)


def counted(rows: Iterable[Row]) -> list[Row]:
    """Return rows of 1 MiB and more without a flag, to which the target applies."""
    return [row for row in rows if not row.is_small and not row.flag]


# Fitting: one number of a link at a time, by factors, to the mean |log error| with all sources weighed equally.


def fit_links(rows: Sequence[Row]) -> dict[str, Link]:
    """The fabrics fitted to rows of one node, and then the networks fitted to rows of several nodes, by name."""
    fitted: dict[str, Link] = {}
    for name in sorted({row.fabric for row in rows}):
        inside = [row for row in rows if row.fabric == name and row.nodes == 1 and row.collective != "sendrecv"]
        if inside:
            fitted[name] = _descend(inside, fitted, name, inside[0].node.intra)
    for name in sorted({row.network for row in rows if row.nodes > 1}):
        across = [row for row in rows if row.network == name and row.nodes > 1]
        link = across[0].node.inter
        assert link is not None
        fitted[name] = _descend(across, fitted, name, link)
    return fitted


def _descend(rows: Sequence[Row], others: Links, name: str, link: Link) -> Link:
    """A link whose constants are fitted to the rows by coordinate descent. Without rows of 1 MiB, latencies alone
    are fitted."""
    large = any(not row.is_small for row in rows)
    link = _neutral(link)
    moves = (*_moves_of_latency(link), *(_moves_of_bandwidth(link) if large else ()))
    best = _loss(rows, {**others, name: link})
    for factor in FACTORS:
        for move in moves:
            for step in (factor, 1 / factor):
                while True:
                    tried = move(link, step)
                    loss = _loss(rows, {**others, name: tried})
                    if loss >= best - 1e-6:
                        break
                    link, best = tried, loss
    return link


def _neutral(link: Link) -> Link:
    """Return the link before any measurement, with the nominal bandwidth of the rows.

    Starts and hops are close to NCCL's own constants, and efficiencies come from vendors' statements.
    """
    is_network = link.latency_s > LONG_HOP_S
    hops = {"LL": 5e-6, "LL128": 8.5e-6} if is_network else {"LL": 0.6e-6, "LL128": 1.9e-6}
    starts = {"LL": 5e-6, "LL128": 9e-6}
    protocols = tuple(replace(each, start_s=starts[each.name], latency_s=hops[each.name]) for each in link.protocols)
    return replace(
        link,
        efficiency=link.efficiency if is_network or link.in_network_efficiency > 0 else 0.85,
        in_network_efficiency=0.6 if link.in_network_efficiency > 0 else 0.0,
        latency_s=14e-6 if is_network else 3.4e-6,
        start_s=1e-5,
        ramp_bytes=1e6,
        protocols=protocols,
    )


def _loss(rows: Sequence[Row], links: Links) -> float:
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for row in rows:
        found[row.source, row.is_small].append(min(1.0, abs(math.log(predict_s(row, links) / row.time_s))))
    return sum((SMALL_WEIGHT if small else 1.0) * statistics.mean(values) for (_, small), values in found.items())


_Move = Callable[[Link, float], Link]


def _scale(field: str, most: float = math.inf) -> _Move:
    return lambda link, factor: replace(link, **{field: min(most, getattr(link, field) * factor)})


def _scale_protocols(field: str) -> _Move:
    def move(link: Link, factor: float) -> Link:
        changed = tuple(replace(each, **{field: getattr(each, field) * factor}) for each in link.protocols)
        return replace(link, protocols=changed)

    return move


def _scale_latencies(link: Link, factor: float) -> Link:
    return _scale("latency_s")(_scale_protocols("latency_s")(link, factor), factor)


def _moves_of_latency(link: Link) -> tuple[_Move, ...]:
    """The changes that a fit of latencies tries: a fabric's starts and those of its protocols, or a network's
    starts and hops."""
    if link.latency_s > LONG_HOP_S:
        return _scale("start_s"), _scale_latencies
    return _scale("start_s"), _scale_protocols("start_s")


def _moves_of_bandwidth(link: Link) -> tuple[_Move, ...]:
    """The changes that a fit of bandwidths tries: saturation, and on fabrics the efficiency of links or of the
    reducing switch."""
    if link.latency_s > LONG_HOP_S:
        return (_scale("ramp_bytes"),)
    field = "in_network_efficiency" if link.in_network_efficiency > 0 else "efficiency"
    return _scale("ramp_bytes"), _scale(field, 1.0)


def leave_one_out(rows: Sequence[Row]) -> dict[str, tuple[list[Row], list[float], bool]]:
    """Return for each source its rows, their errors under a fit to the other sources, and whether these measured its
    links.
    """
    usable = [row for row in rows if not row.flag]
    found = {}
    for source in sorted({row.source for row in usable}):
        left = [row for row in usable if row.source == source]
        fitted = fit_links([row for row in usable if row.source != source])
        missing = {name for row in left for name in row.links} - set(fitted)
        links = fitted | {
            name: fitted[_nearest(name, fitted, left)] for name in missing if _nearest(name, fitted, left)
        }
        found[source] = (left, errors(left, links), not missing)
    return found


def _nearest(name: str, fitted: Links, rows: Sequence[Row]) -> str:
    """Return the measured link of the same level with the nearest nominal bandwidth."""
    fabrics = {row.fabric: row.node.intra for row in rows}
    networks = {row.network: row.node.inter for row in rows if row.node.inter is not None}
    level = fabrics if name in fabrics else networks
    names = constants.names("fabrics" if name in fabrics else "networks")
    candidates = [other for other in fitted if other in names]
    wanted = math.log(level[name].bandwidth_bytes_per_s)
    return min(candidates, key=lambda other: abs(math.log(fitted[other].bandwidth_bytes_per_s) - wanted), default="")


def _line(label: str, values: Sequence[float]) -> str:
    bias = math.exp(statistics.mean(math.log1p(value) for value in values)) - 1
    return f"{label:72} {len(values):3} rows  median {median_error(values):6.1%}  bias {bias:+7.1%}\n"


def main() -> None:
    """Print a line per hardware and source, then all together, then each source left out."""
    rows, out = read_rows(), sys.stdout.write
    out("in sample\n")
    for small in (False, True):
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            if row.is_small == small:
                mark = " (flagged)" if row.flag else ""
                groups[f"{row.node.name:15} x{row.nodes:<3} {row.source}{mark}"].append(row)
        out("1 MiB and more\n" if not small else "below 1 MiB\n")
        for label, members in sorted(groups.items()):
            out(_line(f"  {label}", errors(members)))
        members = [row for row in rows if row.is_small == small and not row.flag]
        out(_line("  all", errors(members)))
    out("each source left out\n")
    every: dict[bool, list[float]] = defaultdict(list)
    for source, (left, values, is_measured) in leave_one_out(rows).items():
        for small in (False, True):
            part = [value for row, value in zip(left, values, strict=True) if row.is_small == small]
            every[small] += part
            if part:
                known = "" if is_measured else ", some of its links measured by nobody else"
                out(_line(f"  {source}, {'below' if small else 'from'} 1 MiB{known}", part))
    for small, label in ((False, "from"), (True, "below")):
        out(_line(f"  all, {label} 1 MiB", every[small]))


if __name__ == "__main__":
    main()
