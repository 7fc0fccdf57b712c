"""Seconds of one phase (forward or backward) of a layer class for one micro-batch: device, collectives, and host.

Each kind of collective overlaps with one kind of computation. Tensor collectives run beside products of weight
gradients, and context collectives run beside attention. Expert collectives run beside the remaining computation of
another micro-batch. The host launches kernels ahead of the device, also while the device waits for a collective. A
phase takes the longer of the device's time and the host's time:

    max(computation + exposed, kernels * dispatch),     exposed = sent - (1 - interference) * hidden

Here `sent` is the time of all collectives, and `hidden` is the part that overlaps with computation. `interference` is
the share of the overlapped time by which collectives slow the computation. `dispatch` is the host's time per kernel.

Some schedules cut the backward in two: gradients of inputs, then gradients of weights (Qi et al. 2023). Then each of
the two waits for the host by itself. The products of weight gradients run later and hide no collectives, as in
Megatron-LM. A faster device or link never makes a phase longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.ir.execution import Execution
from cost_models.hardware import Cluster
from cost_models.streams import measured_slowdown
from passes.search.layers.price_layers import EXPERT, Busy, PhasePrice
from passes.search.recipe_groups import Groups, sorting_time, traffic_time

_IDLE = Busy()


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds of one phase of one layer, for one micro-batch.

    Args:
        compute_s: computation on the device.
        exposed: for each axis ("tensor"), the seconds that its collectives add to `compute_s`.
        late_s: the part of `compute_s` in products of weight gradients.
        late_hidden_s: seconds of collectives that these products hide; `exposed` is shorter by this time.
        issue_s: the host's time to launch all kernels; 0 if the host waits for each kernel.
        late_issue_s: the part of `issue_s` for products of weight gradients.
    """

    compute_s: float
    exposed: Mapping[str, float]
    late_s: float
    late_hidden_s: float
    issue_s: float
    late_issue_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole phase: the longer of the device's time and the host's time."""
        return max(self._device_s, self.issue_s)

    @property
    def input_gradient_s(self) -> float:
        """Seconds of the first part of a backward that is cut in two: the gradients of inputs."""
        return max(self._device_s - self.late_s + self.late_hidden_s, self.issue_s - self.late_issue_s)

    @property
    def weight_gradient_s(self) -> float:
        """Seconds of the second part of a backward that is cut in two: the gradients of weights."""
        return max(self.late_s, self.late_issue_s)

    @property
    def communication(self) -> dict[str, float]:
        """For each axis, the seconds that its collectives add to `total_s`."""
        sent = sum(self.exposed.values())
        added = self.total_s - max(self.compute_s, self.issue_s)
        return {axis: value * added / sent for axis, value in self.exposed.items()} if sent else {}

    @property
    def _device_s(self) -> float:
        return self.compute_s + sum(self.exposed.values())


def phase_time(
    phase: PhasePrice,
    recipe: Execution,
    groups: Groups,
    cluster: Cluster,
    *,
    done: Busy = _IDLE,
) -> PhaseTime:
    """Return the times of a phase of one layer for one micro-batch.

    `done` has kernels of the phase that do not run, because recomputation stops before them.
    """
    kernels = phase.busy.kernels - done.kernels
    compute_s = max(0.0, phase.busy.total_s - done.total_s)
    compute_s += sum(sorting_time(item, recipe, cluster) for item in phase.traffic)
    dispatch_s = 0.0
    if recipe.runtime.blocking_launches:
        compute_s += (kernels + len(phase.traffic)) * cluster.device.dispatch("blocking")
    else:
        dispatch_s = cluster.device.dispatch("graph" if recipe.runtime.cuda_graph else "eager")
    sent: dict[str, float] = {}
    for item in phase.traffic:
        sent[item.axis] = sent.get(item.axis, 0.0) + traffic_time(item, recipe, groups)
    late_s = phase.busy.weight_gradient_s
    hidden = {
        "tensor": min(sent.get("tensor", 0.0), recipe.runtime.overlap_tensor * late_s),
        "context": min(sent.get("context", 0.0), phase.busy.attention_s),
    }
    beside_late = hidden["tensor"]
    if recipe.runtime.overlap_expert:
        turns = 1 - 1 / recipe.micro_batches  # one forward and one backward of a step have no other beside them
        to_hide = sent.get(EXPERT, 0.0)
        rest = min(to_hide, max(0.0, compute_s - late_s - hidden["context"]))
        late = min(to_hide - rest, late_s - beside_late)
        hidden[EXPERT] = turns * (rest + late)
        beside_late += turns * late
    saved = 1 - measured_slowdown()
    exposed = {axis: value - saved * hidden.get(axis, 0.0) for axis, value in sent.items()}
    late_issue_s = phase.busy.weight_gradient_kernels * dispatch_s
    return PhaseTime(compute_s, exposed, late_s, saved * beside_late, kernels * dispatch_s, late_issue_s)
