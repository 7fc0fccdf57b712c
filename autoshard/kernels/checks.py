"""`autoshard::checked`: a value, returned after a check of another value has passed.

A model may assert values (`torch._assert_async`), and torch's linear algebra may fail (`torch.linalg.cholesky` of a
matrix that is not positive definite). Both raise an error on one device. A program has no calls without a result, so a
check is attached to a value that the program returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.kernels.library import define

aten = torch.ops.aten


def _checked(x: Tensor, status: Tensor, message: str, is_matrix: bool | None = None) -> Tensor:
    """A copy of `x`, after the check.

    Args:
        x: any value.
        status: an assertion's condition; or the `info` of a factorisation, of any shape, which must be zero.
        message: the assertion's message, or the factorisation's function name.
        is_matrix: whether a factorisation was of a single matrix; None for an assertion.

    Raises:
        RuntimeError: the assertion failed.
        torch.linalg.LinAlgError: a factorisation failed.
    """
    if is_matrix is None:
        aten._assert_async.msg(status, message)
    else:
        aten._linalg_check_errors(status, message, is_matrix=is_matrix)
    return x.clone()


def _fake(x: Tensor, status: Tensor, message: str, is_matrix: bool | None = None) -> Tensor:
    return torch.empty_like(x)


checked = define("checked", "(Tensor x, Tensor status, str message, bool? is_matrix=None) -> Tensor", _checked, _fake)
