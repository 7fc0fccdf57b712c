"""The parts of a plan: what it says of a node, of a parameter, of an operator's calls, and of the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from autoshard.ir.kernels import NO_KERNELS, Kernels
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.trace import Trace


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The specs of one node's tensor operands and results, in order (a placeholder has one result)."""

    inputs: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...]

    def to_json(self) -> list[list[str]]:
        """Specs as text: those of the operands, then those of the results."""
        return [[repr(spec) for spec in self.inputs], [repr(spec) for spec in self.outputs]]


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """Where one parameter lies, and, in the plan of a whole training step, what belongs to it.

    Args:
        spec, shape, local_bytes: of the parameter; bytes are those on each device.
        gradient: how its gradient lies once it is reduced (or partial, where the update itself reduces it).
        state: how each tensor of its optimizer state lies.
        layout: the same in words, "ZeRO-2 over data; split over model"; "" without an update.
    """

    spec: PartitionSpec
    shape: tuple[int, ...]
    local_bytes: int
    gradient: PartitionSpec | None = None
    state: Mapping[str, PartitionSpec] = field(default_factory=dict)
    layout: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON data, specs as text; without an update its fields are left out."""
        data = {"spec": repr(self.spec), "shape": list(self.shape), "local_bytes": self.local_bytes}
        if not self.layout:
            return data
        gradient = None if self.gradient is None else repr(self.gradient)
        state = {name: repr(spec) for name, spec in self.state.items()}
        return data | {"gradient": gradient, "state": state, "layout": self.layout}


@dataclass(frozen=True, slots=True)
class OperatorCoverage:
    """What a plan does with the calls of one operator on one line of the user's code.

    Args:
        operator: its name, "aten.mm.default".
        source: the line, "model.py:12 in forward"; "" where unknown.
        has_rule: whether a sharding rule covers these calls.
        is_split: whether they are split over some axis; else they run whole on every rank.
        calls: how many there are in a step.
        time_s: predicted time of all of them on each rank.
        reshard_time_s: predicted time of bringing their operands into the specs they read.
    """

    operator: str
    source: str
    has_rule: bool
    is_split: bool
    calls: int
    time_s: float
    reshard_time_s: float


class Communication(NamedTuple):
    """Communication of a step over one mesh axis.

    Args:
        exposed_s: seconds that computation waits for it.
        hidden_s: seconds in which it runs beside computation.
    """

    exposed_s: float
    hidden_s: float


_OVER = "communication over "
"""How the part of a step is named that waits for communication over a mesh axis."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the cost models say of a plan, from a simulation of its step on one rank of each kind.

    Args:
        step_time_s: time of one step (forward and backward, and the update where the plan covers it).
        peak_memory_bytes: largest amount of device memory in use, per rank.
        breakdown: parts of `step_time_s` by name, in seconds: computation by phase, communication that is waited for by
            mesh axis, waiting for the host, bubble, and so on.
        memory_breakdown: parts of the peak by name ("parameters", "gradients", ...), in bytes.
        tokens_per_s: elements of the first integer input per second, or None without such an input.
        mfu: the model's FLOPs per second over the mesh's peak, or None where the device's peak is unknown.
        hfu: the same of the FLOPs that all ranks run, those that are run twice included.
        overlaps: whether this is a forecast for another runtime than `compile`'s, which overlaps all that it can.
        overlapped: communication that runs beside computation and is not waited for, by mesh axis, in seconds.
        step_time_interval_s: interval that holds the measured step time with probability `interval_coverage`, by the
            errors of past predictions on hardware of this kind; None where there are none.
        kernels: the Triton kernels that the step is taken to run in place of operators.
        timeline: what runs when; None where it was not kept.
        launches: how often the host issues something: calls but for views, and collectives.
        sent_bytes: bytes that a rank sends over each mesh axis.
        expert_load: tokens of the rank whose experts are taken to be chosen most, in multiples of the mean; None where
            ranks do not have different experts.
    """

    step_time_s: float
    peak_memory_bytes: int
    breakdown: Mapping[str, float]
    memory_breakdown: Mapping[str, int]
    tokens_per_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    overlaps: bool = False
    overlapped: Mapping[str, float] = field(default_factory=dict)
    step_time_interval_s: tuple[float, float] | None = None
    interval_coverage: float | None = None
    kernels: Kernels = NO_KERNELS
    timeline: Trace | None = field(default=None, repr=False)
    launches: int = 0
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    expert_load: float | None = None

    @property
    def communication(self) -> Mapping[str, Communication]:
        """Mesh axis to the time of what is sent over it, exposed (a part of the step) and hidden.

        Example:
            >>> parts = {"forward compute": 2.0, "communication over x": 1.0}
            >>> Prediction(3.0, 0, parts, {}, overlapped={"x": 0.5}).communication
            {'x': Communication(exposed_s=1.0, hidden_s=0.5)}
        """
        exposed = {name.removeprefix(_OVER): time for name, time in self.breakdown.items() if name.startswith(_OVER)}
        return {
            axis: Communication(exposed.get(axis, 0.0), self.overlapped.get(axis, 0.0))
            for axis in {**exposed, **self.overlapped}
        }

    @property
    def hidden(self) -> Mapping[str, float]:
        """Communication that takes none of the step's time, in seconds, named as parts of the step are."""
        return {f"hidden: {_OVER}{axis}": seconds for axis, seconds in self.overlapped.items()}

    def to_json(self) -> dict[str, Any]:
        """As JSON data, without the timeline."""
        data = asdict(replace(self, timeline=None))
        del data["timeline"]
        return data


UNKNOWN = Prediction(0.0, 0, {}, {})
"""Prediction of a plan that is only made to be lowered."""
