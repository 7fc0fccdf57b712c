"""Find MFU and HFU, the share of the hardware's peak that a step uses, from the FLOPs of products and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoshard.ir.recompute import PHASE
from cost_models.operators import work
from cost_models.work import Kind, TensorInfo
from passes.planning.build_assignment import PlanningProblem
from passes.strategies.enumerate_strategies import ValueInfo, operands_of
from passes.strategies.operator_names import dtype_name, operator_name


@dataclass(frozen=True, slots=True)
class _Contraction:
    """Equal calls of a matrix product or of attention.

    Args:
        site: name of one of the calls.
        calls: number of calls in the whole model, recomputed calls included.
        arguments: arguments of a call, with None for tensors.
        peak_s: seconds of all calls together on one device at its peak rate of FLOPs, without recomputed calls.
    """

    site: str
    calls: int
    operator: str
    operands: tuple[ValueInfo, ...]
    arguments: tuple[Any, ...]
    peak_s: float


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Seconds that a step's products and attention would take at the device's peak rate of FLOPs.

    Args:
        model_s: time of the model's FLOPs, without recomputation, divided equally among all ranks.
        local_s: time of the FLOPs that one rank runs, with recomputation and with work that several ranks repeat.
    """

    model_s: float
    local_s: float

    def shares(self, step_time_s: float) -> tuple[float | None, float | None]:
        """Return MFU and HFU (model and hardware FLOPs utilisation) of a step of `step_time_s` seconds.

        Both are None for a step without matrix products and attention.
        """
        if self.model_s <= 0 or step_time_s <= 0:
            return None, None
        return self.model_s / step_time_s, self.local_s / step_time_s


def utilisation(planning: PlanningProblem, choice: Sequence[int]) -> Utilisation:
    """Return the seconds of a step's FLOPs at the device's peak rates, under the strategies of `choice`.

    A device has one peak rate for each dtype.
    """
    if "contractions" not in planning.derived:
        planning.derived["contractions"] = _find_contractions(planning)
    contractions: Sequence[_Contraction] = planning.derived["contractions"]
    model_s = sum(item.peak_s for item in contractions) / planning.space.mesh.size
    return Utilisation(model_s, sum(_local_s(planning, choice, item) for item in contractions))


def _find_contractions(planning: PlanningProblem) -> tuple[_Contraction, ...]:
    found = []
    counts = planning.counts()
    for members in planning.members:
        site = planning.space.sites[members[0]]
        group = [name for name in members if planning.space.sites[name].call == site.call]
        if site.node is None or site.node.op != "call_function" or site.rule is None or not operands_of(site.node):
            continue
        values = [operand.meta["val"] for operand in operands_of(site.node)]
        operands = tuple(ValueInfo(tuple(value.shape), value.dtype) for value in values)
        arguments = tuple(fx.map_arg(site.node.args, lambda argument: None))
        name = operator_name(site.node)
        done = work(name, _infos(operands), _infos(site.results), arguments)
        if done.products or done.kind is Kind.ATTENTION:
            calls = sum(counts.get(name, 1) for name in group)
            of_model = sum(counts.get(name, 1) for name in group if planning.space.sites[name].phase != PHASE)
            seconds = of_model * (done.flops - done.recomputed_flops) / planning.prices.cluster.device.peak(done.dtype)
            found.append(_Contraction(site.name, calls, name, operands, arguments, seconds))
    return tuple(found)


def _local_s(planning: PlanningProblem, choice: Sequence[int], item: _Contraction) -> float:
    """Return the seconds of one rank's FLOPs in all calls of `item`, at the device's peak rate."""
    mesh, strategy = planning.space.mesh, planning.strategy(item.site, choice)
    results = planning.space.sites[item.site].results
    inputs = [s.local_shape(v.shape, mesh) for v, s in zip(item.operands, strategy.inputs, strict=True)]
    outputs = [s.local_shape(v.shape, mesh) for v, s in zip(results, strategy.outputs, strict=True)]
    done = work(item.operator, _infos(item.operands, inputs), _infos(results, outputs), item.arguments)
    return item.calls * done.flops / planning.prices.cluster.device.peak(done.dtype)


def _infos(values: Sequence[ValueInfo], shapes: Sequence[tuple[int, ...]] | None = None) -> tuple[TensorInfo, ...]:
    shapes = [value.shape for value in values] if shapes is None else shapes
    return tuple(TensorInfo(s, v.itemsize, dtype_name(v.dtype)) for v, s in zip(values, shapes, strict=True))
