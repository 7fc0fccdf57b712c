"""What `compile` returns, with an optimizer and without: its weights are read from files and written to files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from autoshard.runtime.weights.export_weights import MAX_FILE_BYTES, export_weights
from autoshard.runtime.weights.load_weights import load_weights
from autoshard.runtime.weights.model_weights import InitFunction, Weights


class HasWeights(ABC):
    """A model on ranks. Every method is called by all of them."""

    @abstractmethod
    def _model_weights(self) -> Weights:
        """Those of the user's model."""

    def init_weights(self, seed: int, init_fn: InitFunction | None = None) -> None:
        """Give parameters and buffers the values that the modules' own initialisers give, each rank its part.

        The same seed gives the same weights, bit by bit, under every plan and on any number of ranks.

        Args:
            seed: of random numbers; any integer.
            init_fn: called with each module, submodules first, after the modules' own initialisers; see
                docs/tutorials/larger_than_a_device.md.

        Raises:
            TraceError: an initialiser reads values, or a weight from the meta device has none.
            NotAvailableError: the model was built on the meta device, and no program is compiled yet.
        """
        self._model_weights().init(seed, init_fn)

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
        weights = self._model_weights()
        weights.check_are_placed("load_weights")
        load_weights(weights.model, weights.engine, path, strict=strict, cast=cast)

    def export(self, path: str | Path, *, merge: bool = False, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Write a folder of safetensors files that transformers (`from_pretrained`) and `load_weights` read.

        Of a model with adapters of peft, write the adapters, which `PeftModel.from_pretrained` reads.

        The ranks gather a part of a tensor at a time, and the first writes it. The folder also gets the model's
        configuration, if it has one. In a folder that is there weights are replaced, and other files stay.

        Args:
            path: the folder.
            merge: write the whole model, with active adapters merged into its weights.
            max_file_bytes: bytes of tensors in a file; with more there are several files and an index. An adapter is
                one file.

        Raises:
            WeightsError: on every rank: what cannot be written, and why.
        """
        weights = self._model_weights()
        weights.check_are_placed("export")
        weights.refuse_use()
        sizes = {"merge": merge, "max_file_bytes": max_file_bytes}
        export_weights(weights.model, weights.engine, path, **sizes, holders=weights.holders)
