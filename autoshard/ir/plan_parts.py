"""Parts of a plan: specs of a node, layout of a parameter, coverage of an operator, and prediction of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from autoshard.ir.kernels import NO_KERNELS, Kernels
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.trace import Trace


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Specs of one node's tensor operands and results, each in order. A placeholder has one result and no operands."""

    inputs: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...]

    def to_json(self) -> list[list[str]]:
        """Return the specs as text: the list of the operands, then the list of the results."""
        return [[repr(spec) for spec in self.inputs], [repr(spec) for spec in self.outputs]]


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """Layout of one parameter, and of its gradient and optimizer state in a whole training step.

    Args:
        spec: spec of the parameter.
        shape: global shape of the parameter.
        local_bytes: bytes of the parameter on each device.
        gradient: spec of the gradient that the update reads; a partial spec if the update itself reduces it.
        state: spec of each tensor of optimizer state, by the tensor's name ("exp_avg").
        layout: placement of parameter, gradient and state in words, "ZeRO-2 over data; split over model"; "" without an
            update.
    """

    spec: PartitionSpec
    shape: tuple[int, ...]
    local_bytes: int
    gradient: PartitionSpec | None = None
    state: Mapping[str, PartitionSpec] = field(default_factory=dict)
    layout: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON data with specs as text, and without `gradient`, `state` and `layout` if there is no update."""
        data = {"spec": repr(self.spec), "shape": list(self.shape), "local_bytes": self.local_bytes}
        if not self.layout:
            return data
        gradient = None if self.gradient is None else repr(self.gradient)
        state = {name: repr(spec) for name, spec in self.state.items()}
        return data | {"gradient": gradient, "state": state, "layout": self.layout}


@dataclass(frozen=True, slots=True)
class OperatorCoverage:
    """Layout and time of the calls of one operator on one line of the user's code.

    Args:
        operator: name of the operator, "aten.mm.default".
        source: the user's line, "model.py:12 in forward"; "" where unknown.
        has_rule: whether a sharding rule covers the calls.
        is_split: whether some axis splits the calls. Otherwise they run whole on every rank.
        calls: number of calls in a step.
        time_s: predicted seconds of all calls on each rank.
        reshard_time_s: predicted seconds of resharding the calls' operands.
    """

    operator: str
    source: str
    has_rule: bool
    is_split: bool
    calls: int
    time_s: float
    reshard_time_s: float


class Communication(NamedTuple):
    """Seconds of communication over one mesh axis in a step: exposed (computation waits), or hidden by computation."""

    exposed_s: float
    hidden_s: float


_OVER = "communication over "
"""Prefix for the exposed communication over an axis, in `Prediction.breakdown`."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted cost of a plan, from a simulation of its step.

    Args:
        step_time_s: seconds of one step (forward and backward, and the update in plans of a whole training step).
        peak_memory_bytes: peak device memory, per rank.
        breakdown: parts of `step_time_s` by name, in seconds: computation by phase, exposed communication by mesh axis,
            waiting for the host, bubble, and so on.
        memory_breakdown: parts of the peak by name ("parameters", "gradients", ...), in bytes.
        tokens_per_s: elements of the first integer input per second, or None without such an input.
        mfu: model FLOPs utilisation, FLOPs of the model per second over the mesh's peak; None without a known peak.
        hfu: hardware FLOPs utilisation, which also counts recomputed FLOPs.
        overlaps: whether the prediction prices a recipe in another runtime, with the overlap of communication and
            computation that the runtime offers.
        overlapped: hidden communication by mesh axis, in seconds.
        step_time_interval_s: interval that contains the measured step time with probability `interval_coverage`, from
            the errors of past predictions on hardware of this kind; None without past predictions.
        kernels: Triton kernels that replace operators in the predicted step.
        timeline: timeline of the step; None if it was not kept.
        launches: number of collectives and kernels that the host launches in a step, on each rank; views launch
            nothing.
        sent_bytes: bytes that a rank sends over each mesh axis in a step.
        expert_load: tokens of the busiest expert-parallel rank, in multiples of the mean; None where all ranks have the
            same experts.
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
        """Exposed and hidden communication of a step over each mesh axis, by axis name.

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
        """Seconds of hidden communication over each mesh axis, by names such as "hidden: communication over data"."""
        return {f"hidden: {_OVER}{axis}": seconds for axis, seconds in self.overlapped.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON data, without the timeline."""
        data = asdict(replace(self, timeline=None))
        del data["timeline"]
        return data


UNKNOWN = Prediction(0.0, 0, {}, {})
"""Prediction of a plan that is lowered before a prediction exists."""
