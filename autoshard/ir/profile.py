"""`Profile`: the measured steps of all ranks beside the predicted step, as data.

Measured and predicted work have the same names, such as "forward: layers.0.mlp mm" (`autoshard.ir.range_names`). The
part of a step in front of the colon is a phase, or communication over mesh axes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from autoshard.ir.range_names import OVER, collective_named, is_issue, is_start, is_wait_for, part_of
from autoshard.ir.request import CompiledProgram
from autoshard.ir.show import text_of
from autoshard.ir.text import any_block
from autoshard.ir.trace import Trace
from cost_models.hardware import Cluster

ELSE = "everything else"
"""The part of a step in which neither an operator nor a collective runs, such as the work of the host."""


class RangeSpan(NamedTuple):
    """Work of a rank under the name of its range. Times are in nanoseconds from the start of the step."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class StepSpans:
    """One step of a rank, measured or predicted: its duration in nanoseconds, and the spans of its work."""

    duration_ns: int
    spans: tuple[RangeSpan, ...]

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part of the step, by the part's name. The parts add up to the step's duration.

        Communication counts only while no operator runs beside it. The rest of the time is the part `ELSE`.
        """
        found, busy = defaultdict[str, float](float), list[tuple[int, int]]()
        by_part = defaultdict[str, list[tuple[int, int]]](list)
        for span in self.spans:
            by_part[part_of(span.name)].append((span.start_ns, span.end_ns))
        for part in sorted(by_part, key=lambda name: name.startswith(OVER)):  # operators first
            before = _length(busy)
            busy = _union([*busy, *by_part[part]])
            found[part] = (_length(busy) - before) / 1e9
        return {**found, ELSE: max(0.0, self.duration_ns / 1e9 - sum(found.values()))}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each operator and collective, by the name of its range. Waiting for a collective is left out."""
        found = defaultdict[str, float](float)
        for span in self.spans:
            if not is_wait_for(span.name) and not is_issue(span.name):
                found[collective_named(span.name)] += (span.end_ns - span.start_ns) / 1e9
        return dict(found)


class RangeCost(NamedTuple):
    """The predicted cost of the calls of one range in a step.

    Args:
        name: name of the range.
        constant: the constant of the hardware that the cost depends on, by the names of `cost_models.refit`; "" for a
            cost that depends on several constants.
        launches: number of launches of the calls in a step; 0 if the seconds contain no launch.
        seconds: seconds of all calls in a step.
    """

    name: str
    constant: str
    launches: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PredictedSteps:
    """The predicted step of each pipeline rank; without a pipeline, one step for all ranks.

    Args:
        steps: the spans of the step, by pipeline rank.
        costs: the costs of the step, by pipeline rank.
        cluster: the hardware that was priced.
    """

    steps: tuple[StepSpans, ...]
    costs: tuple[tuple[RangeCost, ...], ...]
    cluster: Cluster


PredictSteps = Callable[[CompiledProgram], PredictedSteps]
"""Function that predicts the step of a compiled program."""


class Difference(NamedTuple):
    """Measured and predicted seconds in a step of an operator or collective, summed over equal blocks of the model."""

    name: str
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured steps of all ranks beside the predicted step: `step.profile(...).result`. A profile prints as a table.

    Args:
        ranks: the measured steps of each rank, in rank order. If one process simulates all ranks, there is one entry.
        predicted: the predicted step of each pipeline rank; without a pipeline, one step for all ranks.
        pipeline_ranks: for each entry of `ranks`, its index in the predicted steps.
        is_simulated: whether one process simulated all ranks, so that measured times say nothing about hardware.
            Default: False.
    """

    ranks: tuple[tuple[StepSpans, ...], ...]
    predicted: PredictedSteps
    pipeline_ranks: tuple[int, ...]
    is_simulated: bool = False

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return len(self.ranks[0])

    @property
    def step_time_s(self) -> float:
        """Measured seconds of a step, the mean over steps and ranks; compare with `predicted_step_time_s`."""
        return statistics.fmean(step.duration_ns for steps in self.ranks for step in steps) / 1e9

    @property
    def predicted_step_time_s(self) -> float:
        """Predicted seconds of a step. With a pipeline, those of the pipeline rank that takes longest."""
        return max(step.duration_ns for step in self.predicted.steps) / 1e9

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Part of a step → its measured and predicted seconds, each the mean over steps and ranks.

        Example: `{"forward": (0.011, 0.010), "communication over data": (0.002, 0.001), "everything else": ...}`.
        Communication counts only while no operator runs beside it, so the parts add up to the step.
        """
        measured = _mean([step.parts for steps in self.ranks for step in steps])
        predicted = _mean([self.predicted.steps[number].parts for number in self.pipeline_ranks])
        names = sorted({**predicted, **measured}, key=lambda name: (name == ELSE, name.startswith(OVER)))
        return {name: (measured.get(name, 0.0), predicted.get(name, 0.0)) for name in names}

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Measured and predicted seconds of each measured operator and collective, the largest difference first.

        The sign of a difference does not count. Equal blocks of the model count together. The time of a collective is
        that of the rank that joins last. Work without a prediction has `predicted_s` 0.
        """
        measured, predicted = defaultdict[str, float](float), defaultdict[str, float](float)
        for number, steps in self._by_pipeline_rank():
            for name, seconds in measured_seconds(steps).items():
                measured[any_block(name)] += seconds
            for cost in self.predicted.costs[number]:
                predicted[any_block(cost.name)] += cost.seconds
        found = [Difference(name, seconds, predicted.get(name, 0.0)) for name, seconds in measured.items()]
        return tuple(sorted(found, key=lambda item: -abs(item.measured_s - item.predicted_s)))

    def _by_pipeline_rank(self) -> Iterator[tuple[int, list[tuple[StepSpans, ...]]]]:
        """Yield each pipeline rank, with the measured steps of its ranks."""
        for number in range(len(self.predicted.steps)):
            yield number, [steps for steps, own in zip(self.ranks, self.pipeline_ranks, strict=True) if own == number]

    def costs(self) -> Iterator[tuple[RangeCost, float]]:
        """Yield each predicted cost, with the measured seconds of the same operator or collective in a step.

        Costs come by pipeline rank. Costs of operators and collectives that were not measured are left out.
        """
        for number, steps in self._by_pipeline_rank():
            measured = measured_seconds(steps)
            for cost in self.predicted.costs[number]:
                if cost.name in measured:
                    yield cost, measured[cost.name]

    @property
    def timeline(self) -> Trace:
        """The timeline: a process for each rank, with rows of measured and of predicted work.

        All rows start together at each step. The next step begins where the longest row ends; time between steps is
        left out.
        """
        names = ["all ranks, simulated"] if self.is_simulated else [f"rank {rank}" for rank in range(len(self.ranks))]
        spans, start_ns = list[tuple[int, str, str, float, float]](), 0
        for number in range(self.steps):
            longest_ns = 0
            for rank, (steps, own) in enumerate(zip(self.ranks, self.pipeline_ranks, strict=True)):
                for row, step in (("measured", steps[number]), ("predicted", self.predicted.steps[own])):
                    spans += (
                        (rank, f"{row}{stream}", name, (start_ns + begin) / 1e9, (start_ns + end) / 1e9)
                        for stream, name, begin, end in _rows(step)
                    )
                    longest_ns = max(longest_ns, step.duration_ns)
            start_ns += longest_ns
        return Trace.of(names, spans)

    def write(self, path: str | Path) -> None:
        """Write the timeline as a file, to open at ui.perfetto.dev or chrome://tracing.

        Raises `NotAvailableError` if the file cannot be written.
        """
        self.timeline.write(path)

    def __str__(self) -> str:
        return text_of(self)


def measured_seconds(ranks: Sequence[Sequence[StepSpans]]) -> dict[str, float]:
    """Return the seconds of each operator and collective in a step, by the name of its range.

    A rank's seconds are the mean over its steps in `ranks`. An operator gets the mean over ranks. A collective gets the
    least seconds of a rank, because a rank that joins early waits for the rank that joins last.
    """
    means = [_mean([step.seconds for step in steps]) for steps in ranks]
    names = dict.fromkeys(name for each in means for name in each)
    return {
        name: (min if name.startswith(OVER) else statistics.fmean)([each[name] for each in means if name in each])
        for name in names
    }


def _mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in found for name in each)
    return {name: sum(each.get(name, 0.0) for each in found) / len(found) for name in names}


def _rows(step: StepSpans) -> Iterator[tuple[str, str, int, int]]:
    """Yield stream, name, start and end of each span. Collectives run beside operators, on streams of their own."""
    for name, start_ns, end_ns in step.spans:
        yield (f" {part_of(name)}" if is_start(name) else ""), name, start_ns, end_ns


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return intervals without overlap, in order, that cover the same times."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in intervals)
