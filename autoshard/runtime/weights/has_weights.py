"""`HasWeights`: the methods of compiled models and steps that initialise, load and export weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from autoshard.runtime.weights.export_weights import MAX_FILE_BYTES, export_weights
from autoshard.runtime.weights.load_weights import load_weights
from autoshard.runtime.weights.model_weights import InitFunction, Weights


class HasWeights(ABC):
    """A compiled model or step whose weights can be initialised, loaded and exported.

    All ranks must call each method together.
    """

    @abstractmethod
    def _model_weights(self) -> Weights:
        """Return the weights of the user's model, on which the methods of this class act."""

    def init_weights(self, seed: int, init_fn: InitFunction | None = None) -> None:
        """Initialise parameters and buffers by the modules' own initialisers; each rank computes its shards.

        The same seed gives the same weights, bit by bit, under every plan and on any number of ranks.

        Args:
            seed: the seed of random numbers; any integer.
            init_fn: called with each module, submodules first, after the modules' own initialisers; see
                docs/tutorials/larger_than_a_device.md.

        Raises:
            TraceError: an initialiser reads values, or a weight from the meta device has no initialiser.
            NotAvailableError: the model was built on the meta device, and no program is compiled yet.
        """
        self._model_weights().init(seed, init_fn)

    def load_weights(self, path: str | Path, *, strict: bool = True, cast: bool = False) -> None:
        """Load parameters and persistent buffers from safetensors files; each rank reads only its shards.

        An optimizer's state stays as it is.

        Args:
            path: a folder in transformers' format, a file, or an index; the same on all ranks.
            strict: whether missing or unexpected tensors are an error. If not, weights that are missing stay as they
                are, and unexpected tensors are ignored.
            cast: convert values of another dtype to the model's dtype, instead of raising an error.

        Raises:
            WeightsError: on every rank, and no weight is changed. The message names tensors that are missing,
                unexpected, or of another shape or dtype, or a damaged file.
        """
        weights = self._model_weights()
        load_weights(weights.model, weights.engine, path, strict=strict, cast=cast)

    def export(self, path: str | Path, *, merge: bool = False, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Write a folder of safetensors files that transformers (`from_pretrained`) and `load_weights` can read.

        For a model with peft adapters, write only the adapters, which `PeftModel.from_pretrained` can read.

        The ranks gather one part of a tensor at a time, and the first rank writes it. The folder also gets the model's
        configuration, if it has one. In an existing folder, weights are replaced and other files stay.

        Args:
            path: the folder.
            merge: write the whole model, with active adapters merged into its weights.
            max_file_bytes: bytes of tensors per file; a larger model is written as several files and an index. An
                adapter is one file.

        Raises:
            WeightsError: on every rank: the message says which file or tensor cannot be written, and why.
        """
        weights = self._model_weights()
        weights.refuse_use()
        sizes = {"merge": merge, "max_file_bytes": max_file_bytes}
        export_weights(weights.model, weights.engine, path, **sizes, pipeline_rank_of=weights.pipeline_rank_of)
