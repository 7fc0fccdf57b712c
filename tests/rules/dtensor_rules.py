"""Placements that DTensor's own sharding rules admit, asked on a mesh that communicates with nobody.

Its private interfaces are read here and nowhere else: `ShardingPropagator` answers for one call and the placements of
its operands whether they must be redistributed, and how the results then lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

_REFUSALS = (NotImplementedError, RuntimeError, ValueError, AssertionError, TypeError, LookupError, AttributeError)
"""Errors that rules raise on calls that they do not know or did not expect; each counts as not admitted."""


@contextmanager
def fake_mesh(size: int) -> Iterator[DeviceMesh]:
    """A mesh of one axis in a process group of which this process is all there is."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def admitted_outputs(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Placement], mesh: DeviceMesh
) -> tuple[Placement, ...] | None:
    """Placements of a call's results if its operands have those of `inputs`; None if DTensor would move an operand.

    Args:
        op: a `torch.ops` overload.
        args, kwargs: its arguments, with real tensors of global shape.
        inputs: a placement for each tensor among them, in order.
        mesh: a mesh of one axis.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    schema = _schema(propagator, op, args, kwargs, inputs, mesh)
    try:
        sharding = propagator.propagate_op_sharding_non_cached(schema)
    except _REFUSALS:
        return None
    moved = sharding.redistribute_schema if sharding.needs_redistribute else None
    if moved is not None and not _is_same(moved, schema):
        return None
    return tuple(spec.placements[0] for spec in _specs(sharding.output_spec))


def _schema(
    propagator: Any,
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Placement],
    mesh: DeviceMesh,
) -> OpSchema:
    places = iter(inputs)

    def spec(x: Tensor) -> DTensorSpec:
        return DTensorSpec(mesh, (next(places),), TensorMeta(x.shape, x.stride(), x.dtype))

    spec_args, spec_kwargs = pytree.tree_map_only(Tensor, spec, (tuple(args), dict(kwargs)))
    tables = (propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy)
    info = next((table[op] for table in tables if op in table), None)
    return OpSchema(op, spec_args, spec_kwargs, schema_info=info)


def _is_same(moved: OpSchema, schema: OpSchema) -> bool:
    """Whether only numbers among the arguments were rewritten (local shapes), not placements."""
    return [spec.placements for spec in moved.args_spec] == [spec.placements for spec in schema.args_spec]


def _specs(output: Any) -> list[DTensorSpec]:
    leaves = [output] if isinstance(output, DTensorSpec) else list(output or ())
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def has_rule(op: torch._ops.OpOverload) -> bool:
    """Whether DTensor has a rule of its own for an operator (it may decompose others)."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs, propagator.op_to_rules)
    return any(op in table for table in tables)
