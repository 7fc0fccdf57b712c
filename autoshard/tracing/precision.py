"""Runs a model in a narrower floating dtype than its parameters'. The casts become part of the trace.

Parameters and inputs of wider dtypes are cast, each once, before the model runs; buffers keep their dtypes. FSDP2's
`MixedPrecisionPolicy(param_dtype=...)` does the same. Three differences from FSDP2 let models run without changes:

* Parameters of norms with running statistics are not cast. Beside narrow inputs, PyTorch's operator accepts them only
  in float32 (FSDP1 leaves such modules out too).
* Operators that need operands of one dtype cast all operands to the narrow dtype. A float32 table of positions added to
  the hidden value makes this value float32; the next product is in the narrow dtype again. (FSDP2 casts the inputs of
  each wrapped module.)
* Cross-entropy of narrow logits is float32, as under torch.autocast. A `loss_fn` gets the model's outputs in float32,
  and a scalar result of the model is float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError
from autoshard.ir.precision import cast, is_wider, widen
from autoshard.tracing.provenance import attributed_to
from autoshard.tracing.replaced import COMPOSITE, replaced_operators

_aten = torch.ops.aten

_OF_ONE_TYPE: tuple[OpOverload, ...] = (
    _aten.linear.default,
    _aten.matmul.default,
    _aten.einsum.default,
    _aten.conv1d.default,
    _aten.conv1d.padding,
    _aten.conv2d.default,
    _aten.conv2d.padding,
    _aten.conv3d.default,
    _aten.conv3d.padding,
    _aten.conv_transpose1d.default,
    _aten.conv_transpose2d.input,
    _aten.conv_transpose3d.input,
    _aten.layer_norm.default,
    _aten.group_norm.default,
    _aten.rms_norm.default,
    _aten.scaled_dot_product_attention.default,
)
"""Operators whose floating operands must have one dtype. Within `Casts.running`, they cast operands that do not."""

_CROSS_ENTROPY: OpOverload = _aten.cross_entropy_loss.default


@dataclass(frozen=True, slots=True)
class Casts:
    """Casts for a model that computes in a narrower dtype than its parameters'.

    Args:
        dtype: the narrower dtype.
        parameters: `id` of each parameter that is cast.
    """

    dtype: torch.dtype
    parameters: frozenset[int]

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> Casts:
        """Return the casts to `dtype` of a model's wider parameters, except those of norms with running statistics.

        Raises:
            TraceError: such a norm has parameters or buffers in float64.
        """
        norms = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, _NormBase) and module.track_running_stats
        }
        _check_norms(norms, dtype)
        left_out = {id(parameter) for module in norms.values() for parameter in module.parameters(recurse=False)}
        wider = {id(parameter) for parameter in model.parameters() if is_wider(parameter, dtype)}
        return cls(dtype, frozenset(wider - left_out))

    def names(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the cast parameters; for a tied parameter its first name."""
        return tuple(name for name, parameter in model.named_parameters() if id(parameter) in self.parameters)

    def cast_inputs(self, inputs: Any) -> Any:
        """Return the pytree `inputs` with floating tensors that are wider than `dtype` cast to `dtype`."""
        return pytree.tree_map_only(Tensor, lambda tensor: cast(tensor, self.dtype), inputs)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which operators of `_OF_ONE_TYPE` cast operands of mixed dtypes to `dtype`.

        Cross-entropy computes in float32.
        """
        replacements = {op: partial(self._in_one_type, _run_of(op)) for op in _OF_ONE_TYPE}
        if COMPOSITE not in _CROSS_ENTROPY.py_kernels:  # a trace keeps it whole, in float32 too
            replacements[_CROSS_ENTROPY] = partial(_in_float32, _run_of(_CROSS_ENTROPY))
        return replaced_operators(replacements)

    def _in_one_type(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_floating(leaf)]
        if len({operand.dtype for operand in operands}) > 1:
            args, kwargs = self.cast_inputs((args, kwargs))
        return run(*args, **kwargs)


def _check_norms(norms: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
    """Raise `TraceError` if a norm with running statistics has parameters or buffers in float64.

    Such a norm keeps its dtype, and gets inputs in the narrower `dtype`. PyTorch then accepts only float32 parameters
    and buffers.
    """
    double = [name for name, norm in norms.items() if any(x.dtype is torch.float64 for x in _state_of(norm))]
    if double:
        raise TraceError(
            f"precision={str(dtype).removeprefix('torch.')}: norm {double[0]!r} ({type(norms[double[0]]).__name__}) "
            "has float64 parameters or running statistics; PyTorch takes float32 ones alone beside narrow inputs. Make "
            "the model float32 (model.float()), or leave precision out."
        )


def _state_of(norm: nn.Module) -> list[Tensor]:
    return [*norm.parameters(recurse=False), *norm.buffers(recurse=False)]


def _in_float32(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, widen, (args, kwargs))
    return run(*args, **kwargs)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _run_of(op: OpOverload) -> Callable[..., Any]:
    """Return the function that runs the composite operator `op` now."""
    return op.py_kernels.get(COMPOSITE) or partial(op._op_dk, COMPOSITE)


def cast_parameters(names: tuple[str, ...], state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the named parameters of `state`, cast to `dtype`, by name.

    The casts' nodes belong to the parameters' modules.
    """
    casts = {}
    for name in names:
        with attributed_to(name.rpartition(".")[0]):
            casts[name] = state[name].to(dtype)
    return casts


def check_unchanged(casts: Mapping[str, Tensor]) -> None:
    """Raise `TraceError` if the model changed a cast parameter in place: after the call, the change would be lost."""
    for name, tensor in casts.items():
        if tensor._version:
            raise TraceError(
                f"The model changes parameter {name!r} in place in forward, which under a precision is a cast of it. "
                "Work on a copy (`w = w.clone()`), make it a buffer, or leave precision out."
            )


def widen_scalar(output: Tensor) -> Tensor:
    """Return `output` in float32 if it is a scalar (a loss) of a narrower dtype; else `output` as it is."""
    return widen(output) if output.dim() == 0 else output


def run_in_precision(model: nn.Module, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Call a model on one device with the casts to `dtype` that a traced program has."""
    casts = Casts.of(model, dtype)
    narrow = cast_parameters(casts.names(model), dict(model.named_parameters()), dtype)
    with casts.running():
        result = functional_call(model, narrow, *casts.cast_inputs((args, kwargs)))
    return pytree.tree_map_only(Tensor, widen_scalar, result)


def place_casts(graph: fx.Graph) -> None:
    """Move casts within the graph to save memory.

    The cast of an input moves to right before its first use. A cast that is only returned moves to right behind its
    operand. Before the move, casts of parameters are the first nodes, and casts of gradients are the last nodes.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in order:
        if node.target is not _aten._to_copy.default:
            continue
        (operand,) = node.all_input_nodes
        if operand.op == "placeholder":
            min(node.users, key=order.__getitem__).prepend(node)
        elif all(user.op == "output" for user in node.users):
            operand.append(node)
