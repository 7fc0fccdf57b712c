"""Adapters of the library peft, for export: in the format of peft's own files, or merged into the model's weights.

The library peft knows which tensors belong to an adapter, and merges layers. This module calls its functions with
outlines (meta tensors of the same shape and dtype), or with one layer at a time. It imports peft only if the user has
imported it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.errors import WeightsError
from autoshard.runtime.four_bit import is_4bit
from autoshard.runtime.weights import transformers_weights
from autoshard.runtime.weights.unread import Region, Unread
from autoshard.runtime.weights.weight_names import names_by_tensor, persistent_tensors

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The names of the two files of an adapter: its tensors and its configuration."""

_PREFIX = "base_model.model."
"""The prefix of tensor names in peft's files. Tensors of a model that is no `PeftModel` have names without it."""

_MERGE = "export(path, merge=True) writes the model with its adapters merged into its weights."


def has_adapters(model: nn.Module) -> bool:
    """Whether a module of the model is a layer or a model of the library peft."""
    return _layer_of_peft(model) is not None


def adapters_of(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return, for each adapter's file, a dict from the names of tensors in the file to their names in the model.

    Raises:
        WeightsError: peft does not write this kind of adapter, or computes the tensors that it writes.
    """
    from peft import get_peft_model_state_dict  # type: ignore[import-not-found]

    prefix = "" if _is_peft_model(model) else _PREFIX
    outlines = {name: _outline(item) for name, item in persistent_tensors(model).items()}
    known = {id(outline): name for name, outline in outlines.items()}
    files = {}
    for adapter, (folder, config) in _configurations(model).items():
        if config.is_prompt_learning:
            raise _not_written(adapter, config)
        saved = get_peft_model_state_dict(model, state_dict=dict(outlines), adapter_name=adapter)
        if not all(id(outline) in known for outline in saved.values()):
            raise _not_written(adapter, config)
        files[f"{folder}{FILE}"] = {f"{prefix}{name}": known[id(outline)] for name, outline in saved.items()}
    return files


def write_configurations(model: Any, path: Path) -> None:
    """Write each adapter's configuration, which `PeftModel.from_pretrained` reads, into its folder under `path`."""
    base = model.get_base_model() if _is_peft_model(model) else model
    for folder, config in _configurations(model).values():
        config = deepcopy(config)
        config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path") or None
        config.inference_mode = True
        kind = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        config.save_pretrained(path / folder, auto_mapping_dict=kind if config.task_type is None else None)


def merged(model: nn.Module, tensors: Mapping[str, Unread]) -> tuple[nn.Module, dict[str, Unread]]:
    """Return the model without peft's layers, on meta, and its tensors by name, with active adapters merged.

    A layer is merged when one of its tensors is read. `tensors` are those of the model's state dict, by name.

    Raises:
        WeightsError: an adapter cannot be merged, or would be merged into a tied weight.
    """
    every = [*model.named_parameters(), *model.named_buffers()]
    outlines: dict[int, Any] = {id(item): _outline(item) for _, item in every}
    names = {id(outlines[id(item)]): name for name, item in every}
    layers: dict[str, str] = {}
    base = _without_layers(deepcopy(model, outlines), "", "", layers)
    if (left := _layer_of_peft(base)) is not None:
        raise WeightsError(f"{left} cannot be merged into the model's weights. Export the adapter: export(path).")
    held, merging = persistent_tensors(base), _Merging(model, tensors)
    at = {name: place for name in held for place in layers if not place or name.startswith(f"{place}.")}
    found: dict[str, Unread] = {}
    for name, outline in held.items():
        if name in at:
            read = merging.reading(layers[at[name]], name.removeprefix(f"{at[name]}."))
            found[name] = Unread(outline.shape, outline.dtype, read)
        else:
            found[name] = tensors[names[id(outline)]]
    _untie(model, base, names_by_tensor(held), {name: layers[place] for name, place in at.items()})
    if transformers_weights.applies_to(base):
        transformers_weights.forget_quantisation(base)
    return base, found


class _Merging:
    """Merges the adapters of a layer of `model` when a tensor of the layer is read; keeps the last merged layer."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Unread]) -> None:
        self._model = model
        self._tensors = tensors
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def reading(self, path: str, name: str) -> Callable[[Region], torch.Tensor]:
        """Return a function that reads a region of the tensor `name` of the layer at `path`, with adapters merged."""

        def read(region: Region) -> torch.Tensor:
            if self._last[0] != path or not self._last[1]:
                self._last = ("", {})
                self._last = (path, self._merge(path))
            return self._last[1][name][region]

        return read

    def _merge(self, path: str) -> dict[str, torch.Tensor]:
        layer = self._model.get_submodule(path)
        prefix = f"{path}." if path else ""
        wholes: dict[int, Any] = {}
        for name, tensor in persistent_tensors(layer).items():
            whole = self._tensors[prefix + name].read().clone()
            wholes[id(tensor)] = nn.Parameter(whole, False) if isinstance(tensor, nn.Parameter) else whole
        try:
            return persistent_tensors(_unloaded(deepcopy(layer, wholes), merge=True))
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise WeightsError(f"peft cannot merge {path!r} ({type(layer).__name__}): {error}") from error


def _without_layers(module: Any, path: str, at: str, layers: dict[str, str]) -> nn.Module:
    """Return a module with each peft layer and 4-bit layer in it replaced, in place, by a plain layer.

    Args:
        module: the module, with tensors on the meta device.
        path: the module's name in the model with peft.
        at: the module's name in the model without peft.
        layers: gets, for each replaced layer, its name without peft → its name with peft.
    """
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer  # type: ignore[import-not-found]
    from peft.utils.other import AuxiliaryTrainingWrapper  # type: ignore[import-not-found]

    while (is_model := _is_peft_model(module)) or isinstance(module, BaseTuner):
        if is_model and any(config.is_prompt_learning for config in module.peft_config.values()):
            return module
        leaf = "base_model" if is_model else "model"
        module, path = getattr(module, leaf), f"{path}.{leaf}".removeprefix(".")
    if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) or is_4bit(module):
        layers[at] = path
        return _unloaded(module, merge=isinstance(module, AuxiliaryTrainingWrapper))
    for leaf, child in list(module._modules.items()):
        if child is not None:
            inner = (f"{path}.{leaf}".removeprefix("."), f"{at}.{leaf}".removeprefix("."))
            setattr(module, leaf, _without_layers(child, *inner, layers))
    return module


def _unloaded(layer: Any, *, merge: bool) -> nn.Module:
    """Return the plain layer inside a peft layer. With `merge`, active adapters are merged into it.

    A layer with 4-bit weights becomes a plain layer in the dtype from which the weights were quantised.
    """
    if is_4bit(layer):
        return layer.in_full()
    if is_4bit(getattr(layer, "base_layer", None)):
        _put_in_full(layer)
    unload = getattr(layer, "unload_and_optionally_merge_module", None)
    if unload is not None:
        return unload(merge=merge, safe_merge=False, adapter_names=None)
    if merge:
        layer.merge(safe_merge=False, adapter_names=None)
    return layer.get_base_layer()


def _put_in_full(layer: Any) -> None:
    """Dequantise the weights inside a peft layer, and make it peft's layer for weights that are not quantised.

    Peft's 4-bit layer would quantise the merged weights again.

    Raises:
        WeightsError: the layer's adapter is neither LoRA nor DoRA.
    """
    from peft.tuners.lora import Linear, Linear4bit  # type: ignore[import-not-found]

    if not issubclass(type(layer), Linear4bit):
        raise WeightsError(
            f"The adapter in a {type(layer).__name__} cannot be merged into 4-bit weights: LoRA and DoRA alone can. "
            "Export the adapter: export(path)."
        )
    layer.base_layer = layer.base_layer.in_full()
    layer.__class__ = Linear


def _untie(model: nn.Module, base: Any, tied: Iterable[Sequence[str]], layers: Mapping[str, str]) -> None:
    """Untie the head of `base` from its embedding, also in the configuration, if only one of them has an adapter.

    Args:
        model: the model with peft's layers.
        base: the same model without them.
        tied: all names of each tensor of `base`.
        layers: name of a tensor of `base` → name of its peft layer in `model`.

    Raises:
        WeightsError: another weight with an adapter is tied.
    """
    embedding, head = _embedding_and_head(base)
    for names in tied:
        by = {id(model.get_submodule(layers[name])) if name in layers else None for name in names}
        if len(by) == 1:
            continue
        if len(names) > 2 or head is None or not base.get_parameter(names[0]) is head.weight is embedding.weight:
            raise WeightsError(
                f"{' and '.join(map(repr, names))} are one tensor, and merging an adapter into it for one name would "
                "change the others. Export the adapter instead: export(path)."
            )
        head.weight = nn.Parameter(_outline(head.weight), False)
    if head is not None and base.config.tie_word_embeddings and embedding.weight is not head.weight:
        base.config.tie_word_embeddings = False


def _embedding_and_head(base: Any) -> tuple[Any, Any]:
    """Return the embedding and the head of a transformers model; (None, None) for a model without a head."""
    if not transformers_weights.applies_to(base) or base.get_output_embeddings() is None:
        return None, None
    return base.get_input_embeddings(), base.get_output_embeddings()


def _configurations(model: nn.Module) -> dict[str, tuple[str, Any]]:
    """Return each adapter's folder, such as "other/", and its configuration, by the adapter's name.

    The folder is a prefix of file names.
    """
    configurations = getattr(model, "peft_config", None)
    if not isinstance(configurations, Mapping):
        raise WeightsError(
            f"{_layer_of_peft(model)} is a part of {type(model).__qualname__}, but an adapter's files name tensors as "
            f"in the model that was passed to peft. Compile the result of get_peft_model. Or else: {_MERGE}"
        )
    if len(configurations) == 1 and not _is_peft_model(model):
        return {name: ("", config) for name, config in configurations.items()}
    return {name: ("" if name == "default" else f"{name}/", item) for name, item in configurations.items()}


def _not_written(adapter: str, config: Any) -> WeightsError:
    kind = getattr(config.peft_type, "value", config.peft_type)
    return WeightsError(
        f"The adapter {adapter!r} is of the type {kind}, whose tensors peft computes from whole ones when it writes. "
        "Inside `with sharded.whole_parameters()`, call model.save_pretrained(path, is_main_process=rank == 0) on all "
        "ranks."
    )


def _is_peft_model(module: nn.Module) -> bool:
    from peft import PeftMixedModel, PeftModel  # type: ignore[import-not-found]

    return isinstance(module, (PeftModel, PeftMixedModel))


def _layer_of_peft(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            return f"{name or 'The model'} ({type(module).__name__} of peft)"
    return None


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(outline, False) if isinstance(tensor, nn.Parameter) else outline
