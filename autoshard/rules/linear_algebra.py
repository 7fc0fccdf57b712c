"""Rules of linear algebra and of Fourier transforms. Only batch dims may be split, not the dims of matrices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from autoshard.rules.dims import (
    BLOCKED,
    all_blocked,
    broadcast_dims,
    broadcast_shape,
    named,
    names,
    normal_dim,
    with_blocked,
    without,
)
from autoshard.rules.notation import OperandCondition, Rule
from autoshard.rules.registry import sharding_rule, tensor_operands

aten = torch.ops.aten


def _batched(
    operands: Sequence[int],
    results: Sequence[int],
    linear: Sequence[Sequence[int]] = (),
    empty: Collection[int] = (),
) -> Callable[..., Rule]:
    """Return the rule function of an operator on batches of matrices or vectors. Only batch dims may be split.

    A batch is split only into equal parts. Padding would add matrices of zeros, for which `cholesky` raises an error.

    Args:
        operands: for each operand, the number of its last dims that are not batch dims: 2 for matrices.
        results: the same numbers for the results.
        linear: `Rule.linear`, the sets of operands in which the results are linear.
        empty: indices of results that the call does not ask for. They are vectors without elements.
    """

    def rule(*args: Any, **kwargs: Any) -> Rule:
        tensors = tensor_operands(args, kwargs)
        shapes = [x.shape[: x.dim() - own] for x, own in zip(tensors, operands, strict=True)]
        batch = named(len(broadcast_shape(shapes)))
        dims = [(*broadcast_dims(shape, batch), *all_blocked(own)) for shape, own in zip(shapes, operands, strict=True)]
        beside = dict.fromkeys(range(len(tensors)), OperandCondition.NEVER)
        made = [(*batch, *all_blocked(own)) for own in results]
        sides = (dims, [all_blocked(1) if index in empty else result for index, result in enumerate(made)])
        whole = dict.fromkeys(names(batch), empty) if empty else None
        return Rule(sides, linear=linear, beside=beside, whole=whole, even=("*",))

    return rule


for _operands, _results, _linear, _operators in (
    ((2,), (2,), (), [aten.cholesky.default, aten.cholesky_inverse.default, aten.linalg_matrix_exp.default]),
    ((2,), (2, 0), (), [aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default]),
    ((2,), (0, 2, 1), (), [aten._linalg_det.default]),
    ((2,), (0, 0, 2, 1), (), [aten._linalg_slogdet.default]),
    ((2,), (2, 1, 0), (), [aten.linalg_lu_factor_ex.default]),
    ((2,), (1, 2), (), [aten.linalg_eig.default]),
    ((2,), (2, 1), (), [aten.geqrf.default]),
    ((2,), (2, 1, 0), (), [aten.linalg_ldl_factor_ex.default]),
    ((2, 1, 2), (2,), ((2,),), [aten.linalg_ldl_solve.default, aten.ormqr.default]),
    ((2, 1), (2,), (), [aten.linalg_householder_product.default]),
    ((2, 2), (2,), ((0,),), [aten.cholesky_solve.default]),
    ((2, 2), (2, 2), (), [aten.triangular_solve.default]),
):
    sharding_rule(*_operators)(_batched(_operands, _results, _linear))


@sharding_rule(aten._linalg_svd.default)
def svd(a: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, **kwargs: Any) -> Rule:
    return _batched((2,), (2, 1, 2), empty=() if compute_uv else (0, 2))(a)


@sharding_rule(aten._linalg_eigh.default)
def eigh(a: torch.Tensor, triangle: str = "L", compute_v: bool = True) -> Rule:
    return _batched((2,), (1, 2), empty=() if compute_v else (1,))(a)


@sharding_rule(aten.linalg_qr.default)
def qr(a: torch.Tensor, mode: str = "reduced") -> Rule:
    return _batched((2,), (2, 2), empty=(0,) if mode == "r" else ())(a)


@sharding_rule(aten.linalg_lu.default)
def lu(a: torch.Tensor, *, pivot: bool = True) -> Rule:
    return _batched((2,), (2, 2, 2), empty=() if pivot else (0,))(a)


@sharding_rule(aten.lu_unpack.default)
def lu_unpack(
    lu: torch.Tensor, pivots: torch.Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> Rule | None:
    """Return the rule of `lu_unpack`, or None if not all results are requested.

    A result that is not requested has no batch dims.
    """
    if not (unpack_data and unpack_pivots):
        return None
    return _batched((2, 1), (2, 2, 2))(lu, pivots)


@sharding_rule(aten._linalg_solve_ex.default)
def solve(a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Rule | None:
    if b.dim() != a.dim() or b.shape[:-2] != a.shape[:-2]:
        return None
    return _batched((2, 2), (2, 2, 1, 0))(a, b)


@sharding_rule(aten.linalg_lu_solve.default)
def lu_solve(
    lu: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor, *, left: bool = True, adjoint: bool = False
) -> Rule:
    """Return a rule that may split right-hand sides, the columns of `b` (rows for `left=False`).

    Batches are only split evenly, because padding has no valid pivots.
    """
    batch = named(max(lu.dim(), b.dim()) - 2)
    result = (*batch, BLOCKED, ("r",)) if left else (*batch, ("r",), BLOCKED)
    of_lu, of_pivots = broadcast_dims(lu.shape[:-2], batch), broadcast_dims(pivots.shape[:-1], batch)
    operands = ((*of_lu, BLOCKED, BLOCKED), (*of_pivots, BLOCKED), broadcast_dims(b.shape, result))
    return Rule((operands, (result,)), linear=[(2,)], beside={0: OperandCondition.NEVER}, even=[f for (f,) in batch])


@sharding_rule(aten._trilinear.default)
def trilinear(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Rule:  # fmt: skip
    """Return the rule of `_trilinear`, a sum over the dims `sumdim` of the product of three tensors.

    `expand1` to `expand3` are the dims in which the three tensors get size one before the product.
    """
    dims = named(a.dim() + len(expand1))
    operands = [
        broadcast_dims(x.shape, without(dims, expand))
        for x, expand in zip((a, b, c), (expand1, expand2, expand3), strict=True)
    ]
    reduce = {factor: "sum" for dim in sumdim for factor in dims[dim]}
    return Rule((operands, (without(dims, sumdim),)), reduce=reduce, linear=[(0,), (1,), (2,)])


@sharding_rule(aten._cdist_forward.default, aten._euclidean_dist.default)
def cdist(a: torch.Tensor, b: torch.Tensor, p: float = 2.0, mode: int | None = None) -> Rule:
    """Return a rule that may split the points of both operands, but not the coordinates of a point."""
    batch = named(max(a.dim(), b.dim()) - 2, "b")
    left, right = broadcast_dims(a.shape[:-2], batch), broadcast_dims(b.shape[:-2], batch)
    return Rule((((*left, ("m",), BLOCKED), (*right, ("n",), BLOCKED)), ((*batch, ("m",), ("n",)),)))


@sharding_rule(aten._cdist_backward.default)
def cdist_backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, p: float, distances: torch.Tensor
) -> Rule | None:
    """Return a rule in which the gradient of the points `a` is a sum over the points `b`.

    Return None if the batch dims of `a` and `b` differ.
    """
    if a.shape[:-2] != b.shape[:-2]:
        return None
    batch = named(a.dim() - 2, "b")
    left, right, pairs = (*batch, ("m",), BLOCKED), (*batch, ("n",), BLOCKED), (*batch, ("m",), ("n",))
    sides = ((pairs, left, right, pairs), (left,))
    return Rule(sides, reduce={"n": "sum"}, linear=[(0,)], beside={3: OperandCondition.NEVER})


@sharding_rule(aten.linalg_cross.default)
def cross(a: torch.Tensor, b: torch.Tensor, *, dim: int = -1) -> Rule:
    dims = with_blocked(named(max(a.dim(), b.dim())), [normal_dim(dim, a.dim())])
    operands = (broadcast_dims(a.shape, dims), broadcast_dims(b.shape, dims))
    return Rule((operands, (dims,)), linear=[(0,), (1,)])


@sharding_rule(aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default)
def fourier(x: torch.Tensor, dim: Sequence[int], *_: Any) -> Rule:
    """Return a rule that may split dims that are not transformed.

    Padding is filled with zero. Libraries transform several rows at once, so NaN would spread to neighbouring rows.
    """
    dims = with_blocked(named(x.dim()), [normal_dim(entry, x.dim()) for entry in dim])
    rows = [factor for (factor,) in dims if (factor,) != BLOCKED]
    return Rule(((dims,), (dims,)), linear=[(0,)], padding=dict.fromkeys(rows, 0))


@sharding_rule(aten.searchsorted.Tensor)
def searchsorted(sequence: torch.Tensor, x: torch.Tensor, *, sorter: torch.Tensor | None = None, **kwargs: Any) -> Rule:
    """Return a rule that may split any dim of `x`.

    If each row of `x` has its own sequence, the sequences are split together with the rows.
    """
    dims = named(x.dim())
    of_sequence = (BLOCKED,) if sequence.dim() == 1 else (*dims[:-1], BLOCKED)
    operands = (of_sequence, dims) if sorter is None else (of_sequence, dims, of_sequence)
    return Rule((operands, (dims,)))


@sharding_rule(aten.isin.Tensor_Tensor)
def isin(x: torch.Tensor, members: torch.Tensor, **kwargs: Any) -> Rule:
    dims = named(x.dim())
    return Rule(((dims, all_blocked(members.dim())), (dims,)))


@sharding_rule(aten._weight_norm_interface.default)
def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> Rule:
    """Return a rule that may split only `dim`, because each index of `dim` has its own norm."""
    dims = with_blocked(named(v.dim()), [position for position in range(v.dim()) if position != dim])
    norm_dims = broadcast_dims(g.shape, dims)
    return Rule(((dims, norm_dims), (dims, norm_dims)))


@sharding_rule(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int) -> Rule:
    dims = with_blocked(named(v.dim()), [position for position in range(v.dim()) if position != dim])
    norm_dims = broadcast_dims(g.shape, dims)
    sides = ((dims, dims, norm_dims, norm_dims), (dims, norm_dims))
    return Rule(sides, linear=[(0,)], beside={3: OperandCondition.NEVER})
