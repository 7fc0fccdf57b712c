"""Report of the proof that a lowered program equals the traced one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoshard.ir.mesh import Mesh


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """Counts of the proven values, results and calls of a lowered program, and the assumptions of the proof.

    Args:
        mesh: the mesh of the plan, including its pipeline axis.
        nodes: number of nodes of the lowered program, all covered by the proof.
        values: number of values of the traced program that the proof finds among the values of the ranks.
        results: number of results that are proven to have the spec of their slot, by kind of result.
        collectives: number of calls of each collective, by name ("all_reduce over data").
        rules: number of traced calls whose proof rests on an operator's sharding rule, by operator.
        assumptions: assumptions of the proof, one sentence each.
        seconds: wall time of the proof.
    """

    mesh: Mesh
    nodes: int
    values: int
    results: Mapping[str, int]
    collectives: Mapping[str, int]
    rules: Mapping[str, int]
    assumptions: tuple[str, ...]
    seconds: float

    @classmethod
    def together(cls, reports: Sequence[VerificationReport]) -> VerificationReport:
        """Return one report, with summed numbers and the first report's mesh, for several programs."""
        return cls(
            reports[0].mesh,
            sum(report.nodes for report in reports),
            sum(report.values for report in reports),
            _sum(report.results for report in reports),
            _sum(report.collectives for report in reports),
            _sum(report.rules for report in reports),
            tuple(dict.fromkeys(item for report in reports for item in report.assumptions)),
            sum(report.seconds for report in reports),
        )

    def assuming(self, sentence: str) -> VerificationReport:
        """Return a copy of the report with the further assumption `sentence`."""
        return replace(self, assumptions=(*self.assumptions, sentence))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON data, with the mesh as a dict from axis to size."""
        return {**asdict(self), "mesh": dict(self.mesh.axes)}

    def __str__(self) -> str:
        calls = sum(self.rules.values())
        lines = [
            f"verified: {self.nodes} nodes on {self.mesh} hold {self.values} traced values, in {self.seconds:.2f} s",
            f"  proven: {_counted(self.results)}, as they are promised",
            f"  communication: {_counted(self.collectives) or 'none'}",
            f"  rests on {len(self.rules)} sharding rules, for {calls} calls: {_counted(self.rules)}",
            *(f"  assumed: {item}" for item in self.assumptions or ("nothing besides",)),
        ]
        return "\n".join(lines)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _sum(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    return dict(sum(map(Counter, counts), Counter()))
