"""Models named on the command line: a function in a file, a function in a package, or a transformers config.

A model is built on the meta device, so models larger than this machine can be planned. A named function returns
`(model, example_inputs)`, and gets `batch` and `seq` if it has parameters of these names. A config is data: neither its
custom code nor kernels from a repository run, unless the user trusts them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autoshard.errors import AutoshardError
from autoshard.tracing.calling import cast_floats
from autoshard.tracing.provenance import line_of_error


class ModelReferenceError(AutoshardError):
    """A model named on the command line cannot be found or built."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model on the meta device, with example inputs: positional (a tuple) or by keyword (a dict)."""

    model: nn.Module
    inputs: tuple[Any, ...] | Mapping[str, Any]

    def to(self, dtype: torch.dtype) -> NamedModel:
        """Return the model and inputs with floating-point parameters and tensors of type `dtype`.

        The model is changed in place.
        """
        return NamedModel(self.model.to(dtype), cast_floats(self.inputs, dtype))


def load_model(
    reference: str, *, batch: int, seq: int, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> NamedModel:
    """Build the model that `reference` names.

    Args:
        reference: "path/to/file.py:build", "package.module:build", or "hf:CONFIG".
        batch: sequences per step over the whole cluster.
        seq: tokens per sequence.
        dtype: type of floating-point parameters and inputs; None: the function's own, float32 for a config.
        trust_remote_code: whether transformers may load and run code and kernels that a config names.

    Raises:
        ModelReferenceError: nothing has this name, the function does not return a model with example inputs, or the
            model needs untrusted code.
    """
    sizes = {"batch": batch, "seq": seq}
    with torch.device("meta"):
        if reference.startswith("hf:"):
            named = _build_from_config(reference, sizes, trust_remote_code)
        else:
            named = _build_from_function(reference, sizes)
    return named if dtype is None else named.to(dtype)


def _build_from_function(reference: str, sizes: Mapping[str, int]) -> NamedModel:
    function = _find_function(reference)
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ModelReferenceError(f"{reference} is no function of Python; name one that you wrote.") from error
    needed = [item.name for item in known.values() if item.default is item.empty and item.kind not in _OPEN]
    if unknown := [name for name in needed if name not in sizes]:
        raise ModelReferenceError(
            f"{reference} needs {unknown[0]!r}, but is told only 'batch' and 'seq'; give the others defaults."
        )
    with _named(reference):
        result = function(**{name: size for name, size in sizes.items() if name in known})
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise ModelReferenceError(
            f"{reference} returned {type(result).__name__}; it must return (model, example_inputs)."
        )
    return NamedModel(*result)


_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@contextlib.contextmanager
def _named(reference: str) -> Iterator[None]:
    """Turn an error that the user's code raises in this context into a `ModelReferenceError` with the user's line."""
    try:
        yield
    except AutoshardError:
        raise
    except Exception as error:
        first, line = next(iter(str(error).splitlines()), ""), line_of_error(error)
        where = f" ({line})" if line else ""
        raise ModelReferenceError(f"{reference} raised {type(error).__name__}: {first}{where}.") from error


def _find_function(reference: str) -> Callable[..., Any]:
    place, separator, name = reference.rpartition(":")
    if not separator or not place or not name:
        raise ModelReferenceError(
            f"MODEL {reference!r} must read path/to/file.py:build, package.module:build, or hf:CONFIG."
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = vars(module).get(name)
    if not callable(function):
        own = [found for found in vars(module).values() if getattr(found, "__module__", "") == module.__name__]
        known = ", ".join(found.__name__ for found in own if inspect.isfunction(found))
        raise ModelReferenceError(
            f"{place} has no function {name!r}, which MODEL {reference!r} names; it has {known or 'none'}."
        )
    return function


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelReferenceError(f"there is no file {path}, which MODEL names.")
    sys.path.insert(0, str(path.parent.resolve()))
    name = f"{path.stem}_as_model"  # a file named like a module of Python's must not replace it
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelReferenceError(f"{path}, which MODEL names, is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _named(str(path)):
            spec.loader.exec_module(module)
    except ModelReferenceError:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    with _named(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
            raise ModelReferenceError(f"there is no module {error.name!r}, which MODEL names.") from error


def _build_from_config(reference: str, sizes: Mapping[str, int], trusts: bool) -> NamedModel:
    path = Path(reference.removeprefix("hf:"))
    if not path.exists():
        raise ModelReferenceError(f"there is no config file or folder {path}, which MODEL {reference!r} names.")
    if not trusts:
        os.environ.setdefault("USE_HUB_KERNELS", "NO")  # transformers reads it at import
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise ModelReferenceError(
            "MODEL hf:... needs transformers, which is not installed. Run pip install transformers accelerate."
        ) from error
    _check_config(path, reference, trusts)
    with _named(reference):
        try:
            config = AutoConfig.from_pretrained(path, use_cache=False, trust_remote_code=trusts)
        except (OSError, ValueError) as error:
            raise _no_config(path, reference, error) from error
    if not trusts:
        _refuse_fetched(config, reference)
    tokens = torch.zeros(sizes["batch"], sizes["seq"], dtype=torch.int64)
    with _named(reference):
        model = _language_model(config, trusts).from_config(config, trust_remote_code=trusts).float()
    return NamedModel(model, {"input_ids": tokens, "labels": tokens})


_MAX_LAYERS = 10_000
_TRUST = "Read the code, and pass --trust-remote-code if you trust it."


def _no_config(path: Path, reference: str, error: Exception) -> ModelReferenceError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return ModelReferenceError(f"{path}, which MODEL {reference!r} names, is no config: {reason}")


def _check_config(path: Path, reference: str, trusts: bool) -> None:
    """Raise `ModelReferenceError` if a config is invalid, needs untrusted code, or has too many layers to build."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        counts = dict(_layer_counts(data))
    except (OSError, ValueError, RecursionError) as error:
        raise _no_config(path, reference, error) from error
    for name, count in counts.items():
        if count > _MAX_LAYERS:
            raise ModelReferenceError(
                f"{path}, which MODEL {reference!r} names, has {name}={count}; a model is built layer by layer, and "
                f"this builds up to {_MAX_LAYERS}."
            )
    if not trusts and _needs_code(data):
        raise ModelReferenceError(
            f"{path}, which MODEL {reference!r} names, is of a model that transformers does not have "
            f"(model_type={data.get('model_type')!r}): its code comes with it, and is not run. {_TRUST}"
        )


def _layer_counts(data: object) -> Iterator[tuple[str, int]]:
    """Yield each field that counts layers ("num_layers") with its value, in a config and its nested parts."""
    for name, value in data.items() if isinstance(data, dict) else ():
        if isinstance(value, int) and name.endswith(("layer", "layers")):
            yield name, value
        yield from _layer_counts(value)


def _needs_code(data: object) -> bool:
    """Whether a config names custom code and transformers has no code for the config's `model_type`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return isinstance(data, dict) and bool(data.get("auto_map")) and data.get("model_type") not in CONFIG_MAPPING


_BUILT_IN: Mapping[str, Sequence[str | None]] = {
    "attn_implementation": (None, "eager", "sdpa", "flex_attention"),
    "experts_implementation": (None, "eager", "batched_mm", "grouped_mm"),
}
"""Field of a config → the values for which transformers contains the code.

Other implementations, such as flash attention, may be fetched from a repository.
"""


def _refuse_fetched(config: Any, reference: str) -> None:
    """Raise `ModelReferenceError` if a config or a nested config asks for kernels that transformers may fetch."""
    for name, known in _BUILT_IN.items():
        found = getattr(config, f"_{name}", None)
        if found not in known:
            raise ModelReferenceError(
                f"the config of MODEL {reference!r} asks for {name}={found!r}, which transformers may fetch and run. "
                f"Take it out, plans do not depend on it; or: {_TRUST}"
            )
    for part in config.sub_configs:
        if (inner := getattr(config, part, None)) is not None:
            _refuse_fetched(inner, reference)


def _language_model(config: Any, trusts: bool) -> Any:
    """Return the transformers class that builds a config's model with a loss over predicted tokens."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto import modeling_auto

    own = getattr(config, "auto_map", None) or {} if trusts else {}
    if config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or AutoModelForCausalLM.__name__ in own:
        return AutoModelForCausalLM
    if config.model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForSeq2SeqLM
    raise ModelReferenceError(
        f"hf: makes models that predict tokens, and model_type={config.model_type!r} is none. Write a function that "
        "returns (model, example_inputs), and name it: MODEL path/to/file.py:build."
    )
