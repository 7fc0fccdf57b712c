"""Takes over the 4-bit layers of bitsandbytes in a model, so that programs see all their tensors (`linear_4bit`)."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import NotAvailableError

_WAY_OUT = "Load the model with BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')."


def take_over_4bit_layers(model: nn.Module) -> None:
    """Make each `bitsandbytes.nn.Linear4bit` of the model a `Linear4bit` of `autoshard.runtime.linear_4bit`.

    The layer stays the same object and computes the same. A weight on the meta device, which bitsandbytes quantises
    only when it moves, gets the shape of its packed form.

    Raises:
        NotAvailableError: a layer has weights of 8 bits, of FP4, or packed in another way, or is not quantised yet.
    """
    bnb = sys.modules.get("bitsandbytes")
    if bnb is None:
        return
    from autoshard.runtime.linear_4bit import Linear4bit

    refused = (bnb.nn.Linear8bitLt, bnb.nn.Embedding8bit, bnb.nn.Embedding4bit)
    modules: Any = model.named_modules()
    for name, module in modules:
        if isinstance(module, refused):
            raise NotAvailableError(
                f"{name!r} is a {type(module).__name__} of bitsandbytes; of its quantised layers, only Linear4bit is "
                f"available. {_WAY_OUT}"
            )
        if isinstance(module, bnb.nn.Linear4bit) and not isinstance(module, Linear4bit):
            state = _state_of(name, module)
            module.__class__ = Linear4bit
            module.hold_scales(state)


def is_4bit(module: Any) -> bool:
    """Whether a module is a layer that `take_over_4bit_layers` took over."""
    if "bitsandbytes" not in sys.modules:
        return False
    from autoshard.runtime.linear_4bit import Linear4bit

    return isinstance(module, Linear4bit)


def _state_of(name: str, layer: Any) -> Any:
    """Return the `QuantState` of a layer's weight. A weight on the meta device is quantised first.

    In a run of torch.distributed, the layer itself then holds the state no more.
    """
    weight = layer.weight
    _refuse_form(name, weight.quant_type, weight.quant_storage, weight.quant_state)
    if weight.quant_state is None and weight.is_meta:
        weight._quantize(weight.device)
    state = weight.quant_state
    if state is None:
        raise NotAvailableError(
            f"The weight of {name!r} is not quantised yet, because bitsandbytes quantises a weight when it moves. Move "
            "the model to its device first: model.to('cuda'), or model.to('cpu')."
        )
    if dist.is_available() and dist.is_initialized():
        weight.quant_state = layer.quant_state = None  # or else each rank would keep all scales
    return state


def _refuse_form(name: str, quant_type: str, storage: torch.dtype, state: Any) -> None:
    if quant_type != "nf4":
        raise NotAvailableError(f"The weight of {name!r} has quant_type={quant_type!r}, not 'nf4'. {_WAY_OUT}")
    if storage != torch.uint8:
        raise NotAvailableError(
            f"The weight of {name!r} is stored in {storage}. Leave bnb_4bit_quant_storage out of BitsAndBytesConfig: "
            "autoshard shards bytes."
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise NotAvailableError(
            f"The weight of {name!r} was packed for inference on a CPU, when the model was called in evaluation. "
            "Compile the model before that call."
        )
