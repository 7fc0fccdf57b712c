"""Spans masked at random (SpecAugment, Park et al. 2019), drawn by operators instead of NumPy.

Wav2vec 2.0, Whisper and similar models in transformers draw masked spans with NumPy. A trace would freeze the first
masks. `draw_spans` draws from the same distribution with operators of torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from autoshard.tracing.replaced import replaced

_NAME = "_compute_mask_indices"
_PARAMETERS = ("shape", "mask_prob", "mask_length", "attention_mask", "min_masks")


def drawing_spans(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `draw_spans` replaces transformers' `_compute_mask_indices` in all loaded modules."""
    places = [(module, _NAME) for name, module in list(sys.modules.items()) if _has_function(name)]
    return replaced(dict.fromkeys(places, functools.partial(draw_spans, device=device)))


@functools.cache  # a search of thousands of modules takes as long as a small trace
def _has_function(module: str) -> bool:
    """Whether a loaded module has the function of transformers in its namespace."""
    found = getattr(sys.modules.get(module), "__dict__", {})
    return _NAME in found and _draws_spans(found[_NAME])


def _draws_spans(function: Any) -> bool:
    return inspect.isfunction(function) and tuple(inspect.signature(function).parameters) == _PARAMETERS


def draw_spans(
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: Tensor | None = None,
    min_masks: int = 0,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Draw a bool mask [N, L], true in spans at random places; spans may overlap.

    Args:
        shape: (N, L), the number of sequences and their padded length.
        mask_prob: the share of a sequence that spans would cover without overlap. A fractional number of spans is
            rounded up with the probability of its fraction, for all sequences of the batch together.
        mask_length: length of each span.
        attention_mask: [N, L]; its number of ones is a sequence's length, within which spans lie. A sequence too short
            for a span is masked at its last place, which is padding.
        min_masks: least number of spans of a sequence.
        device: device of the mask. With `attention_mask`, the mask is on its device.
    """
    batch, length = shape
    if not 1 <= mask_length <= length:
        raise ValueError(f"Spans of {mask_length} do not fit sequences of {length}: mask_length= is from 1 to {length}")
    if attention_mask is None:
        lengths = torch.full((batch,), length, device=device)
    else:
        lengths, device = attention_mask.detach().sum(-1).long(), attention_mask.device
    rounding = torch.rand(1, device=device)
    starts = (lengths - (mask_length - 1)).clamp_min(0)  # [N], places where a span may start

    def count(lengths: Tensor, starts: Tensor) -> Tensor:
        spans = (lengths * (mask_prob / mask_length) + rounding).long().clamp_min(min_masks)
        spans = torch.where(spans * mask_length > length, length // mask_length, spans)
        return torch.minimum(spans, starts)

    spans = count(lengths, starts)
    keys = torch.rand(batch, length, device=device)
    keys = torch.where(torch.arange(length, device=device) < starts[:, None], keys, 2.0)
    is_start = keys.argsort(1).argsort(1) < spans[:, None]
    begun = is_start.long().cumsum(1)  # spans that begin at this place or before
    ended = torch.nn.functional.pad(begun, (mask_length, 0))[:, :length]
    whole = torch.full((1,), length, device=device)
    has_any = count(whole, whole - (mask_length - 1)) > 0
    is_dummy = (torch.arange(length, device=device) == length - 1) & (spans == 0)[:, None] & has_any
    return (begun > ended) | is_dummy
