"""The Triton kernels that a program would run on one device, within which its calls are priced, and those of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autoshard.ir.kernels import NO_KERNELS, Kernels
from autoshard.ir.lowered import LoweredProgram
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import UNKNOWN, NodePlan
from autoshard.ir.program import Program
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.enumeration import Strategy
from cost_models.hardware import Cluster
from passes.lowering.lower import Lower, result_key
from passes.planning.kernel_prices import Fusion, find_fusion
from passes.planning.rewrite_prices import Within
from passes.strategies.enumerate_strategies import SearchSpace, Site
from passes.strategies.price import Prices, StepPrice
from passes.strategies.scratch import emitted_call

if TYPE_CHECKING:
    from autoshard.kernels.kernel import FusedKernel

_KERNELS = "autoshard: its kernels on one device"


def fusion_of(space: SearchSpace, prices: Prices) -> Fusion:
    """Prices of calls within kernels."""
    from passes.lowering.price_kernels import price_within

    kernels, takers = _kernels_known(space, prices.cluster)
    alone = takers.difference(*(use.stands_for for use in kernels.uses))

    def within(site: Site, strategy: Strategy) -> Within:
        assert site.node is not None, "calls have nodes"
        call = emitted_call(site, strategy, prices.mesh)
        return Within(*price_within(call, site.node, prices.cluster.device, cheap_kernels(), alone))

    return find_fusion(space, prices, kernels, takers, within)


def _kernels_known(space: SearchSpace, cluster: Cluster) -> tuple[Kernels, frozenset[str]]:
    """`kernels_on_one_device`, found once for all meshes, and kept with the prepared graph."""
    program, device = space.program, cluster.device
    of_program, of_device, kernels = program.graph_module.meta.get(_KERNELS, (None, None, (NO_KERNELS, frozenset())))
    if of_program is not program or of_device != device:
        kernels = kernels_on_one_device(space, cluster)
        program.graph_module.meta[_KERNELS] = (program, device, kernels)
    return kernels


def kernels_on_one_device(space: SearchSpace, cluster: Cluster) -> tuple[Kernels, frozenset[str]]:
    """The Triton kernels with which a program would run where every value is whole, for its search.

    And the pointwise calls that are, or may be, in generated ones.
    """
    from passes.lowering.price_kernels import fused_phases, pointwise_calls, price_phases

    lowered = on_one_device(space)
    phased = fused_phases(lowered, cheap_kernels())
    return price_phases(lowered, phased, cluster.device), pointwise_calls(phased)


def cheap_kernels() -> tuple[FusedKernel, ...]:
    """The hand-written kernels that searches know: not those that compute anew, which save memory, by the specs."""
    from autoshard.kernels.registry import FUSED

    return tuple(kernel for kernel in FUSED if not kernel.readers_of_anew)


def on_one_device(space: SearchSpace) -> LoweredProgram:
    """A program lowered with every value whole; the first strategies of its sites are that."""
    first = {name: site.strategies[0] for name, site in space.sites.items() if site.node is not None}
    whole = Plan(
        mesh=space.mesh,
        program_digest=space.program.digest(),
        inputs={},
        nodes={name: NodePlan(strategy.inputs, strategy.outputs) for name, strategy in first.items()},
        outputs={result_key(slot): PartitionSpec() for slot in space.program.outputs},
        parameters={},
        predicted=UNKNOWN,
        objective=0.0,
        lower_bound=None,
        search_time_s=0.0,
        hardware="",
    )
    return Lower(whole)(space.program)


def kernels_of(plan: Plan, prepared: Program, cluster: Cluster, counts: Mapping[str, int]) -> Kernels:
    """The Triton kernels that a plan runs with; nothing is written for them.

    Args:
        plan: the plan.
        prepared: its program, as `prepare_for` gives it.
        cluster: what it is priced for.
        counts: node to how often it runs, where that is not once (`Elided.site_counts`).
    """
    from passes.lowering.price_kernels import price_kernels

    return price_kernels(Lower(plan, StepPrice(cluster, plan.mesh))(prepared), cluster.device, counts)
