"""Work of matrix factorisations and solves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.compute import work_time
from cost_models.device import device
from cost_models.operators import work
from cost_models.work import Kind, TensorInfo

SIZES = st.integers(1, 512)


def matrix(*shape: int, dtype: str = "f32") -> TensorInfo:
    return TensorInfo(shape, {"f32": 4, "f64": 8, "c64": 8}[dtype], dtype)


# FLOPs over n^3 of an [n, n] matrix: LAPACK Working Note 41, appendix C; Golub and Van Loan.
@pytest.mark.parametrize(
    ("name", "arguments", "factor"),
    [
        ("aten.linalg_cholesky_ex.default", (), 1 / 3),
        ("aten.linalg_ldl_factor_ex.default", (), 1 / 3),
        ("aten.linalg_lu_factor_ex.default", (), 2 / 3),
        ("aten._linalg_det.default", (), 2 / 3),
        ("aten.linalg_inv_ex.default", (), 2),
        ("aten.linalg_qr.default", (), 8 / 3),
        ("aten.linalg_householder_product.default", (), 4 / 3),
        ("aten.linalg_matrix_exp.default", (), 14),
        ("aten._linalg_eigh.default", (None, "L", True), 9),
        ("aten._linalg_eigh.default", (None, "L", False), 4 / 3),
        ("aten.linalg_eig.default", (), 25),
        ("aten._linalg_svd.default", (None, False, False), 8 / 3),
        ("aten._linalg_svd.default", (None, False, True), 26),
        ("aten.linalg_pinv.atol_rtol_tensor", (), 28),
    ],
)
def test_flops_of_square_matrices(name, arguments, factor):
    """The FLOPs of a batch of square factorisations are the batch times a factor times n^3."""
    found = work(name, [matrix(3, 64, 64)], [matrix(3, 64, 64)], arguments)
    assert found.flops == pytest.approx(3 * factor * 64**3)
    assert found.kind is Kind.FACTORISATION


def test_rectangular_matrices():
    """A QR of [90, 30] counts 2 n^2 (m - n/3) twice, for Q and for R. An LU counts half of one."""
    assert work("aten.linalg_qr.default", [matrix(90, 30)], [matrix(90, 30), matrix(30, 30)]).flops == pytest.approx(
        4 * 30**2 * (90 - 10)
    )
    assert work("aten.linalg_lu.default", [matrix(30, 90)], [matrix(30, 30)]).flops == pytest.approx(30**2 * (90 - 10))


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten._linalg_solve_ex.default", [(2, 32, 32), (2, 32, 5)], 2 * (2 / 3 * 32**3 + 2 * 32**2 * 5)),
        ("aten._linalg_solve_ex.default", [(2, 32, 32), (2, 32)], 2 * (2 / 3 * 32**3 + 2 * 32**2)),
        ("aten.linalg_solve_triangular.default", [(32, 32), (32, 5)], 32**2 * 5),
        ("aten.triangular_solve.default", [(32, 5), (32, 32)], 32**2 * 5),
        ("aten.cholesky_solve.default", [(32, 5), (32, 32)], 2 * 32**2 * 5),
        ("aten.linalg_lu_solve.default", [(32, 32), (32,), (32, 5)], 2 * 32**2 * 5),
        ("aten.linalg_lstsq.default", [(48, 32), (48, 5)], 2 * 32**2 * (48 - 32 / 3) + 5 * (4 * 48 * 32 - 32**2)),
    ],
)
def test_right_hand_sides_count_each(name, shapes, flops):
    """A solve counts its factorisation once, and two triangular solves for each column of the right-hand side."""
    found = work(name, [matrix(*shape) for shape in shapes], [matrix(*shapes[-1])])
    assert found.flops == pytest.approx(flops)


def test_complex_matrices_take_four_times_the_flops():
    """Complex matrices take four times the FLOPs, in the dtype of their parts."""
    real = work("aten.linalg_inv_ex.default", [matrix(8, 8)], [matrix(8, 8)])
    found = work("aten.linalg_inv_ex.default", [matrix(8, 8, dtype="c64")], [matrix(8, 8, dtype="c64")])
    assert (found.flops, found.dtype) == (4 * real.flops, "f32")


@given(SIZES, st.integers(0, 64), st.sampled_from(["linalg_inv_ex", "_linalg_eigh", "_linalg_svd", "linalg_qr"]))
def test_a_larger_matrix_never_takes_less_time(n, more, name):
    """A factorisation of a larger matrix takes at least as long."""
    small, large = (
        work_time(work(f"aten.{name}.default", [matrix(size, size)], [matrix(size, size)]), device("h100_sxm"))
        for size in (n, n + more)
    )
    assert small <= large


def test_panels_wait_for_each_other():
    """A Cholesky of 512 columns has 16 steps, and an eigenproblem has 512, each of which takes at least a launch."""
    h100 = device("h100_sxm")
    panels = work("aten.linalg_cholesky_ex.default", [matrix(512, 512)], [matrix(512, 512)])
    columns = work("aten._linalg_eigh.default", [matrix(512, 512)], [matrix(512, 512)])
    assert (panels.steps, columns.steps) == (16, 512)
    assert work_time(panels, h100) >= 16 * h100.launch_latency_s
