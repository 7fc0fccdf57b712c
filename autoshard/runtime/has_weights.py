"""What `compile` returns, with an optimizer and without: its weights are read from files and written to files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from autoshard.runtime.engine import Engine
from autoshard.runtime.export_weights import MAX_FILE_BYTES, export_weights
from autoshard.runtime.load_weights import load_weights
from autoshard.runtime.unset_weights import UnsetWeights


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A user's model whose parameters lie on ranks.

    Args:
        module: the model.
        engine: where it runs.
        unset: its weights that have no values yet.
    """

    module: nn.Module
    engine: Engine
    unset: UnsetWeights


class HasWeights(ABC):
    """A model on ranks. Every method is called by all of them."""

    @abstractmethod
    def _placed_model(self) -> PlacedModel:
        """The user's model."""

    def load_weights(self, path: str | Path, *, strict: bool = True, cast: bool = False) -> None:
        """Give parameters and persistent buffers the values in safetensors files; each rank reads its shards alone.

        An optimizer's state stays as it is.

        Args:
            path: a folder as transformers has them, a file, or an index; the same on all ranks.
            strict: refuse files that lack tensors, or have others; else what they lack stays as it is.
            cast: convert values of another type to the type in the model, instead of refusing them.

        Raises:
            WeightsError: on every rank, and nothing was changed: names what is missing, unexpected, of another shape or
                type, or which file is damaged.
        """
        model = self._placed_model()
        load_weights(model.module, model.engine, path, strict=strict, cast=cast)

    def export(self, path: str | Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Write a folder of safetensors files that transformers (`from_pretrained`) and `load_weights` read.

        The ranks gather one tensor at a time, and the first writes it. The folder also gets the model's configuration,
        if it has one. In a folder that is there weights are replaced, and other files stay.

        Args:
            path: the folder.
            max_file_bytes: bytes of tensors in a file; with more there are several files and an index.

        Raises:
            WeightsError: on every rank: what cannot be written, and why.
        """
        model = self._placed_model()
        model.unset.refuse_use(model.module, model.engine)
        export_weights(model.module, model.engine, path, max_file_bytes=max_file_bytes)
