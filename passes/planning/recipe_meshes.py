"""The meshes on which a recipe may lie, and the recipes that lie on none."""

from __future__ import annotations

from itertools import product

from autoshard.errors import NotAvailableError, RecipeError
from autoshard.ir.mesh import Mesh
from autoshard.ir.recipe import Recipe
from autoshard.ir.staged import PIPELINE_AXIS

AXES = (PIPELINE_AXIS, "replica", "data", "expert", "context", "model")
"""The axes of a recipe's mesh, the outermost first."""

_, REPLICA, DATA, EXPERT, CONTEXT, MODEL = AXES


def meshes_of_recipe(recipe: Recipe, devices: int, per_node: int) -> list[Mesh]:
    """The meshes of so many devices on which a recipe may lie: one, or those of every size of an axis that is free.

    Raises:
        RecipeError: no sizes of the free axes make so many devices.
        NotAvailableError: the recipe has no program on any mesh.
    """
    _refuse_without_program(recipe)
    free = [size for size in range(1, per_node + 1) if per_node % size == 0]
    tensors = free if recipe.tensor is None else [recipe.tensor]
    contexts = free if recipe.context is None else [recipe.context]
    found = []
    for tensor, context in product(tensors, contexts):
        data, rest = divmod(devices, recipe.pipeline * tensor * context)
        if not rest and data and recipe.data in (None, data) and data % recipe.expert == 0:
            found.append(_mesh(recipe, data, context, tensor))
    if not found:
        sizes = {"data": recipe.data, "context": recipe.context, "tensor": recipe.tensor}
        asked = {**sizes, "pipeline": recipe.pipeline if recipe.pipeline > 1 else None}
        said = " x ".join(f"{name}={size}" for name, size in asked.items() if size is not None)
        experts = f" with expert={recipe.expert} among those of data" if recipe.expert > 1 else ""
        raise RecipeError(
            f"{said}{experts} does not make {devices} devices; give axes that do, or leave one free (None)."
        )
    return found


def _mesh(recipe: Recipe, data: int, context: int, tensor: int) -> Mesh:
    """The mesh of axes of some sizes, without those of one rank."""
    group = data if recipe.zero_group is None else recipe.zero_group
    if data % group:
        raise RecipeError(f"zero_group={group} must divide data={data}.")
    sizes = {
        PIPELINE_AXIS: recipe.pipeline,
        REPLICA: data // group,
        DATA: group // recipe.expert,
        EXPERT: recipe.expert,
        CONTEXT: context,
        MODEL: tensor,
    }
    return Mesh({axis: size for axis, size in sizes.items() if size > 1} or {DATA: 1})


def _refuse_without_program(recipe: Recipe) -> None:
    """Refuse a recipe that is no restriction of specs on any mesh."""
    if said := recipe.without_program:
        raise NotAvailableError(
            f"{said} has no program yet that compile runs. Leave the field out, or price the recipe as another "
            "runtime would execute it, with runtime='megatron', 'fsdp2' or 'deepspeed'."
        )


def check_mesh(recipe: Recipe, mesh: Mesh) -> None:
    """Refuse a recipe that is no restriction of specs on a mesh.

    Raises:
        RecipeError: the mesh has other axes, or sizes.
        NotAvailableError: the recipe has no program on any mesh.
    """
    _refuse_without_program(recipe)
    sizes = dict(mesh.axes)
    unknown = [axis for axis, size in sizes.items() if axis not in AXES and size > 1]
    if unknown:
        raise RecipeError(
            f"A recipe has the axes {', '.join(map(repr, AXES))}, and {mesh} has {unknown[0]!r}. Name the mesh's "
            "axes so."
        )
    replicas, group = sizes.get(REPLICA, 1), sizes.get(DATA, 1) * sizes.get(EXPERT, 1)
    if (recipe.zero_group or replicas * group) != (group if replicas > 1 else replicas * group):
        raise RecipeError(
            f"zero_group={recipe.zero_group} takes an axis 'data' of that size, and copies of it over an axis "
            f"'replica'; the mesh is {mesh}."
        )
    for name, axis, asked, found in (
        ("data", f"{DATA}' and '{EXPERT}" if recipe.expert > 1 else DATA, recipe.data, replicas * group),
        ("expert", EXPERT, recipe.expert, sizes.get(EXPERT, 1)),
        ("context", CONTEXT, recipe.context, sizes.get(CONTEXT, 1)),
        ("tensor", MODEL, recipe.tensor, sizes.get(MODEL, 1)),
        ("pipeline", PIPELINE_AXIS, recipe.pipeline, sizes.get(PIPELINE_AXIS, 1)),
    ):
        if asked not in (None, found):
            raise RecipeError(f"{name}={asked}, but the mesh {mesh} has {found} ranks along '{axis}'.")
