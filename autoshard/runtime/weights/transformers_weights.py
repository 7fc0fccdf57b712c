"""Convert between the tensors of a transformers model and the tensors of its files.

Files may have older names, or other tensors, such as one matrix per expert. The library transformers (version 5) knows
for each class how to convert. This module calls its functions with tensors that are not read yet. It imports
transformers only if the user has imported it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from torch import nn

from autoshard.errors import WeightsError
from autoshard.runtime.weights.unread import Unread


def applies_to(model: nn.Module) -> bool:
    """Whether a model is a `PreTrainedModel`, and the installed transformers has functions to convert weights."""
    transformers = sys.modules.get("transformers")
    if transformers is None or find_spec("transformers.core_model_loading") is None:
        return False
    return isinstance(model, transformers.PreTrainedModel)


def converted(model: Any, names: Collection[str], stored: Mapping[str, Unread]) -> tuple[dict[str, Unread], list[str]]:
    """Convert the tensors of files, `stored`, to the tensors of a transformers model, which have `names`.

    Return the converted tensors by the model's names, and the names in the files that the model lacks.

    Raises:
        WeightsError: several tensors of the files are one tensor of the model.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = get_model_conversion_mapping(model)
    renamings = [item for item in conversions if isinstance(item, loading.WeightRenaming)]
    converters = [item for item in conversions if isinstance(item, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = dict.fromkeys(names, True)
    found: dict[str, Unread] = {}
    gathered: dict[str, Any] = {}
    unexpected: list[str] = []
    for name in sorted(stored, key=loading.dot_natural_key):
        renamed, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = name, None
        if renamed not in known:
            unexpected.append(name)
        elif pattern is not None:
            converter = gathered.setdefault(renamed, deepcopy(by_pattern[pattern]))
            converter.add_tensor(renamed, name, pattern, stored[name])
        elif renamed in found:
            raise WeightsError(f"Several tensors of the files are {renamed!r} of the model, {name!r} among them.")
        else:
            found[renamed] = stored[name]
    for name, converter in gathered.items():
        made = converter.convert(name, model=model, config=model.config)
        found.update({target: _only(tensor) for target, tensor in made.items()})
    return found, unexpected


def reverted(model: Any, tensors: Mapping[str, Unread], tied: Iterable[tuple[str, ...]]) -> dict[str, Unread]:
    """Convert a model's tensors to those that `save_pretrained` writes, and return them by their names in files.

    `tied` has all names of each tensor. A tied tensor is written once.
    """
    from transformers.core_model_loading import revert_weight_conversion

    copies = getattr(model, "all_tied_weights_keys", None) or {}
    left_out = model._keys_to_ignore_on_save or ()
    kept = (next((name for name in names if name not in copies), names[0]) for names in tied)
    written: Any = {name: tensors[name] for name in kept if name not in left_out}
    return cast("dict[str, Unread]", revert_weight_conversion(model, written))


def optional_among(model: Any, names: Iterable[str]) -> frozenset[str]:
    """Return those of the model's tensor `names` that files may lack, by the rules of the model's class."""
    return frozenset(name for name in names if _fits(model._keys_to_ignore_on_load_missing, name))


def without_obsolete(model: Any, names: Iterable[str]) -> list[str]:
    """Return the unexpected `names` in files, except those that the model's class allows there."""
    buffers = [name for name, _ in model.named_buffers()]
    computed = {path for end, path in _COMPUTED.items() if any(name.endswith(end) for name in buffers)}
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), *computed}
    return [name for name in names if not _fits(patterns, name)]


def write_config(model: Any, folder: Path) -> None:
    """Write the model's configuration for `from_pretrained`, and its generation configuration, into a folder."""
    config = deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def forget_quantisation(model: Any) -> None:
    """Remove the quantisation from a model's configuration, because the weights are no longer quantised."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


_COMPUTED = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
"""Buffers that models now compute, but old files contain.

A key is the end of a buffer's name in the model, and its value is a pattern of the buffer's names in files.
"""


def _fits(patterns: Iterable[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _only(tensor: Any) -> Unread:
    return tensor[0] if isinstance(tensor, list) else tensor
