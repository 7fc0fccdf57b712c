"""Rules of random numbers and `autoshard::dropout`. Every dim may be split.

A random number depends on its global index alone. The rewrite calls the operator with the local shape, and with the
global index of the piece's first element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import autoshard.kernels  # noqa: F401  (defines the operators)
from autoshard.rules.dims import elementwise, named
from autoshard.rules.local import LocalContext, shifted
from autoshard.rules.notation import Dims, Rule
from autoshard.rules.registry import sharding_rule

ours = torch.ops.autoshard

_SEED: Dims = ()


@sharding_rule(ours.random.default)
def random(
    seed: torch.Tensor,
    distribution: str,
    parameters: Sequence[Any],
    site: int,
    shape: Sequence[int],
    *_: Any,
    **__: Any,
) -> Rule:
    return Rule(((_SEED,), (named(len(shape)),)), local=_local_random, padding={})


def _local_random(
    context: LocalContext, seed: Any, distribution: str, parameters: Sequence[Any], site: int, shape: Sequence[int],
    offset: Sequence[Any], global_shape: Sequence[int], **kwargs: Any,
) -> Any:  # fmt: skip
    local = context.output_shape()
    place = shifted(offset, context.output_offset())
    return context.default(seed, distribution, parameters, site, local, place, global_shape, **kwargs)


@sharding_rule(ours.dropout.default)
def dropout(x: torch.Tensor, *_: Any) -> Rule:
    (dims,), results = elementwise([x.shape])
    return Rule(((dims, _SEED), results), linear=[(0,)], local=_local_of_parameters, padding={})


@sharding_rule(ours.poisson.default, ours.gamma.default)
def of_one_parameter(parameter: torch.Tensor, *_: Any) -> Rule:
    (dims,), results = elementwise([parameter.shape])
    return Rule(((dims, _SEED), results), local=_local_of_parameters, padding={})


@sharding_rule(ours.binomial.default)
def binomial(count: torch.Tensor, p: torch.Tensor, *_: Any) -> Rule:
    dims = named(count.dim())
    return Rule(((dims, dims, _SEED), (dims,)), local=_local_of_parameters, padding={})


def _local_of_parameters(context: LocalContext, *args: Any) -> Any:
    """Emit the call with the global index of the piece's first element as its `offset`.

    `args` ends with `offset` and `global_shape`.
    """
    *others, offset, global_shape = args
    return context.default(*others, shifted(offset, context.output_offset()), global_shape)
