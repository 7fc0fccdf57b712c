"""The meshes that a recipe fits, and the refusal of recipes that fit no mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from autoshard.errors import NotAvailableError, RecipeError
from autoshard.ir.mesh import Mesh
from autoshard.ir.recipe import Recipe, is_several
from autoshard.ir.staged import PIPELINE_AXIS

AXES = (PIPELINE_AXIS, "replica", "data", "expert", "context", "model")
"""The axes of a recipe's mesh, the outermost first."""

_, REPLICA, DATA, EXPERT, CONTEXT, MODEL = AXES

_OF_DATA = ("data", "zero", "zero_group")
FIELDS: Mapping[str, Sequence[str]] = {
    REPLICA: _OF_DATA,
    DATA: _OF_DATA,
    EXPERT: ("expert",),
    CONTEXT: ("context",),
    MODEL: ("tensor", "sequence_parallel", "expert_tensor"),
}
"""The recipe fields that decide the use of an axis. If all of them are free, the axis is free."""


def restricts(recipe: Recipe, axis: str) -> bool:
    """Whether a recipe decides the use of an axis."""
    return any(getattr(recipe, name) is not None for name in FIELDS.get(axis, ()))


def names_axes_of(recipe: Recipe | None, meshes: Iterable[Mesh]) -> bool:
    """Whether a recipe decides the use of any axis of some meshes."""
    return recipe is not None and any(restricts(recipe, axis) for mesh in meshes for axis in mesh.axis_names)


def pipeline_ranks(mesh: Mesh) -> int:
    """Number of ranks along the pipeline axis; 1 if the mesh has none."""
    return dict(mesh.axes).get(PIPELINE_AXIS, 1)


def meshes_of_recipe(recipe: Recipe, devices: int, per_node: int) -> list[Mesh]:
    """Return the meshes of `devices` devices that a recipe fits: one, or one for each size of its free axes.

    If `context` is free, it gets an axis only if no mesh is possible without it, because any free axis may split the
    sequence. `pipeline` and `expert` get axes only if the recipe gives their sizes.

    Raises:
        RecipeError: no sizes of the free axes multiply to `devices`, or the recipe has a schedule without a pipeline.
        NotAvailableError: the recipe has no program on any mesh.
    """
    _refuse_without_program(recipe)
    _check_stages(recipe, recipe.pipeline or 1, "On a cluster give pipeline= too.")
    free = [size for size in range(1, per_node + 1) if per_node % size == 0]
    tensors = free if recipe.tensor is None else [recipe.tensor]
    contexts = [1] if recipe.context is None else [recipe.context]
    found = _meshes_of_sizes(recipe, devices, tensors, contexts)
    if not found and recipe.context is None:
        found = _meshes_of_sizes(recipe, devices, tensors, free)
    if not found:
        sizes = {"data": recipe.data, "context": recipe.context, "tensor": recipe.tensor}
        asked = {**sizes, "pipeline": recipe.pipeline if is_several(recipe.pipeline) else None}
        said = " x ".join(f"{name}={size}" for name, size in asked.items() if size is not None)
        experts = f" with expert={recipe.expert} among those of data" if is_several(recipe.expert) else ""
        raise RecipeError(
            f"{said}{experts} does not make {devices} devices. Give sizes that multiply to {devices}, or leave one "
            "free (None)."
        )
    return found


def _meshes_of_sizes(recipe: Recipe, devices: int, tensors: Sequence[int], contexts: Sequence[int]) -> list[Mesh]:
    """Return the meshes of a recipe with the given sizes of tensor and context axes."""
    found = []
    for tensor, context in product(tensors, contexts):
        data, rest = divmod(devices, (recipe.pipeline or 1) * tensor * context)
        if not rest and data and recipe.data in (None, data) and data % (recipe.expert or 1) == 0:
            found.append(_mesh(recipe, data, context, tensor))
    return found


def _mesh(recipe: Recipe, data: int, context: int, tensor: int) -> Mesh:
    """Return the mesh of the given sizes, without axes of one rank."""
    group = data if recipe.zero_group is None else recipe.zero_group
    if data % group:
        raise RecipeError(f"zero_group={group} must divide data={data}.")
    expert = recipe.expert or 1
    sizes = {
        PIPELINE_AXIS: recipe.pipeline or 1,
        REPLICA: data // group,
        DATA: group // expert,
        EXPERT: expert,
        CONTEXT: context,
        MODEL: tensor,
    }
    return Mesh({axis: size for axis, size in sizes.items() if size > 1} or {DATA: 1})


def _refuse_without_program(recipe: Recipe) -> None:
    """Refuse a recipe that restricts no specs on any mesh."""
    if said := recipe.without_program:
        raise NotAvailableError(
            f"{said} has no program yet that compile runs. Leave the field out, or price the recipe as another "
            "runtime would execute it, with runtime='megatron', 'fsdp2' or 'deepspeed'."
        )


def _check_stages(recipe: Recipe, ranks: int, way_out: str) -> None:
    """Refuse a recipe whose fields for stages do not fit a pipeline of `ranks` ranks."""
    try:
        replace(recipe, pipeline=ranks)
    except RecipeError as error:
        raise RecipeError(f"{error} {way_out}") from error


def check_mesh(recipe: Recipe, mesh: Mesh) -> None:
    """Refuse a recipe that does not fit a mesh. Axes with other names are free.

    Raises:
        RecipeError: the mesh has other sizes, or the recipe leaves no use for an axis of another name.
        NotAvailableError: the recipe has no program on any mesh.
    """
    _refuse_without_program(recipe)
    sizes = dict(mesh.axes)
    unknown = [axis for axis, size in sizes.items() if axis not in AXES and size > 1]
    if unknown and None not in (recipe.data, recipe.context, recipe.tensor):
        raise RecipeError(
            f"A recipe has the axes {', '.join(map(repr, AXES))}, and {mesh} has {unknown[0]!r}. Name the mesh's "
            "axes so, or leave one of data, context and tensor free (None)."
        )
    replicas, group = sizes.get(REPLICA, 1), sizes.get(DATA, 1) * sizes.get(EXPERT, 1)
    if recipe.zero_group not in (None, group if replicas > 1 else replicas * group):
        raise RecipeError(
            f"zero_group={recipe.zero_group} takes an axis 'data' of that size, and copies of it over an axis "
            f"'replica'; the mesh is {mesh}."
        )
    for name, axis, asked, found in (
        ("data", f"{DATA}' and '{EXPERT}" if is_several(recipe.expert) else DATA, recipe.data, replicas * group),
        ("expert", EXPERT, recipe.expert, sizes.get(EXPERT, 1)),
        ("context", CONTEXT, recipe.context, sizes.get(CONTEXT, 1)),
        ("tensor", MODEL, recipe.tensor, sizes.get(MODEL, 1)),
        ("pipeline", PIPELINE_AXIS, recipe.pipeline, pipeline_ranks(mesh)),
    ):
        if asked not in (None, found):
            raise RecipeError(
                f"{name}={asked}, but the mesh {mesh} has {found} ranks along '{axis}'. Leave {name} free (None), or "
                f"take a mesh with {asked} ranks along '{axis}'."
            )
    _check_stages(recipe, pipeline_ranks(mesh), f"The mesh is {mesh}; stages take an axis named 'pipeline'.")
