"""Higher-order operators of torch (`cond`, `while_loop`, `scan`, `map`, `flex_attention`) as plain calls.

Their functions run in Python during the trace, and the operators in them are traced as usual. A predicate is read like
the condition of an `if`. Its value is guarded, so a call with another value gets another program. Loops are unrolled.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._higher_order_ops.associative_scan import associative_scan_op, generic_associative_scan
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_dense, map_impl
from torch._higher_order_ops.scan import generic_scan, scan_op
from torch._higher_order_ops.while_loop import while_loop_dense, while_loop_op
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError
from autoshard.tracing.reach import inputs_behind
from autoshard.tracing.replaced import replaced

_INFINITY = float("inf")


def _cond(
    inputs: Sequence[Tensor],
    predicate: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any],
) -> Any:
    """Run the branch that the predicate chooses. If `vmap` gives each row a predicate, run both, and select row by row.

    The result requires grad if the result of either branch would, as on one device.
    """
    if isinstance(predicate, Tensor) and _has_rows(predicate):
        choose = partial(torch.where, predicate)
        return pytree.tree_map(choose, true_fn(*operands), false_fn(*operands))
    taken, other = (true_fn, false_fn) if predicate else (false_fn, true_fn)
    result = taken(*operands)
    if not torch.is_grad_enabled():
        return result
    idle = [x for x in pytree.tree_leaves(other(*operands)) if isinstance(x, Tensor)]
    nothing = _nothing_of(inputs_behind(idle, inputs))
    return result if nothing is None else pytree.tree_map_only(Tensor, partial(_reach, nothing), result)


def _nothing_of(inputs: Sequence[Tensor]) -> Tensor | None:
    """Return a zero that is computed from `inputs`, so that they get gradients of zero; None without inputs.

    `inputs` are the inputs of the branch of a `cond` that is not taken.
    """
    found = None
    for x in inputs:
        never = torch.zeros((), dtype=torch.bool, device=x.device)
        zero = torch.where(never, x.sum(), 0.0)
        found = zero if found is None else found + zero
    return found


def _reach(nothing: Tensor, x: Tensor) -> Tensor:
    return x + nothing.to(x.dtype) if x.is_floating_point() else x


def _has_rows(x: Tensor) -> bool:
    """Whether `vmap` runs over a dim of this tensor."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def _while_loop(*args: Any, **options: Any) -> Any:
    result = while_loop_dense(*args, **options)
    if any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(result)):
        raise TraceError(
            "The model calls while_loop on values that require grad, and torch's derivative of while_loop is not that "
            "of its steps. Write the loop in Python (while bool(...): ...), or call it under torch.no_grad()."
        )
    return result


def _scan(function: Callable[..., Any], init: Sequence[Any], xs: Sequence[Any], additional_inputs: Any = ()) -> Any:
    return generic_scan(function, init, xs, additional_inputs=additional_inputs)


def _associative_scan(function: Callable[..., Any], xs: Sequence[Tensor], additional_inputs: Any = ()) -> Any:
    return generic_associative_scan(function, xs, additional_inputs=additional_inputs)


def _flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Mapping[str, Any],
    *buffers: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute torch's `flex_attention` by plain operators.

    Blocks of `block_mask` only say which scores a kernel may skip. The mask function of `block_mask` alone decides
    which scores are masked.

    Returns:
        The result [B, H, S, D], with strides in the order of those of `q`. Further, log-sum-exp and largest score of
        each row [B, H, S], both divided by ln 2.
    """
    score_buffers, mask_buffers = (*buffers, (), ())[:2]
    groups = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(groups, 1).expand(q.size(0), -1, -1, -1) for x in (k, v))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-2, -1)) * scale
    places = [torch.arange(size, device=q.device) for size in scores.shape]
    mask_mod = block_mask[-1]
    mask = None
    with _IndexingByNumbers():
        if score_mod is not flex._identity:
            scores = _for_each(score_mod, (0,), len(score_buffers))(scores, *places, *score_buffers)
        if mask_mod is not flex.noop_mask:
            mask = _for_each(mask_mod, (), len(mask_buffers))(*places, *mask_buffers)
            scores = torch.where(mask, scores, -_INFINITY)
    largest = scores.amax(-1)
    is_dead = largest == -_INFINITY
    log_sum = torch.where(is_dead, -_INFINITY, torch.where(is_dead[..., None], 0.0, scores).logsumexp(-1))
    if score_mod is flex._identity:
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    else:
        weights = torch.softmax(torch.where(is_dead[..., None], 0.0, scores), -1)
        out = torch.matmul(torch.where(is_dead[..., None], 0.0, weights).to(q.dtype), v.to(q.dtype))
    return _in_order_of(out, q), log_sum / math.log(2.0), largest / math.log(2.0)


def _for_each(function: Callable[..., Tensor], first: tuple[int, ...], shared: int) -> Callable[..., Tensor]:
    """Return `function` mapped by `vmap` over batch entries, heads, queries and keys.

    `first` gives the mapped dim of each argument before these four indices. The last `shared` arguments are not mapped.
    """
    for place in reversed(range(4)):
        dims: list[int | None] = [None] * 4
        dims[place] = 0
        function = torch.vmap(function, in_dims=(*first, *dims, *[None] * shared))
    return function


class _IndexingByNumbers(TorchFunctionMode):
    """Makes `table[i, j]` with scalar tensors of integers a lookup of rows.

    torch's indexing would read the values of the scalars.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            entries = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(entry, Tensor) for entry in entries) and all(map(_is_number, entries)):
                return _look_up(args[0], entries)
        return func(*args, **(kwargs or {}))


def _is_number(entry: Any) -> bool:
    if isinstance(entry, Tensor):
        return entry.dim() == 0 and entry.dtype in (torch.int64, torch.int32)
    return isinstance(entry, int) and not isinstance(entry, bool)


def _look_up(table: Tensor, entries: Sequence[Any]) -> Tensor:
    """Return `table[entries]` for integers or scalar tensors of integers. Negative entries count from the end."""
    row: Any = 0
    for entry, size in zip(entries, table.shape, strict=False):
        number = torch.where(entry < 0, entry + size, entry) if isinstance(entry, Tensor) else entry % size
        row = row * size + number
    return table.flatten(0, len(entries) - 1).index_select(0, row.reshape(1)).squeeze(0)


def _in_order_of(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` with its values and shape, but with strides in the order of the strides of `like`."""
    order = sorted(range(x.dim()), key=lambda dim: -like.stride(dim))
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


_PLAIN_CALLS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        while_loop_op: _while_loop,
        scan_op: _scan,
        associative_scan_op: _associative_scan,
        map_impl: map_dense,
        flex.flex_attention_hop: _flex_attention,
    }
)


class _PlainCalls(TorchFunctionMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._functions = {cond_op: partial(_cond, inputs), **_PLAIN_CALLS}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        function = self._functions.get(func)
        if function is None:
            return func(*args, **(kwargs or {}))
        with self:
            return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def calling_plainly(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Within the context, higher-order operators run their functions as plain calls.

    Enter it after all other modes of torch functions. `inputs` are the flat tensors of the traced call.
    `flex_attention` then has a backward on the CPU too, and does not warn that it is not compiled.
    """
    of_flex = {"_validate_device": lambda *_: None, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}
    with replaced({(flex, name): value for name, value in of_flex.items()}), _PlainCalls(inputs):
        yield
