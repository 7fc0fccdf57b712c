"""`price`: predict time and memory of a step under a recipe as another framework runs it, by the plans' cost models."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard import tracing
from autoshard.arguments import (
    ExampleInputs,
    check_has_loss,
    check_loss,
    check_model,
    check_recipe,
    check_tensors,
    check_trains,
    checked_cluster,
    split_inputs,
)
from autoshard.errors import NotAvailableError, TraceError
from autoshard.ir.execution import Execution
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.recipe import Recipe
from autoshard.ir.runtime import USUAL, Runtime, runtime_named
from cost_models.hardware import Cluster
from passes.questions.formulas import PlanFormulas
from passes.questions.price_counts import CountsOfPrice
from passes.search.layers.fold_program import fold_program
from passes.search.layers.price_model import PricedModel
from passes.search.recipe_plan import recipe_plan

_TRACED: weakref.WeakKeyDictionary[nn.Module, dict[object, PricedModel]] = weakref.WeakKeyDictionary()
"""A cache: model → its traced and folded forms, by shapes of inputs, loss function and precision."""


def price(
    model: nn.Module,
    cluster: Cluster,
    recipe: Recipe,
    *,
    example_inputs: ExampleInputs,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    runtime: str | Runtime | None = None,
    optimizer: str = "adamw",
    precision: str = "bf16",
    global_batch: int | None = None,
) -> Plan:
    """Return the price of a training step under a recipe as another framework runs it, see `autoshard.price`."""
    check_model(model)
    check_loss(loss_fn)
    split_inputs(example_inputs)
    checked_cluster(cluster)
    check_recipe(recipe)
    profile = runtime_named(runtime)
    if runtime is not None and profile is None:
        raise NotAvailableError(
            "runtime='autoshard' runs what autoshard.plan(model, mesh, recipe=recipe) plans: call that. price(...) is "
            "of other runtimes, runtime='megatron', say."
        )
    trained = Execution(
        runtime=profile or USUAL, optimizer=optimizer, precision=precision, micro_batch=1, global_batch=global_batch
    )
    if recipe.data is None:
        recipe = replace(recipe, data=max(1, cluster.size // recipe.devices))
    return price_execution(model, cluster, trained.of(recipe), example_inputs, loss_fn)


def price_execution(
    model: nn.Module,
    cluster: Cluster,
    execution: Execution,
    example_inputs: ExampleInputs,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Plan:
    """Return the price of a training step as a plan. `execution` has the recipe and the framework's runtime.

    Raises:
        NotAvailableError: the recipe cannot be priced.
    """
    if execution.offload in ("optimizer", "parameters"):
        raise NotAvailableError(
            f"offload={execution.offload!r} cannot be priced yet: an update that runs on the host has no cost model. "
            "Price the recipe with offload='none' or 'activations'."
        )
    args, kwargs = split_inputs(example_inputs)

    def fold(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PricedModel:
        inputs = kwargs if isinstance(example_inputs, Mapping) else args
        return priced_model(model, inputs, loss_fn, execution.precision)

    found = recipe_plan(fold(args, kwargs), execution, cluster)
    return replace(found, formulas=PlanFormulas(CountsOfPrice(fold, args, kwargs, execution, cluster)))


def priced_model(
    model: nn.Module,
    example_inputs: ExampleInputs,
    loss_fn: Callable[..., torch.Tensor] | None,
    precision: str | None = None,
    *,
    whole_experts: bool = False,
) -> PricedModel:
    """Return a model traced and folded for prices. An unchanged model is traced once for inputs of equal shapes.

    Args:
        model, example_inputs, loss_fn: the call to trace.
        precision: the type of the model's products, see `narrow_dtype`; None: the model's own type.
        whole_experts: whether each layer of experts is one operator, as in compiled programs. Other frameworks run its
            products one by one.
    """
    check_tensors(*split_inputs(example_inputs))
    dtype = narrow_dtype(model, precision)
    # a bound method is hashed by its owner's id
    loss = loss_fn if loss_fn is None or isinstance(loss_fn, Hashable) else loss_fn.__call__
    key = (_describe(example_inputs), loss, dtype, whole_experts, _describe_modules(model))
    known = _TRACED.setdefault(model, {})
    if key not in known:
        narrow = (model, example_inputs) if dtype is None else _narrowed(model, example_inputs, dtype)
        known[key] = _fold(*narrow, loss_fn, whole_experts=whole_experts)
    return known[key]


_NARROW = {"bf16": torch.bfloat16, "f16": torch.float16, "f8": torch.bfloat16}


def narrow_dtype(model: nn.Module, precision: str | None) -> torch.dtype | None:
    """Return the 16-bit dtype in which a model with float32 parameters runs its matrix products under `precision`.

    Some parameters may already have this dtype, such as frozen weights beside adapters in float32. None means that
    matrix products run in the model's own dtype.
    """
    dtypes = {item.dtype for item in model.parameters() if item.is_floating_point()}
    narrow = _NARROW.get(precision or "")
    return narrow if torch.float32 in dtypes and dtypes <= {torch.float32, narrow} else None


def has_frozen_masters(model: nn.Module) -> bool:
    """Whether a parameter in float32 has no gradient."""
    return any(item.dtype is torch.float32 and not item.requires_grad for item in model.parameters())


def _narrowed(model: nn.Module, example_inputs: ExampleInputs, dtype: torch.dtype) -> tuple[nn.Module, ExampleInputs]:
    """Return a copy of a model on the meta device, and its inputs, both in the 16-bit type `dtype`."""
    on_meta: dict[int, Any] = {
        id(item): nn.Parameter(item.detach().to("meta"), requires_grad=item.requires_grad)
        for item in model.parameters()
    }
    on_meta |= {id(item): item.to("meta") for item in model.buffers()}

    def narrow(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf

    return copy.deepcopy(model, on_meta).to(dtype), pytree.tree_map(narrow, example_inputs)


def _fold(
    model: nn.Module,
    example_inputs: ExampleInputs,
    loss_fn: Callable[..., torch.Tensor] | None,
    *,
    whole_experts: bool,
) -> PricedModel:
    check_trains(model, optimizer="of the recipe")
    short = tracing.shorten(model)

    def traced(batch: int) -> Program:
        resized = pytree.tree_map(lambda leaf: _resized(leaf, batch), example_inputs)
        args, kwargs = split_inputs(resized)
        with torch.enable_grad():
            return tracing.trace(short.model, args, kwargs, loss_fn=loss_fn, whole_experts=whole_experts)

    folded = fold_program(traced(2), traced(3), short.lists)
    check_has_loss(folded.single)
    return PricedModel(folded)


def _resized(leaf: Any, batch: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.ndim == 0:
        raise TraceError("price(...): an input has no dims; the first dim of every input must be the batch.")
    return torch.zeros((batch, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")


def _describe(example_inputs: ExampleInputs) -> object:
    leaves, tree = pytree.tree_flatten(example_inputs)
    shapes = tuple((tuple(x.shape[1:]), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
    return shapes, str(tree)


def _describe_modules(model: nn.Module) -> object:
    """Return a key that changes with a model's modules, their settings and tensors, or the sharing of tensors."""
    modules = model.named_modules(remove_duplicate=False)
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    firsts: dict[int, str] = {}
    return (
        tuple((name, type(item), item.extra_repr(), _settings(item)) for name, item in modules),
        tuple(
            (name, firsts.setdefault(id(item), name), item.shape, item.dtype, item.requires_grad)
            for name, item in tensors
        ),
    )


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def _settings(module: nn.Module) -> object:
    """Return the plain attributes of a module, such as `training`, and those of its config, as a key."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return tuple((name, _plain(value) or _plain(getattr(value, "__dict__", {}))) for name, value in own.items())


def _plain(value: object) -> str:
    """Return the text of a number, a text or a collection of both, and of such items of a dict; else ""."""
    if isinstance(value, dict):
        return repr([(name, _plain(each)) for name, each in value.items()])
    return repr(value) if all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value)) else ""
