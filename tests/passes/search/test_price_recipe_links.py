"""Faster links never make a recipe's predicted step slower."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.ir.execution import Execution
from cost_models.hardware import Cluster, node_type
from passes.search.recipe_plan import predict_recipe
from tests.passes.decoders import priced_dense
from tests.passes.executions import under


@st.composite
def _recipes(draw: Any) -> Execution:
    """Draw a recipe for up to 32 devices, with or without overlap, ZeRO, a pipeline and recomputation."""
    data, tensor, pipeline = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2])),
    )
    micro_batch = draw(st.sampled_from([1, 64]))
    flags = {name: draw(st.booleans()) for name in ("overlap_gradients", "overlap_parameters", "overlap_tensor")}
    recipe = Execution(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        zero=draw(st.sampled_from([0, 1] if pipeline > 1 else [0, 1, 2, 3])),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "full"])),
        micro_batch=micro_batch,
        global_batch=micro_batch * data * draw(st.sampled_from([1, 4])),
    )
    return under(recipe, **flags)


def _seconds(recipe: Execution, kind: Any) -> float:
    per_node = min(4, recipe.devices)
    cluster = Cluster(kind, nodes=recipe.devices // per_node, devices_per_node=per_node)
    return predict_recipe(priced_dense(8).counted, recipe, cluster).step_time_s


@settings(deadline=None)
@given(
    _recipes(), st.sampled_from(["h100_sxm", "a100_sxm_40gb"]), st.sampled_from(["intra", "inter"]), st.floats(1, 100)
)
def test_a_faster_link_never_slows_a_recipe(recipe: Execution, node: str, level: str, factor: float) -> None:
    """A link up to 100 times faster, in the node or between nodes, slows no predicted step."""
    kind = node_type(node)
    faster = dataclasses.replace(kind, **{level: getattr(kind, level).scaled(factor)})
    assert _seconds(recipe, faster) <= _seconds(recipe, kind) * (1 + 1e-9)
