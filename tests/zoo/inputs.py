"""Batches for the kinds of models: tokens, images, sounds, series, and their pairs.

Each function takes sizes and returns a function of the model, for `Architecture.inputs`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.zoo.architecture import Inputs, generator

BATCH, LENGTH, VOCABULARY = 4, 16, 64

MakeInputs = Callable[[nn.Module], Inputs]


def draw_tokens(batch: int = BATCH, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Tensor:
    """Draw token ids without the special ids 0 to 3."""
    return torch.randint(4, vocabulary, (batch, length), generator=generator())


def draw(*shape: int) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(*shape, generator=generator())


def labelled_tokens(batch: int = BATCH, length: int = LENGTH, vocabulary: int = VOCABULARY) -> MakeInputs:
    """Return tokens that are their own labels, with some labels ignored."""

    def make(model: nn.Module) -> Inputs:
        tokens = draw_tokens(batch, length, vocabulary)
        labels = tokens.clone()
        labels[0, :3] = -100
        return {"input_ids": tokens, "labels": labels}

    return make


def padded_tokens(batch: int = BATCH, length: int = LENGTH, vocabulary: int = VOCABULARY) -> MakeInputs:
    """Labelled tokens with a mask, one sample of the batch padded at its end."""

    def make(model: nn.Module) -> Inputs:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[1, length - 4 :] = 0
        return {**labelled_tokens(batch, length, vocabulary)(model), "attention_mask": mask}

    return make


def bare_tokens(batch: int = BATCH, length: int = LENGTH, vocabulary: int = VOCABULARY) -> MakeInputs:
    """Tokens alone."""
    return lambda model: {"input_ids": draw_tokens(batch, length, vocabulary)}


def classified_tokens(classes: int = 2, batch: int = BATCH, length: int = LENGTH) -> MakeInputs:
    """Tokens with one class for each sequence."""
    return lambda model: {"input_ids": draw_tokens(batch, length), "labels": _classes(batch, classes)}


def tagged_tokens(classes: int = 2, batch: int = BATCH, length: int = LENGTH) -> MakeInputs:
    """Tokens with one class per token."""
    return lambda model: {"input_ids": draw_tokens(batch, length), "labels": draw_tokens(batch, length) % classes}


def spans(batch: int = BATCH, length: int = LENGTH) -> MakeInputs:
    """Tokens with the start and the end of an answer."""
    return lambda model: {
        "input_ids": draw_tokens(batch, length),
        "start_positions": torch.arange(batch) % length,
        "end_positions": (torch.arange(batch) + 3) % length,
    }


def translated(batch: int = BATCH, source: int = LENGTH, target: int = 12) -> MakeInputs:
    """Source tokens and target labels."""
    return lambda model: {"input_ids": draw_tokens(batch, source), "labels": draw_tokens(batch, target)}


def images(size: int = 32, batch: int = BATCH, channels: int = 3) -> MakeInputs:
    """Square images."""
    return lambda model: {"pixel_values": draw(batch, channels, size, size)}


def classified_images(classes: int = 8, size: int = 32, batch: int = BATCH, channels: int = 3) -> MakeInputs:
    """Return square images with a class each."""
    return lambda model: {**images(size, batch, channels)(model), "labels": _classes(batch, classes)}


def segmented_images(classes: int = 8, size: int = 32, batch: int = BATCH, labels: int | None = None) -> MakeInputs:
    """Square images with a class per pixel."""
    side = labels or size

    def make(model: nn.Module) -> Inputs:
        classes_of = torch.randint(0, classes, (batch, side, side), generator=generator())
        return {**images(size, batch)(model), "labels": classes_of}

    return make


def captioned_images(size: int = 32, batch: int = BATCH, length: int = LENGTH) -> MakeInputs:
    """A text for each image."""
    return lambda model: {**images(size, batch)(model), "input_ids": draw_tokens(batch, length)}


def images_in_text(
    token: int, count: int, size: int = 32, batch: int = BATCH, length: int = LENGTH, **more: Tensor
) -> MakeInputs:
    """Labelled tokens in which `count` placeholders stand for an image."""

    def make(model: nn.Module) -> Inputs:
        tokens = draw_tokens(batch, length, VOCABULARY - 4)
        tokens[:, 1 : 1 + count] = token
        return {**images(size, batch)(model), "input_ids": tokens, "labels": tokens.clone(), **more}

    return make


def waves(samples: int = 800, batch: int = BATCH) -> MakeInputs:
    """Sounds as raw samples."""
    return lambda model: {"input_values": draw(batch, samples)}


def classified_waves(classes: int = 2, samples: int = 800, batch: int = BATCH) -> MakeInputs:
    """Return sounds with a class each."""
    return lambda model: {**waves(samples, batch)(model), "labels": _classes(batch, classes)}


def spectra(bins: int, frames: int, target: int = 8, batch: int = BATCH) -> MakeInputs:
    """Return spectrograms [batch, bins, frames] and their spoken tokens."""
    return lambda model: {"input_features": draw(batch, bins, frames), "labels": draw_tokens(batch, target)}


def series(length: int, channels: int, future: int, batch: int = BATCH) -> MakeInputs:
    """Past and future values of several time series."""
    return lambda model: {
        "past_values": draw(batch, length, channels),
        "future_values": draw(batch, future, channels) * 2,
    }


def _classes(batch: int, classes: int) -> Tensor:
    return torch.arange(batch) % classes
