"""`autoshard::checked`: a value, once a check of another has passed.

What a model asserts of values (`torch._assert_async`), and what torch's linear algebra finds while it factorises
(`torch.linalg.cholesky` of a matrix that is not positive definite), are errors on one device. A program has no calls
without a result, so the check goes with a value that the program hands out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.kernels.library import define

aten = torch.ops.aten


def _checked(x: Tensor, status: Tensor, message: str, is_matrix: bool | None = None) -> Tensor:
    """A copy of `x`.

    Args:
        x: any value.
        status: what must be true, or the `info` of a factorisation, of any shape, which must be zero.
        message: of an assertion; of a factorisation the function's name.
        is_matrix: of a factorisation, whether it was of a single matrix; None of an assertion.

    Raises:
        RuntimeError: what must be true is not.
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
