"""Find the meshes that a recipe fits, and raise `RecipeError` for a recipe that fits no mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from autoshard.errors import NotAvailableError, RecipeError
from autoshard.ir.mesh import Mesh
from autoshard.ir.recipe import Recipe, is_several
from autoshard.ir.staged import PIPELINE_AXIS

AXES = (PIPELINE_AXIS, "replica", "data", "expert", "context", "model")
"""Names of the axes of a recipe's mesh, the outermost first."""

_, REPLICA, DATA, EXPERT, CONTEXT, MODEL = AXES

_OF_DATA = ("data", "zero", "zero_group")
FIELDS: Mapping[str, Sequence[str]] = {
    REPLICA: _OF_DATA,
    DATA: _OF_DATA,
    EXPERT: ("expert",),
    CONTEXT: ("context",),
    MODEL: ("tensor", "sequence_parallel", "expert_tensor"),
}
"""The fields of `Recipe` that decide each axis's use. If all of them are None, the search decides."""


def restricts(recipe: Recipe, axis: str) -> bool:
    """Whether a recipe sets a field that decides the use of a mesh axis, such as `tensor` for the axis "model"."""
    return any(getattr(recipe, name) is not None for name in FIELDS.get(axis, ()))


def names_axes_of(recipe: Recipe | None, meshes: Iterable[Mesh]) -> bool:
    """Whether a recipe sets a field that decides the use of an axis of one of `meshes`. Without a recipe: False."""
    return recipe is not None and any(restricts(recipe, axis) for mesh in meshes for axis in mesh.axis_names)


def pipeline_ranks(mesh: Mesh) -> int:
    """Return the number of ranks along the axis "pipeline" of a mesh, or 1 if the mesh has no such axis."""
    return dict(mesh.axes).get(PIPELINE_AXIS, 1)


def meshes_of_recipe(recipe: Recipe, devices: int, per_node: int) -> list[Mesh]:
    """Return the meshes that a recipe fits, one for each combination of sizes that the recipe leaves open.

    If the recipe leaves `context` open, a mesh has the axis "context" only if no mesh is possible without it. Other
    open axes may split the sequence too. Axes "pipeline" and "expert" exist only if the recipe gives their sizes.

    Args:
        devices: number of devices of each mesh.
        per_node: number of devices in a node. Open sizes of `tensor` and `context` divide this number.

    Raises:
        RecipeError: no sizes of the open axes multiply to `devices`, or the recipe has a schedule without a pipeline.
            Also raised if `zero_group` or `expert` divides no possible number of ranks of data parallelism.
        NotAvailableError: the recipe has a field for which no program exists yet.
    """
    _refuse_without_program(recipe)
    _check_stages(recipe, recipe.pipeline or 1, "On a cluster give pipeline= too.")
    free = [size for size in range(1, per_node + 1) if per_node % size == 0]
    tensors = free if recipe.tensor is None else [recipe.tensor]
    contexts = [1] if recipe.context is None else [recipe.context]
    sizes = list(_sizes(recipe, devices, tensors, contexts))
    if not any(_is_divided(recipe, data) for data, _, _ in sizes) and recipe.context is None:
        sizes = list(_sizes(recipe, devices, tensors, free))
    if not sizes:
        asked = {"data": recipe.data, "context": recipe.context, "tensor": recipe.tensor}
        asked |= {"pipeline": recipe.pipeline if is_several(recipe.pipeline) else None}
        said = " x ".join(f"{name}={size}" for name, size in asked.items() if size is not None)
        raise RecipeError(
            f"{said} does not make {devices} devices. Give sizes that multiply to {devices}, or leave one free (None)."
        )
    found = [_mesh(recipe, *each) for each in sizes if _is_divided(recipe, each[0])]
    if not found:
        divisors = {"zero_group": recipe.zero_group, "expert": recipe.expert}
        said = " and ".join(f"{name}={size}" for name, size in divisors.items() if is_several(size))
        possible = " or ".join(map(str, sorted({data for data, _, _ in sizes})))
        raise RecipeError(f"{said} must divide data={possible}, as {devices} devices have.")
    return found


def _sizes(
    recipe: Recipe, devices: int, tensors: Sequence[int], contexts: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the sizes (data, context, tensor) that make `devices` devices and that a recipe allows."""
    for tensor, context in product(tensors, contexts):
        data, rest = divmod(devices, (recipe.pipeline or 1) * tensor * context)
        if not rest and data and recipe.data in (None, data):
            yield data, context, tensor


def _is_divided(recipe: Recipe, data: int) -> bool:
    """Whether the ZeRO groups and the experts of a recipe divide `data` ranks of data parallelism."""
    return data % (recipe.zero_group or 1) == 0 and data % (recipe.expert or 1) == 0


def _mesh(recipe: Recipe, data: int, context: int, tensor: int) -> Mesh:
    """Return the mesh with these sizes, without axes of one rank."""
    group = data if recipe.zero_group is None else recipe.zero_group
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
    if said := recipe.without_program:
        raise NotAvailableError(
            f"{said} has no program yet that compile runs. Leave the field out, or price the recipe as another "
            "runtime would execute it, with runtime='megatron', 'fsdp2' or 'deepspeed'."
        )


def _check_stages(recipe: Recipe, ranks: int, way_out: str) -> None:
    """Raise `RecipeError` if a recipe's fields do not fit a pipeline of `ranks` ranks.

    `way_out` is the last sentence of the message, which says how to avoid the error.
    """
    try:
        replace(recipe, pipeline=ranks)
    except RecipeError as error:
        raise RecipeError(f"{error} {way_out}") from error


def check_mesh(recipe: Recipe, mesh: Mesh) -> None:
    """Check that a recipe fits a mesh.

    The mesh may have axes whose names are not in `AXES`. The search decides their use.

    Raises:
        RecipeError: an axis has another size than the recipe says, or the recipe leaves no use for an axis of another
            name.
        NotAvailableError: the recipe has a field for which no program exists yet.
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
    named = (DATA, EXPERT) if is_several(recipe.expert) else (DATA,)
    of_data = [axis for axis in (REPLICA, DATA, EXPERT) if axis in named or sizes.get(axis, 1) > 1]
    for name, axis, asked, found in (
        ("data", "' x '".join(of_data), recipe.data, replicas * group),
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
