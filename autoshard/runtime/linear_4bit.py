"""`Linear4bit`, a layer of bitsandbytes with 4-bit weights whose tensors all are frozen parameters of the layer.

Importing this module imports bitsandbytes. That library keeps the scales of weights in an attribute of the weight,
where neither programs nor checkpoints find them.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb  # type: ignore[import-not-found]
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.kernels import dequantize_nf4


class Linear4bit(bnb.nn.Linear4bit):
    """A linear layer with a frozen weight in NF4. It computes the same as its base class.

    The parameter `weight` has the packed weights [out_features * in_features / 2, 1]. `absmax` and `nested` have the
    bytes of the scales, as in `autoshard.kernels.dequantize`. `nested` is None without double quantisation.
    """

    def hold_scales(self, state: Any) -> None:
        """Make the scales in `state`, bitsandbytes' `QuantState` of the weight, parameters `absmax` and `nested`."""
        nested = None
        if state.nested:
            floats = (state.state2.code, state.offset.reshape(1), state.state2.absmax)
            nested = _bytes_of(torch.cat([item.float() for item in floats]))
        self.absmax = _bytes_of(state.absmax if state.nested else state.absmax.float())
        self.nested = nested
        self.blocksize = state.blocksize
        self.weight_shape = tuple(state.shape)
        self.weight_dtype = state.dtype

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. If it is a weight with a `QuantState`, as from peft's merge, take over its scales too."""
        super().__setattr__(name, value)
        state = getattr(value, "quant_state", None) if name == "weight" else None
        if state is not None:
            self.hold_scales(state)

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """The packed weight. For DoRA, peft calls `dequantize` of layers with this attribute of the library HQQ."""
        return self.weight

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight [out_features, in_features] in `dtype`, by default the dtype before quantisation."""
        return _dequantize(self.weight, self.absmax, self.nested, self._form, dtype or self.weight_dtype)

    @property
    def _form(self) -> _Form:
        return self.weight_shape, self.blocksize, self.weight_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias` in the dtype of `x`, computed in `compute_dtype` if the layer has one."""
        dtype = self.compute_dtype if self.compute_type_is_set and self.compute_dtype is not None else x.dtype
        result = _FrozenProduct.apply(x.to(dtype), self.weight, self.absmax, self.nested, self._form)
        return (result if self.bias is None else result + self.bias.to(dtype)).to(x.dtype)

    def in_full(self) -> nn.Linear:
        """Return a linear layer with the dequantised weight and the same bias; on meta if this layer is on meta."""
        with torch.device("meta"):
            layer = nn.Linear(self.in_features, self.out_features, bias=False)
        layer.weight = nn.Parameter(self.dequantize(), requires_grad=False)
        layer.bias = self.bias
        return layer.train(self.training)

    def _save_to_state_dict(self, *args: Any) -> None:
        nn.Linear._save_to_state_dict(self, *args)


_Form = tuple[tuple[int, ...], int, torch.dtype]
"""The shape of a weight, its block size, and the dtype from which it was quantised."""


class _FrozenProduct(torch.autograd.Function):
    """`x @ weight.T` for a 4-bit weight. The backward dequantises again, so that no weight is kept in full."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, absmax: Tensor, nested: Tensor | None, form: _Form) -> Tensor:
        ctx.save_for_backward(weight, absmax, nested)
        ctx.form = form
        return F.linear(x, _dequantize(weight, absmax, nested, form, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, absmax, nested = ctx.saved_tensors
        # As in bitsandbytes, the backward's weight is rounded to the dtype from which it was quantised.
        full = _dequantize(weight, absmax, nested, ctx.form, ctx.form[2]).to(grad.dtype)
        return grad @ full, None, None, None, None


def _dequantize(weight: Tensor, absmax: Tensor, nested: Tensor | None, form: _Form, dtype: torch.dtype) -> Tensor:
    shape, blocksize, _ = form
    return dequantize_nf4(weight, absmax, nested, shape, blocksize, 0, dtype)


def _bytes_of(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().contiguous().view(torch.uint8), requires_grad=False)
