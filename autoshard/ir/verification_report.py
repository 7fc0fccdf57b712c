"""The report of a proof: its statements and its assumptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoshard.ir.mesh import Mesh


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The proven statements, and the assumptions of the proof.

    Args:
        mesh: the mesh of the plan, including its pipeline axis.
        nodes: nodes of the lowered program, all covered by the proof.
        values: values of the traced program whose local form was derived.
        results: number of results by kind, each in the spec of its slot.
        collectives: number of collectives by name, "all_reduce over data".
        rules: operator to the number of traced calls that rest on its sharding rule.
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
        """Join the reports of several programs, on the mesh of the first."""
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
        """The report with one more assumption."""
        return replace(self, assumptions=(*self.assumptions, sentence))

    def to_json(self) -> dict[str, Any]:
        """JSON data."""
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
