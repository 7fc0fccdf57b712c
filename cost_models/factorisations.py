"""FLOPs, bytes and steps of dense factorisations and solvers (entries of `counting.TABLE`).

FLOPs are those of LAPACK Working Note 41 (Blackford, Dongarra 1999, appendix C). Further sources are Golub, Van Loan
(Matrix Computations, 4th edition, sections 3.2, 4.2, 5.2, 8.3, 8.6). Matrices are [..., m, n], with leading dims as a
batch. Libraries work on sequential panels of `PANEL` columns, so a factorisation takes n / PANEL steps. Reductions to
tridiagonal or bidiagonal form are half matrix-vector products, which read the trailing matrix once for each column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from cost_models.counting import compute_dtype, is_complex, operator_cost, size_bytes
from cost_models.units import ceil_div
from cost_models.work import Kind, TensorInfo, Work

PANEL = 32  # block size of LAPACK's and cuSOLVER's factorisations (ilaenv: 32 to 64)

Tensors = Sequence[TensorInfo]
Arguments = tuple[object, ...]


def lu_flops(m: int, n: int) -> float:
    """FLOPs of an LU factorisation: n^2 (m - n / 3) for m >= n, which is 2/3 n^3 for a square matrix."""
    high, low = max(m, n), min(m, n)
    return low**2 * (high - low / 3)


def qr_flops(m: int, n: int) -> float:
    """FLOPs of QR with Householder reflectors that computes R only: 2 n^2 (m - n / 3) for m >= n."""
    high, low = max(m, n), min(m, n)
    return 2 * low**2 * (high - low / 3)


def q_flops(m: int, k: int) -> float:
    """FLOPs to build Q, [m, k] with orthonormal columns, from k reflectors: 2 k^2 (m - k / 3)."""
    return 2 * k**2 * (m - k / 3)


def _matrix(tensor: TensorInfo) -> tuple[int, int, int]:
    *batch, rows, columns = tensor.shape
    return prod(batch), rows, columns


def _factor(
    inputs: Tensors, outputs: Tensors, flops: float, columns: int, extra_bytes: float = 0.0, panel: int = PANEL
) -> Work:
    """Return the work of a blocked algorithm with `columns / panel` sequential steps.

    The steps read `extra_bytes` beside the operands.
    """
    flops *= 4 if is_complex(inputs) else 1
    steps = max(1, ceil_div(columns, panel))
    read, written = size_bytes(inputs) + extra_bytes, size_bytes(outputs)
    return Work(flops, read, written, Kind.FACTORISATION, compute_dtype(inputs), steps=steps)


def _register(flops: Callable[[int, int], float], *names: str) -> None:
    """Register the costs of operators that factorise their first operand; `flops(rows, columns)` is for one matrix."""

    def count(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
        batch, rows, columns = _matrix(inputs[0])
        return _factor(inputs, outputs, batch * flops(rows, columns), min(rows, columns))

    operator_cost(*names)(count)


_register(lambda n, _: n**3 / 3, "aten.cholesky.default", "aten.linalg_cholesky_ex.default")
_register(lambda n, _: n**3 / 3, "aten.linalg_ldl_factor_ex.default", "aten.linalg_ldl_factor.default")
_register(lambda n, _: 2 * n**3 / 3, "aten.cholesky_inverse.default")
_register(lu_flops, "aten.linalg_lu_factor_ex.default", "aten.linalg_lu.default", "aten._linalg_det.default")
_register(lu_flops, "aten._linalg_slogdet.default")
_register(lambda n, _: 2 * n**3, "aten.linalg_inv_ex.default")
_register(lambda m, n: qr_flops(m, n) + q_flops(m, min(m, n)), "aten.linalg_qr.default")
_register(q_flops, "aten.linalg_householder_product.default")


@operator_cost("aten.linalg_matrix_exp.default")
def matrix_exp(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a matrix exponential: a Taylor polynomial of degree 18 in 5 products, then squarings.

    The number of squarings is log2 of the matrix's norm (Bader, Blanes, Casas 2019). The norm depends on the values, so
    two squarings are assumed.
    """
    batch, n, _ = _matrix(inputs[0])
    return _factor(inputs, outputs, batch * 7 * 2 * n**3, n, extra_bytes=6 * size_bytes(inputs), panel=max(1, n // 7))


@operator_cost("aten._linalg_solve_ex.default")
def solve(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of an LU factorisation and two triangular solves.

    For r right-hand sides it has 2/3 n^3 + 2 n^2 r FLOPs.
    """
    batch, n, _ = _matrix(inputs[0])
    columns = _right_hand_sides(inputs[1], batch * n)
    return _factor(inputs, outputs, batch * (lu_flops(n, n) + 2 * n * n * columns), n)


def _register_triangular(matrix: int, right: int, factor: float, *names: str) -> None:
    """Register the costs of solves of factor * n^2 FLOPs for each right-hand side.

    `matrix` and `right` are the indices of the matrix and of the right-hand sides among the operands.
    """

    def count(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
        batch, n, _ = _matrix(inputs[matrix])
        columns = _right_hand_sides(inputs[right], batch * n)
        return _factor(inputs, outputs, batch * factor * n * n * columns, n)

    operator_cost(*names)(count)


_register_triangular(0, 1, 1.0, "aten.linalg_solve_triangular.default")
_register_triangular(1, 0, 1.0, "aten.triangular_solve.default")
_register_triangular(1, 0, 2.0, "aten.cholesky_solve.default")
_register_triangular(0, 2, 2.0, "aten.linalg_lu_solve.default", "aten.linalg_ldl_solve.default")


def _right_hand_sides(tensor: TensorInfo, rows: int) -> int:
    """Return the number of right-hand sides of each matrix, if the matrices of a batch have `rows` rows in all."""
    return max(1, prod(tensor.shape) // max(1, rows))


@operator_cost("aten._linalg_eigh.default")
def eigh(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a symmetric matrix's eigenvalues: 4/3 n^3 FLOPs, or 9 n^3 with eigenvectors (compute_v)."""
    vectors = bool(arguments[2]) if len(arguments) > 2 else True
    batch, n, _ = _matrix(inputs[0])
    flops = batch * (9 if vectors else 4 / 3) * n**3
    return _factor(inputs, outputs, flops, n, extra_bytes=_trailing_bytes(inputs[0]), panel=1)


@operator_cost("aten.linalg_eig.default")
def eig(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a matrix's eigenvalues and eigenvectors by shifted QR: 25 n^3 FLOPs (Golub, Van Loan, 7.5)."""
    batch, n, _ = _matrix(inputs[0])
    return _factor(inputs, outputs, batch * 25 * n**3, n, extra_bytes=3 * _trailing_bytes(inputs[0]), panel=1)


@operator_cost("aten._linalg_svd.default")
def svd(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of the singular values of an m x n matrix, m >= n: 4 m n^2 - 4/3 n^3 FLOPs.

    With singular vectors the FLOPs are 6 m n^2 + 20 n^3 (reduced) or 4 m^2 n + 8 m n^2 + 9 n^3 (full matrices).

    arguments: (A, full_matrices, compute_uv).
    """
    batch, rows, columns = _matrix(inputs[0])
    m, n = max(rows, columns), min(rows, columns)
    full = bool(arguments[1]) if len(arguments) > 1 else False
    vectors = bool(arguments[2]) if len(arguments) > 2 else True
    if not vectors:
        flops = 4 * m * n * n - 4 / 3 * n**3
    else:
        flops = 4 * m * m * n + 8 * m * n * n + 9 * n**3 if full else 6 * m * n * n + 20 * n**3
    return _factor(inputs, outputs, batch * flops, n, extra_bytes=2 * _trailing_bytes(inputs[0]), panel=1)


@operator_cost("aten.linalg_pinv.atol_rtol_tensor")
def pinv(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a pseudo-inverse: a reduced singular value decomposition, and a product of 2 m n^2 FLOPs."""
    batch, rows, columns = _matrix(inputs[0])
    m, n = max(rows, columns), min(rows, columns)
    flops = batch * (6 * m * n * n + 20 * n**3 + 2 * m * n * n)
    return _factor(inputs, outputs, flops, n, extra_bytes=2 * _trailing_bytes(inputs[0]), panel=1)


def _trailing_bytes(matrix: TensorInfo) -> float:
    """Bytes that n matrix-vector products read: n / 3 whole matrices, because their matrices shrink."""
    return size_bytes((matrix,)) * min(matrix.shape[-2:]) / 3


@operator_cost("aten.linalg_lstsq.default")
def least_squares(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of least squares by QR with r right-hand sides: 2 n^2 (m - n/3) + r (4 m n - n^2) FLOPs.

    After QR, the reflectors are applied to the right-hand sides, and a triangular solve follows.
    """
    batch, m, n = _matrix(inputs[0])
    columns = _right_hand_sides(inputs[1], batch * m)
    low = min(m, n)
    return _factor(inputs, outputs, batch * (qr_flops(m, n) + columns * (4 * m * n - low**2)), low)
