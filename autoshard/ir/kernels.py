"""Triton kernels in a plan's predicted step: the operators that each kernel replaces, and the time that it saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.ir.text import format_bytes, format_time


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One kernel that replaces calls of a program. All figures are per rank.

    Args:
        name: name of its operator, "triton_add_rms_norm".
        phase: phase of the program, such as "forward".
        node: node of the traced program at whose place the kernel runs.
        stands_for: saved share of each replaced traced node's time, by node name; 1.0 if the whole call is replaced.
        copies: replaced copies around collectives, as (name of the copied value's node, name of its reader's node,
            saved share of the copy's time). A result of the program is its own reader.
        reads: names of the nodes whose values the kernel reads.
        time_s: seconds of one run of the kernel.
        launches, memory_bytes: number of the kernel's launches, and bytes that they read and write.
        saved_launches, saved_bytes: launches and bytes of the replaced calls, less those of the kernel.
        times: runs of the kernel in a step; several where the plan leaves out repeated blocks (`Plan.repeats`).
    """

    name: str
    phase: str
    node: str
    stands_for: Mapping[str, float]
    copies: tuple[tuple[str, str, float], ...]
    reads: tuple[str, ...]
    time_s: float
    launches: int
    memory_bytes: int
    saved_launches: int
    saved_bytes: int
    times: int = 1

    def __str__(self) -> str:
        saved = f"{self.saved_launches} fewer to launch, {format_bytes(self.saved_bytes)} less to move"
        times = f", {self.times} times" if self.times > 1 else ""
        calls = [*self.stands_for, *(f"{name} as {reader} reads it" for name, reader, _ in self.copies)]
        return f"{self.name} for {', '.join(calls)} ({self.phase}{times}): {saved}."


@dataclass(frozen=True, slots=True)
class Kernels:
    """The Triton kernels of a step, and their savings on each rank. Collectives are not counted.

    Args:
        uses: the kernels in running order, phase by phase.
        launches, memory_bytes: launches of the step with kernels, and bytes that they read and write.
        launches_without, memory_bytes_without: launches of the step without kernels, and their bytes.
        breakdown_without: parts of the predicted step time without kernels, seconds (`Prediction.breakdown`).
    """

    uses: tuple[KernelUse, ...] = ()
    launches: int = 0
    memory_bytes: int = 0
    launches_without: int = 0
    memory_bytes_without: int = 0
    breakdown_without: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_time_without_s(self) -> float:
        """The predicted step time without Triton kernels, in seconds."""
        return sum(self.breakdown_without.values())

    def of(self, node: str) -> tuple[KernelUse, ...]:
        """Return the kernels that replace the traced node named `node`, or read its value."""
        return tuple(use for use in self.uses if node in use.stands_for or node in use.reads)

    def __str__(self) -> str:
        return (
            f"{sum(use.times for use in self.uses)} kernels: {self.launches} launches in place of "
            f"{self.launches_without}, {format_bytes(self.memory_bytes)} read and written in place of "
            f"{format_bytes(self.memory_bytes_without)}, the step without them {format_time(self.step_time_without_s)}"
        )


NO_KERNELS = Kernels()
"""No kernels: each operator runs as in the traced program."""
