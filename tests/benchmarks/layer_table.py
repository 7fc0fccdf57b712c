"""Layer classes of the published runs' models, counted once and kept on disk.

Tracing and counting take nearly all time of a report. They depend on the model's shape, the kind of recipe
(`RecipeKind`), torch, and the code that traces, propagates and counts. They depend neither on cost models nor on the
numbers of a recipe. A file's name is a digest of the first three and of the counting passes. After a change to tracing
or to the rules pass `recount=True`, which reads no file.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from passes.driver.pricing import priced_model
from passes.search.layers.count_layers import LayerClass
from passes.search.layers.price_model import CountedModel, RecipeKind
from tests.benchmarks.decoder import Decoder, DecoderShape

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "layer classes"
_CODE = (
    "passes/preparation/canonicalize.py",
    "passes/search/layers/fold_program.py",
    "passes/search/layers/propagate_axis.py",
    "passes/search/layers/count_layers.py",
    "passes/search/layers/trace_values.py",
    "passes/search/layers/route_tokens.py",
    "tests/benchmarks/decoder.py",
)

_Counts = tuple[tuple[str, ...], int, Mapping[str, LayerClass]]
"""Blocks in order, tokens of a sequence, layer classes."""


@dataclass
class LayerTable:
    """Models whose layer classes come from disk, or are counted and written.

    Args:
        folder: folder of the files, made if missing.
        recount: count all models anew.
    """

    folder: Path = FOLDER
    recount: bool = False
    _models: dict[tuple[DecoderShape, RecipeKind], CountedModel] = field(default_factory=dict)
    _built: dict[DecoderShape, Decoder] = field(default_factory=dict)

    def model(self, shape: DecoderShape, kind: RecipeKind) -> CountedModel:
        """Return the operators and bytes of a model, counted for recipes that split the same things (`RecipeKind`).

        Raises:
            TraceError: the model cannot be traced.
            RecipeError: the model has nothing that the kind splits.
        """
        key = (shape, kind)
        if key not in self._models:
            blocks, tokens, layers = self._counts(shape, kind)
            self._models[key] = CountedModel(blocks, tokens, lambda _: layers)
        return self._models[key]

    def _counts(self, shape: DecoderShape, kind: RecipeKind) -> _Counts:
        path = self.folder / f"{_digest(shape, kind)}.pickle"
        if path.exists() and not self.recount:
            return pickle.loads(path.read_bytes())
        counts = self._count(shape, kind)
        self.folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(counts))
        part.rename(path)
        return counts

    def _count(self, shape: DecoderShape, kind: RecipeKind) -> _Counts:
        if shape not in self._built:
            with torch.device("meta"):
                self._built = {shape: Decoder(shape).bfloat16()}  # the latest only: each holds its traces
        tokens = torch.zeros(1, shape.sequence, dtype=torch.int64, device="meta")
        priced = priced_model(self._built[shape], (tokens, tokens), None)
        return priced.folded.blocks, priced.tokens, dict(priced.layers(kind))


def _digest(shape: DecoderShape, kind: RecipeKind) -> str:
    code = _code(_CODE if shape.experts is None else (*_CODE, "tests/benchmarks/experts.py"))
    return hashlib.sha256(f"{shape} {kind} {torch.__version__} {code}".encode()).hexdigest()[:32]


@lru_cache(maxsize=2)
def _code(names: tuple[str, ...]) -> str:
    found = hashlib.sha256()
    for name in names:
        found.update((ROOT / name).read_bytes())
    return found.hexdigest()
