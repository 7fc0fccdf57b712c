"""Entries of the zoo: a library's model, a small config, and inputs."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

Inputs = dict[str, Any]


class Library(StrEnum):
    """A library of models, imported at the first build; `pip install 'autoshard[zoo]'` installs all but the first."""

    TRANSFORMERS = "transformers"
    DIFFUSERS = "diffusers"
    GEOMETRIC = "torch_geometric"

    @property
    def is_installed(self) -> bool:
        """Whether the library can be imported."""
        return importlib.util.find_spec(self) is not None

    @property
    def version(self) -> str:
        """Return name and version, or the name alone without an installation."""
        return f"{self} {importlib.metadata.version(self)}" if self.is_installed else str(self)

    @property
    def module(self) -> str:
        """The module in which the library's models are."""
        return "torch_geometric.nn" if self is Library.GEOMETRIC else str(self)

    def model(self, name: str) -> Any:
        """The class of this name in the library."""
        return getattr(importlib.import_module(self.module), name)


class Family(StrEnum):
    """The kind of a model."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_DECODER = "encoder-decoder"
    MIXTURE = "mixture of experts"
    STATE_SPACE = "state-space"
    RECURRENT = "recurrent"
    CONVOLUTIONAL = "convolutional"
    VISION = "vision"
    AUDIO = "audio"
    MULTIMODAL = "multimodal"
    TIME_SERIES = "time series"
    DIFFUSION = "diffusion"
    GRAPH = "graph"


class WithTargets(nn.Module):
    """A model without a loss, wrapped with one: the sum of its floating outputs' mean squared errors to targets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, targets: list[Tensor], **inputs: Any) -> Tensor:
        """Return the loss; `targets` have the number and shapes of `outputs`."""
        pairs = zip(self.outputs(inputs), targets, strict=True)
        return torch.stack([F.mse_loss(output, target) for output, target in pairs]).sum()

    def outputs(self, inputs: Inputs) -> list[Tensor]:
        """Return the model's outputs that are floating tensors."""
        leaves = pytree.tree_leaves(self.model(**inputs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of the zoo.

    Args:
        name: name of its folder in transformers, perhaps with a suffix for a variant.
        model: class name in the library, or a function from config to model.
        config: keyword arguments of the model's config class, or of the model without one; nested configs are dicts.
        inputs: makes the keyword arguments of a call from the model.
        call: more keyword arguments of the call.
        library: library of the model.
        has_loss: the model returns a loss, or outputs to compare. Otherwise it is wrapped in `WithTargets`, as are all
            models of libraries other than transformers.
        rate: learning rate of plain gradient descent, because Adam would divide rounding by its own size. The rate is
            small for large gradients, as behind batch norms of few values, which would amplify rounding.
    """

    name: str
    family: Family
    model: str | Callable[..., nn.Module]
    config: Mapping[str, Any]
    inputs: Callable[[nn.Module], Inputs]
    call: Mapping[str, Any] = field(default_factory=dict)
    library: Library = Library.TRANSFORMERS
    has_loss: bool = True
    rate: float = 1e-2

    def build(self) -> tuple[nn.Module, Inputs]:
        """Return the model with random weights in evaluation mode, and its first batch, equal in every process."""
        torch.manual_seed(0)
        model = self._model().eval()
        return model, self.batch(model)

    def _model(self) -> nn.Module:
        kind = self.library.model(self.model) if isinstance(self.model, str) else self.model
        if self.library is Library.TRANSFORMERS:
            model = kind(_settled(kind.config_class(**self.config), self.config))
            return model if self.has_loss else WithTargets(_without_zeros(model))
        return WithTargets(_without_zeros(kind(**self.config)))

    def batch(self, model: nn.Module, number: int = 0) -> Inputs:
        """Return a batch for the model. Its values are drawn with the seed `number`, and its shapes are fixed."""
        with drawing(number):
            if not isinstance(model, WithTargets):
                return {**self.inputs(model), **self.call}
            inputs = {**self.inputs(model.model), **self.call}
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                fresh: Any = self._model()  # a call may change it, and what has weight norms cannot be copied
                shapes = [output.shape for output in fresh.eval().outputs(inputs)]
            source = torch.Generator().manual_seed(1000 + number)
            return {"targets": [torch.randn(shape, generator=source) for shape in shapes], **inputs}


_OFF = {
    "apply_spec_augment": False,
    "use_cache": False,
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
}
"""Fields of configs for random spans and random layers in training, because each draw would be a program of its own. An
architecture may enable spans. Caches are off too, because programs do not return caches.
"""


def _settled(config: Any, asked: Collection[str] = ()) -> Any:
    """The config without fields that would need a program for each step, except fields in `asked`."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _settled(value)
        elif name in _OFF and name not in asked:
            setattr(config, name, _OFF[name])
    return config


_BATCH: ContextVar[int] = ContextVar("zoo_batch", default=0)


@contextmanager
def drawing(number: int) -> Iterator[None]:
    """Within this context, `generator` belongs to the batch of this number."""
    token = _BATCH.set(number)
    try:
        yield
    finally:
        _BATCH.reset(token)


def generator() -> torch.Generator:
    """Return a fresh generator for the batch in the context."""
    return torch.Generator().manual_seed(1 + _BATCH.get())


def _without_zeros(model: nn.Module) -> nn.Module:
    """Replace parameters that are all zeros by random numbers, because zeros would make the gradients of earlier
    layers zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return model
