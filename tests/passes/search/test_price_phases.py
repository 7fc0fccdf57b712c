"""Faster kernels or links never lengthen a recipe's predicted step, whether device or host is slower."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoshard.ir.execution import Execution
from cost_models.hardware import Cluster, node_type
from cost_models.schedule_orders import SCHEDULES
from cost_models.step import InStep
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.price_layers import AxisTraffic, Busy, LayerPrice, PhasePrice
from passes.search.layers.propagate_axis import MoveKind
from passes.search.pipeline_stages import cut_into_stages
from passes.search.price_recipe import Step
from passes.search.recipe_groups import recipe_groups
from tests.passes.executions import under

SECONDS = st.sampled_from([1e-5, 0.0, 3e-5, 1e-4, 1e-3])
COUNTS = st.sampled_from([40, 0, 4])
BLOCKS = ("layers:0",) * 4
NODE = node_type("a100_sxm_80gb")


@st.composite
def phases(draw: st.DrawFn, *, is_backward: bool) -> PhasePrice:
    """Draw the price of a phase: its kernels, some of attention or weight gradients, and its collectives."""
    parts = draw(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, COUNTS, COUNTS))
    core = Busy(attention_s=parts[1], kernels=1)
    tail = Busy(memory_s=parts[2], kernels=parts[4])
    rest = Busy(matmul_s=parts[0], memory_s=parts[3], kernels=parts[5])
    if is_backward:
        late = draw(SECONDS)
        rest += Busy(matmul_s=late, kernels=2, weight_gradient_s=late, weight_gradient_kernels=2)
    traffic = tuple(
        AxisTraffic(axis, draw(st.sampled_from([MoveKind.GATHER, MoveKind.REDUCE])), size)
        for axis in ("tensor", "context", "expert")
        if (size := draw(st.sampled_from([10**7, 10**5, 0])))
    )
    return PhasePrice(rest + core + tail, core, tail, traffic)


@st.composite
def layers(draw: st.DrawFn) -> LayerPrice:
    """Draw the price of a layer class, with or without parameters and expert parameters."""
    sizes = dict.fromkeys(("core_bytes", "entering_bytes", "workspace_bytes"), draw(st.sampled_from([0, 10**6])))
    return LayerPrice(
        **sizes, saved_bytes=draw(st.sampled_from([0, 10**7])), matrices=2,
        parameters=draw(st.sampled_from([0, 10**5, 10**7])), expert_parameters=draw(st.sampled_from([0, 10**6])),
        phase={name: draw(phases(is_backward=name == "backward")) for name in ("forward", "backward")}.__getitem__,
    )  # fmt: skip


NAMED = ((None, 1), *((item.name, item.least_stages) for item in SCHEDULES.values()))


@st.composite
def recipes(draw: st.DrawFn) -> Execution:
    """Draw a recipe with any recomputation, sharding, overlap and schedule."""
    schedule, virtual = draw(st.sampled_from(NAMED))
    data, tensor, context, turns = (draw(st.sampled_from(sizes)) for sizes in ([1, 2], [1, 2], [1, 2], [4, 8]))
    is_replicated = data * context > 1
    micro_batch = draw(st.integers(1, 2))
    recipe = Execution(
        data=data, tensor=tensor, context=context, pipeline=2 if schedule else 1, schedule=schedule,
        virtual_stages=virtual, micro_batch=micro_batch, global_batch=micro_batch * data * turns,
        expert=draw(st.integers(1, 2)) if is_replicated else 1, zero=draw(st.integers(0, 3)) if is_replicated else 0,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        offload=draw(st.sampled_from(["none", "none", "activations"])),
    )  # fmt: skip
    return under(
        recipe,
        early_stop=draw(st.booleans()),
        cuda_graph=draw(st.sampled_from([False, False, True])),
        blocking_launches=draw(st.sampled_from([False, False, True])),
        overlap_gradients=draw(st.booleans()),
        overlap_parameters=draw(st.booleans()),
        overlap_tensor=draw(st.booleans()),
        overlap_pipeline=draw(st.booleans()),
        overlap_expert=draw(st.booleans()),
    )


def _seconds(prices: Mapping[str, LayerPrice], recipe: Execution, fabric: float = 1.0, network: float = 1.0) -> float:
    """Predicted seconds of a step whose links take `fabric` and `network` times as long."""
    nodes = max(1, recipe.devices // 4)
    node = dataclasses.replace(NODE, intra=NODE.intra.slowed(fabric))
    cluster = Cluster(node, nodes, recipe.devices // nodes, InStep(network=network))
    groups = recipe_groups(recipe, cluster)
    return Step(prices, cut_into_stages(BLOCKS, recipe), recipe, groups, cluster).time_s


KERNELS = (("matmul_s", "weight_gradient_s"), ("attention_s",), ("memory_s",))


def _with_kernels(price: LayerPrice, names: Sequence[str], factor: float) -> LayerPrice:
    """Multiply the time of some kernels of a layer class by a factor."""

    def busy(given: Busy) -> Busy:
        return dataclasses.replace(given, **{name: factor * getattr(given, name) for name in names})

    def phase(given: PhasePrice) -> PhasePrice:
        return PhasePrice(busy(given.busy), busy(given.core), busy(given.tail), given.traffic)

    return dataclasses.replace(price, phase=lambda name: phase(price.phase(name)))


def _small() -> LayerPrice:
    """A layer class whose kernels are slower to issue than to run, with a backward collective over `tensor`."""
    sizes = dict.fromkeys(("saved_bytes", "core_bytes", "entering_bytes", "workspace_bytes", "expert_parameters"), 0)
    late = Busy(matmul_s=1e-5, kernels=1, weight_gradient_s=1e-5, weight_gradient_kernels=1)
    busy, traffic = Busy(matmul_s=1e-5, kernels=40), AxisTraffic("tensor", MoveKind.REDUCE, 10**7)
    forward, backward = PhasePrice(busy, Busy(), Busy(), ()), PhasePrice(busy + late, Busy(), Busy(), (traffic,))
    return LayerPrice(**sizes, parameters=0, matrices=2, phase={"forward": forward, "backward": backward}.__getitem__)


SMALL = dict.fromkeys((BEFORE, "layers:0", AFTER), _small())


@example(SMALL, Execution(tensor=2, global_batch=8), 0.5)
@example(SMALL, Execution(tensor=2, global_batch=8, pipeline=2, schedule="InterleavedZeroBubble"), 0.5)
@settings(max_examples=60)
@given(
    st.fixed_dictionaries({name: layers() for name in (BEFORE, "layers:0", AFTER)}),
    recipes(),
    st.sampled_from([0.5, 0.9, 0.99]),
)
def test_no_step_is_longer_where_a_part_is_faster(
    prices: Mapping[str, LayerPrice], recipe: Execution, factor: float
) -> None:
    """With faster products, attention, other kernels or links, no predicted step is longer, but for rounding."""
    as_it_is = _seconds(prices, recipe) * (1 + 1e-12)
    for names in KERNELS:
        faster = {name: _with_kernels(price, names, factor) for name, price in prices.items()}
        assert _seconds(faster, recipe) <= as_it_is, names
    assert _seconds(prices, recipe, fabric=factor) <= as_it_is
    assert _seconds(prices, recipe, network=factor) <= as_it_is
