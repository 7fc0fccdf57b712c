"""What an entry of the zoo is: the name of a transformers model, a small config, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import transformers
from torch import nn

Inputs = dict[str, Any]


class Family(StrEnum):
    """What kind of model it is."""

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


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    Args:
        name: of its folder in transformers, or with a suffix for another variant.
        model: class name in transformers.
        config: keyword arguments of the model's config class; nested configs are dicts.
        inputs: makes the keyword arguments of a call from the model.
        training: run in training mode (batch statistics); such a config has no dropout.
        call: more keyword arguments of the call.
    """

    name: str
    family: Family
    model: str
    config: Mapping[str, Any]
    inputs: Callable[[nn.Module], Inputs]
    training: bool = False
    call: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[nn.Module, Inputs]:
        """The model with random weights, and a batch for it; the same in every process."""
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        model = kind(kind.config_class(**self.config))
        model.train(self.training)
        return model, {**self.inputs(model), **self.call}
