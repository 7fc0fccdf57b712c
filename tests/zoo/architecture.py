"""Entries of the zoo: the name of a library's model, a small config, and inputs for it."""

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
    """Whose model it is; imported when one is built. All but the first come with `pip install 'autoshard[zoo]'`."""

    TRANSFORMERS = "transformers"
    DIFFUSERS = "diffusers"
    GEOMETRIC = "torch_geometric"

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported."""
        return importlib.util.find_spec(self) is not None

    @property
    def version(self) -> str:
        """Its name and version; the name alone where it is not installed."""
        return f"{self} {importlib.metadata.version(self)}" if self.is_installed else str(self)

    @property
    def module(self) -> str:
        """The module that its models are in."""
        return "torch_geometric.nn" if self is Library.GEOMETRIC else str(self)

    def model(self, name: str) -> Any:
        """The class of this name."""
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
    """A model that gives no loss, with one: the mean square of each floating output's distance to a target, added."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, targets: list[Tensor], **inputs: Any) -> Tensor:
        """The loss; `targets` as many, and of the same shapes, as what `outputs` gives."""
        pairs = zip(self.outputs(inputs), targets, strict=True)
        return torch.stack([F.mse_loss(output, target) for output, target in pairs]).sum()

    def outputs(self, inputs: Inputs) -> list[Tensor]:
        """Return the model's outputs that are floating tensors."""
        leaves = pytree.tree_leaves(self.model(**inputs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    Args:
        name: of its folder in transformers, or with a suffix for another variant.
        model: class name in the library, or what makes the model of the config.
        config: keyword arguments of the model's config class, or of the model where it has none; nested ones are dicts.
        inputs: makes the keyword arguments of a call from the model.
        call: more keyword arguments of the call.
        library: whose model it is.
        has_loss: it gives a loss, or outputs that are compared, by itself; else it gets `WithTargets`, as all models of
            other libraries than transformers do.
        rate: of plain gradient descent, with which it is trained (where a true gradient is zero, Adam would divide
            rounding by its own size); small where gradients are large, as behind batch norms of few values: there a
            larger step turns the rounding of one device into other numbers.
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
        """The model with random weights, in evaluation mode, and its first batch; the same in every process."""
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
        """A batch for the model; others have the same shapes and other numbers."""
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
"""Fields of configs that let a model draw, in training, spans that it masks, or whole layers: each choice of these is
a program of its own. An architecture may ask for the spans. And caches, which programs do not return."""


def _settled(config: Any, asked: Collection[str] = ()) -> Any:
    """The config, and those inside of it, without what makes a program of each step, unless it was asked for."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _settled(value)
        elif name in _OFF and name not in asked:
            setattr(config, name, _OFF[name])
    return config


_BATCH: ContextVar[int] = ContextVar("zoo_batch", default=0)


@contextmanager
def drawing(number: int) -> Iterator[None]:
    """Within, `generator` is of the batch of this number."""
    token = _BATCH.set(number)
    try:
        yield
    finally:
        _BATCH.reset(token)


def generator() -> torch.Generator:
    """A fresh source of the same numbers: those of the batch that is drawn."""
    return torch.Generator().manual_seed(1 + _BATCH.get())


def _without_zeros(model: nn.Module) -> nn.Module:
    """Draw parameters that start as zeros: behind them, all gradients would be zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return model
