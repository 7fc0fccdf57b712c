"""Find MFU and HFU, the share of the hardware's peak that a step uses, from the FLOPs of products and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.ir.recompute import PHASE
from autoshard.ir.spec import PartitionSpec
from cost_models.operators import work
from cost_models.work import Kind, Work
from passes.planning.build_assignment import PlanningProblem
from passes.strategies.enumerate_strategies import Site, operands_of
from passes.strategies.operator_names import operator_name
from passes.strategies.tensor_infos import tensor_infos


class Utilisation(NamedTuple):
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
    space, peak, counts = planning.space, planning.prices.cluster.device.peak, planning.counts()
    model_s = local_s = 0.0
    for members in planning.members:
        site = space.sites[members[0]]
        if site.node is None or site.node.op != "call_function" or site.rule is None or not operands_of(site.node):
            continue
        done = _work(site)
        if not done.products and done.kind is not Kind.ATTENTION:
            continue
        calls = {name: counts.get(name, 1) for name in members if space.sites[name].call == site.call}
        of_model = sum(count for name, count in calls.items() if space.sites[name].phase != PHASE)
        model_s += of_model * (done.flops - done.recomputed_flops) / peak(done.dtype) / space.mesh.size
        strategy = planning.strategy(site.name, choice)
        local = _work(site, (*strategy.inputs, *strategy.outputs), space.mesh)
        local_s += sum(calls.values()) * local.flops / peak(local.dtype)
    return Utilisation(model_s, local_s)


def _work(site: Site, specs: Sequence[PartitionSpec] = (), mesh: Mesh | None = None) -> Work:
    """Return the work of a call: of the whole call, or of one rank if its operands and results have `specs`."""
    assert site.node is not None, "calls have nodes"
    inputs, outputs = tensor_infos(site.node)
    if mesh is not None:
        pairs = zip((*inputs, *outputs), specs, strict=True)
        local = [info._replace(shape=spec.local_shape(info.shape, mesh)) for info, spec in pairs]
        inputs, outputs = local[: len(inputs)], local[len(inputs) :]
    return work(operator_name(site.node), inputs, outputs, tuple(fx.map_arg(site.node.args, lambda argument: None)))
