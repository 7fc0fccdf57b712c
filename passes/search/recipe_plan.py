"""The plan of a recipe: specs of the program on the mesh of the recipe, and what the cost models say of the step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from autoshard.errors import RecipeError
from autoshard.ir.execution import Execution
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import Offload
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import ParameterPlan, Prediction
from autoshard.ir.program import InputKind, OutputKind, describe
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.text import format_bytes
from cost_models.hardware import Cluster
from cost_models.intervals import EIGHT_BITS, RECIPES, step_time_uncertainty
from passes.search.layers.combine_layouts import combined
from passes.search.layers.price_model import CountedModel, PricedModel, RecipeKind
from passes.search.layers.propagate_axis import AxisLayout
from passes.search.pipeline_stages import in_flight, share_out
from passes.search.price_ends import WEIGHT_BYTES
from passes.search.price_memory import MemoryPrice, host_bytes, memory_price
from passes.search.price_recipe import HOST, Step, model_flops
from passes.search.recipe_groups import recipe_groups


def recipe_plan(
    priced: PricedModel,
    recipe: Execution,
    cluster: Cluster,
) -> Plan:
    """The plan of a recipe.

    Args:
        priced: the traced model.
        recipe: the recipe.
        cluster: as large as the recipe needs.

    Raises:
        RecipeError: see `autoshard.price`.
    """
    start = time.monotonic()
    prediction = predict_recipe(priced.counted, recipe, cluster)
    kind = RecipeKind.of(recipe)
    mesh = recipe_mesh(recipe)
    layouts = priced.layouts(kind)
    program = priced.folded.single
    traced = program.nodes_by_name()
    return Plan(
        mesh=mesh,
        program_digest=priced.digest,
        inputs={slot.name: describe(traced[slot.node].meta["val"]) for slot in program.inputs_of(InputKind.INPUT)},
        nodes=priced.node_plans(kind),
        outputs={f"output {slot.name}": PartitionSpec() for slot in program.outputs_of(OutputKind.OUTPUT)},
        parameters=_parameter_plans(priced, layouts, recipe, mesh),
        predicted=prediction,
        objective=prediction.step_time_s,
        lower_bound=None,
        search_time_s=time.monotonic() - start,
        hardware=cluster.name,
        recipe=recipe.recipe,
        runtime=recipe.runtime.name,
        micro_batches=recipe.micro_batches,
        offload=Offload(
            host_bytes=_host_bytes(priced.counted, recipe, cluster),
            time_s=prediction.breakdown.get(f"communication over {HOST}", 0.0),
        ),
    )


def predict_recipe(priced: CountedModel, recipe: Execution, cluster: Cluster) -> Prediction:
    """What a step takes under a recipe, on the fullest rank. See `recipe_plan`."""
    step, memory, least_s = _step_of(priced, recipe, cluster)
    uncertainty = step_time_uncertainty(EIGHT_BITS if recipe.precision == "f8" else RECIPES)
    return Prediction(
        step_time_s=step.time_s,
        peak_memory_bytes=memory.total,
        breakdown=step.breakdown,
        memory_breakdown=memory.parts,
        tokens_per_s=priced.tokens * recipe.batch / step.time_s if priced.tokens else None,
        mfu=least_s / step.time_s,
        overlaps=True,
        step_time_interval_s=None if uncertainty is None else uncertainty.interval(step.time_s),
        interval_coverage=None if uncertainty is None else uncertainty.coverage,
    )


def _host_bytes(priced: CountedModel, recipe: Execution, cluster: Cluster) -> int:
    """What lies in the host's memory for each device. Raises RecipeError where it does not hold that."""
    if recipe.offload != "activations":
        return 0
    size = host_bytes(
        priced.section_sizes(recipe, cluster), share_out(priced.blocks, recipe), recipe, in_flight(recipe)
    )
    return _held_by_host(recipe, cluster, size)


def _held_by_host(recipe: Execution, cluster: Cluster, size: int) -> int:
    """So many bytes, if the host has room for them. Raises RecipeError where it has not."""
    share = cluster.host_bytes_per_device
    if share is not None and size > share:
        raise RecipeError(
            f"offload={recipe.offload!r} takes {format_bytes(size)} of the host's memory for each device of "
            f"{cluster.name}, of which it has {format_bytes(share)}. Recompute more, or use a smaller micro_batch."
        )
    return size


def _step_of(priced: CountedModel, recipe: Execution, cluster: Cluster) -> tuple[Step, MemoryPrice, float]:
    """The step, its memory, and the seconds that its FLOPs take at the peak."""
    groups = recipe_groups(recipe, cluster)
    stages = share_out(priced.blocks, recipe)
    sections = priced.section_prices(recipe, cluster)
    step = Step(sections, stages, recipe, groups, cluster)
    memory = memory_price(sections, stages, recipe, groups, in_flight(recipe))
    _host_bytes(priced, recipe, cluster)
    return step, memory, model_flops(sections, priced.blocks, recipe) / _peak(recipe, cluster)


def _peak(recipe: Execution, cluster: Cluster) -> float:
    """FLOP/s of products at a device's peak."""
    return cluster.device.peak("bf16" if recipe.precision == "f8" else recipe.precision)


def recipe_mesh(recipe: Execution) -> Mesh:
    """The mesh of a recipe, slowest axis first, as Megatron-LM orders ranks; axes of one are left out.

    The expert axis is the fastest part of data x context, which is then called "data".
    """
    axes = {"pipeline": recipe.pipeline, "data": recipe.data, "context": recipe.context, "tensor": recipe.tensor}
    if recipe.expert > 1 and recipe.replicas % recipe.expert == 0:
        outer = recipe.replicas // recipe.expert
        axes = {"pipeline": recipe.pipeline, "data": outer, "expert": recipe.expert, "tensor": recipe.tensor}
    elif recipe.expert > 1:
        outer = recipe.expert_ranks // recipe.expert
        axes = {"pipeline": recipe.pipeline, "data": outer, "expert": recipe.expert, "tensor": recipe.expert_tensor}
    return Mesh({axis: size for axis, size in axes.items() if size > 1} or {"data": 1})


def _parameter_plans(
    priced: PricedModel, layouts: Mapping[str, AxisLayout], recipe: Execution, mesh: Mesh
) -> dict[str, ParameterPlan]:
    """Every parameter of the whole model; ZeRO-3 splits the first dim over replicas too.

    Experts may lie on ranks of the tensor axis too, which the mesh then does not name.
    """
    nodes = priced.folded.single.nodes_by_name()
    sizes = {"tensor": recipe.tensor, "context": recipe.context, "expert": recipe.expert}
    axes = Mesh({**dict(mesh.axes), **{name: size for name, size in sizes.items() if size > 1}})
    plans: dict[str, ParameterPlan] = {}
    for slot in priced.folded.single.inputs_of(InputKind.PARAMETER):
        names = priced.folded.names_of(slot.name)
        if not names:
            continue
        specs = tuple(layout.results[slot.node][0] for layout in layouts.values())
        spec = combined(tuple(layouts), specs)
        value = nodes[slot.node].meta["val"]
        spec = replica_sharded(spec, recipe, mesh)
        shape = tuple(value.shape)
        size = math.prod(spec.local_shape(shape, axes)) * WEIGHT_BYTES[recipe.precision]
        plans.update(dict.fromkeys(names, ParameterPlan(spec, shape, size)))
    return plans


def replica_sharded(spec: PartitionSpec, recipe: Execution, mesh: Mesh) -> PartitionSpec:
    """The spec of a parameter at rest: ZeRO-3 splits its first dim over replicas too."""
    if recipe.zero < 3:
        return spec
    shards = (axis for axis in ("data", "expert", "context") if axis in mesh.axis_names)
    free = tuple(axis for axis in shards if axis not in spec.axes)
    return PartitionSpec((*free, *spec.axes_of(0)), *spec.dims[1:])
