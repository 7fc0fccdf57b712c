"""Make the plan of a recipe without a search over specs: a spec for each value on its mesh, and a predicted step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from autoshard.errors import RecipeError
from autoshard.ir.execution import Execution
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import Offload
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import NodePlan, ParameterPlan, Prediction
from autoshard.ir.program import InputKind, OutputKind, describe
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.text import format_bytes
from cost_models.hardware import Cluster
from cost_models.intervals import EIGHT_BITS, RECIPES, step_time_uncertainty
from passes.search.layers.price_model import CountedModel, PricedModel, RecipeKind
from passes.search.layers.propagate_axis import AXIS, AxisLayout
from passes.search.pipeline_stages import cut_into_stages, in_flight
from passes.search.price_ends import WEIGHT_BYTES
from passes.search.price_memory import host_bytes, memory_price
from passes.search.price_recipe import HOST, Step, model_flops
from passes.search.recipe_groups import recipe_groups


def recipe_plan(
    priced: PricedModel,
    recipe: Execution,
    cluster: Cluster,
) -> Plan:
    """Return the plan of a recipe on a cluster with as many devices as the recipe needs.

    Raises:
        RecipeError: the recipe does not suit the model or the cluster.
    """
    start = time.monotonic()
    prediction = predict_recipe(priced.counted, recipe, cluster)
    layouts = priced.layouts(RecipeKind.of(recipe))
    mesh, program = recipe_mesh(recipe), priced.folded.single
    traced = program.nodes_by_name()
    return Plan(
        mesh=mesh,
        program_digest=priced.digest,
        inputs={slot.name: describe(traced[slot.node].meta["val"]) for slot in program.inputs_of(InputKind.INPUT)},
        nodes=_node_plans(priced, layouts),
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
    """Return the predicted time of a step under a recipe, and the predicted memory of the rank that needs most.

    Raises:
        RecipeError: the recipe does not suit the model or the cluster, or the host has too little memory for
            offloading.
    """
    groups, stages = recipe_groups(recipe, cluster), cut_into_stages(priced.blocks, recipe)
    layers = priced.layer_prices(recipe, cluster)
    step = Step(layers, stages, recipe, groups, cluster)
    step_s = step.time_s
    memory = memory_price(layers, stages, recipe, groups, in_flight(recipe))
    _host_bytes(priced, recipe, cluster)
    peak_flops_per_s = cluster.device.peak("bf16" if recipe.precision == "f8" else recipe.precision)
    uncertainty = step_time_uncertainty(EIGHT_BITS if recipe.precision == "f8" else RECIPES)
    return Prediction(
        step_time_s=step_s,
        peak_memory_bytes=memory.total,
        breakdown=step.breakdown,
        memory_breakdown=memory.parts,
        tokens_per_s=priced.tokens * recipe.batch / step_s if priced.tokens else None,
        mfu=model_flops(layers, priced.blocks, recipe) / peak_flops_per_s / step_s,
        overlaps=True,
        step_time_interval_s=None if uncertainty is None else uncertainty.interval(step_s),
        interval_coverage=None if uncertainty is None else uncertainty.coverage,
    )


def _host_bytes(priced: CountedModel, recipe: Execution, cluster: Cluster) -> int:
    """Return the bytes of offloaded activations in the host's memory for each device.

    Raises:
        RecipeError: a device's share of the host's memory is smaller.
    """
    if recipe.offload != "activations":
        return 0
    stages, share = cut_into_stages(priced.blocks, recipe), cluster.host_bytes_per_device
    size = host_bytes(priced.layer_prices(recipe, cluster), stages, recipe, in_flight(recipe))
    if share is not None and size > share:
        raise RecipeError(
            f"offload={recipe.offload!r} takes {format_bytes(size)} of the host's memory for each device of "
            f"{cluster.name}, of which it has {format_bytes(share)}. Recompute more, or use a smaller micro_batch."
        )
    return size


def recipe_mesh(recipe: Execution) -> Mesh:
    """Return the mesh of a recipe, with the slowest axis first as in Megatron-LM, and without axes of one rank.

    If experts are shared out, the axes "data" and "expert" replace "data" and "context". They divide the ranks of
    data x context, and "expert" is the faster axis. If `expert` is no divisor of these ranks, "tensor" has only
    `expert_tensor` ranks, and the two axes divide all other ranks of a stage (`Execution.expert_ranks`).
    """
    axes = {"pipeline": recipe.pipeline, "data": recipe.data, "context": recipe.context, "tensor": recipe.tensor}
    if recipe.expert > 1 and recipe.replicas % recipe.expert == 0:
        outer = recipe.replicas // recipe.expert
        axes = {"pipeline": recipe.pipeline, "data": outer, "expert": recipe.expert, "tensor": recipe.tensor}
    elif recipe.expert > 1:
        outer = recipe.expert_ranks // recipe.expert
        axes = {"pipeline": recipe.pipeline, "data": outer, "expert": recipe.expert, "tensor": recipe.expert_tensor}
    return Mesh({axis: size for axis, size in axes.items() if size > 1} or {"data": 1})


def combined(specs: Mapping[str, PartitionSpec]) -> PartitionSpec:
    """Merge the specs of one tensor on single mesh axes into one spec on all these axes.

    `specs` is keyed by the name of the mesh axis. Each spec in it calls its axis `AXIS`.

    Example:
        >>> combined({"context": PartitionSpec(None, AXIS), "tensor": PartitionSpec(None, AXIS)})
        P(None, ('context', 'tensor'))
    """
    ndim = max((len(spec.dims) for spec in specs.values()), default=0)
    dims = [tuple(axis for axis, spec in specs.items() if AXIS in spec.axes_of(dim)) for dim in range(ndim)]
    reductions = {axis: spec.reduction_over(AXIS) for axis, spec in specs.items()}
    return PartitionSpec(*dims, partial={axis: item.value for axis, item in reductions.items() if item is not None})


def _node_plans(priced: PricedModel, layouts: Mapping[str, AxisLayout]) -> dict[str, NodePlan]:
    """Return the specs of the calls in one block of each kind, and of the calls outside of blocks, by name.

    Data parallelism splits the batch before the program runs, so the axis "data" is in no spec.
    """

    def each(found: Mapping[str, tuple[PartitionSpec, ...]]) -> tuple[PartitionSpec, ...]:
        return tuple(combined(dict(zip(found, specs, strict=True))) for specs in zip(*found.values(), strict=True))

    nodes = {}
    for name, layer in priced.folded.layer_of.items():
        known = {axis: layout for axis, layout in layouts.items() if name in layout.results}
        if layer and known:
            inputs, outputs = (
                each({axis: getattr(layout, part).get(name, ()) for axis, layout in known.items()})
                for part in ("operands", "results")
            )
            nodes[name] = NodePlan(inputs, outputs)
    return nodes


def _parameter_plans(
    priced: PricedModel, layouts: Mapping[str, AxisLayout], recipe: Execution, mesh: Mesh
) -> dict[str, ParameterPlan]:
    """Return the plan of each parameter of the whole model, by name. Under ZeRO-3, replicas also split the first dim.

    Bytes come from the recipe's own numbers of tensor, context and expert ranks, because the mesh may lack these axes.
    """
    nodes = priced.folded.single.nodes_by_name()
    sizes = {"tensor": recipe.tensor, "context": recipe.context, "expert": recipe.expert}
    axes = Mesh({**dict(mesh.axes), **{name: size for name, size in sizes.items() if size > 1}})
    plans: dict[str, ParameterPlan] = {}
    for slot in priced.folded.single.inputs_of(InputKind.PARAMETER):
        spec = combined({axis: layout.results[slot.node][0] for axis, layout in layouts.items()})
        if recipe.zero == 3:
            shards = [axis for axis in ("data", "expert", "context") if axis in mesh.axis_names]
            free = (axis for axis in shards if axis not in spec.axes)
            spec = PartitionSpec((*free, *spec.axes_of(0)), *spec.dims[1:])
        shape = tuple(nodes[slot.node].meta["val"].shape)
        size = math.prod(spec.local_shape(shape, axes)) * WEIGHT_BYTES[recipe.precision]
        plans |= dict.fromkeys(priced.folded.names_of(slot.name), ParameterPlan(spec, shape, size))
    return plans
