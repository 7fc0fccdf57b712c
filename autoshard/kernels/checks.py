"""`autoshard::checked`: return a copy of a value, after a check of another value has passed.

`torch._assert_async` and `torch.linalg.cholesky` must raise as on one device. Every call of a program needs a result,
so the check is part of a call that copies one of the program's results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.kernels.library import define

aten = torch.ops.aten


def _checked(x: Tensor, status: Tensor, message: str, is_matrix: bool | None = None) -> Tensor:
    """Return a copy of `x` if the check of `status` passes.

    A failed assertion raises `RuntimeError`, and a failed factorisation raises `LinAlgError`.

    Args:
        x: any value.
        status: an assertion's condition, or the `info` tensor of a factorisation, which must be zero.
        message: the assertion's message, or the name of the factorisation's function.
        is_matrix: None for an assertion. For a factorisation, whether its operand was a single matrix, not a batch.
    """
    if is_matrix is None:
        aten._assert_async.msg(status, message)
    else:
        aten._linalg_check_errors(status, message, is_matrix=is_matrix)
    return x.clone()


def _fake(x: Tensor, status: Tensor, message: str, is_matrix: bool | None = None) -> Tensor:
    return torch.empty_like(x)


checked = define("checked", "(Tensor x, Tensor status, str message, bool? is_matrix=None) -> Tensor", _checked, _fake)
