"""The kernels that a plan is priced with: which there are, what each stands for, and what they save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.ir.text import format_bytes, format_time


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One kernel in place of calls of a program.

    Args:
        name: its operator's, "triton_add_rms_norm".
        phase: where it runs.
        node: the node of the traced program at whose place it runs.
        stands_for: node of the traced program to the share of its call's time that goes: 1.0 where the kernel does all
            of it.
        copies: the same of copies around collectives: the node whose value is brought into another spec, the one that
            reads it there (itself for what leaves the program), and the share that goes.
        reads: the nodes whose values it reads.
        time_s: what it takes on each rank.
        launches, memory_bytes: what it launches, and what that reads and writes, on each rank.
        saved_launches, saved_bytes: how much more the calls that it stands for did.
        times: how often it runs: as often as the blocks of a plan that leaves some out (`Plan.repeats`) say.
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
    """The kernels of a step, and what they save; launches and bytes are those of computation on each rank.

    Args:
        uses: the kernels, by phase, in order.
        launches, memory_bytes: of the step with kernels.
        launches_without, memory_bytes_without: of the step without.
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
        """The predicted step time without kernels."""
        return sum(self.breakdown_without.values())

    def of(self, node: str) -> tuple[KernelUse, ...]:
        """Those that compute or read a value of the traced program."""
        return tuple(use for use in self.uses if node in use.stands_for or node in use.reads)

    def __str__(self) -> str:
        return (
            f"{sum(use.times for use in self.uses)} kernels: {self.launches} launches in place of "
            f"{self.launches_without}, {format_bytes(self.memory_bytes)} read and written in place of "
            f"{format_bytes(self.memory_bytes_without)}, the step without them {format_time(self.step_time_without_s)}"
        )


NO_KERNELS = Kernels()
"""Every call is an operator's own."""
