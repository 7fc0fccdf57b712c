"""The weights of a compiled model: where they lie, whether they have values, and how they are given some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.compiler import Compiler
from autoshard.runtime.engine import Engine
from autoshard.runtime.inference import in_normal_mode
from autoshard.runtime.init_weights import init_weights
from autoshard.runtime.unset_weights import UnsetWeights, check_is_placed, on_meta

InitFunction = Callable[[nn.Module], Any]


@dataclass(slots=True)
class Weights:
    """Parameters and buffers of `model`, the user's own, on `engine`; `compiler` looks at its initialisers."""

    model: nn.Module
    engine: Engine
    compiler: Compiler
    unset: UnsetWeights = field(default_factory=UnsetWeights)

    @property
    def have_values(self) -> bool:
        """Whether all of them have values, as far as this rank can tell."""
        return not on_meta(self.model) and not self.unset.names(self.model)

    def place(self, specs: Mapping[str, PartitionSpec]) -> None:
        """Lay parameters out as `specs` say; what is on the meta device gets memory."""
        with self.unset.getting_memory(self.model):
            self.engine.place(self.model, specs)

    def check_are_placed(self, what: str) -> None:
        """Raise `NotAvailableError` where `what` would write weights that have no memory yet."""
        check_is_placed(self.model, what)

    def refuse_use(self) -> None:
        """Raise `TraceError`, on every rank, if some have no values; buffers that no state has are made."""
        self.unset.refuse_use(self.model, self.engine, partial(self._init, 0, None))

    def init(self, seed: int, init_fn: InitFunction | None) -> None:
        """See `ShardedModule.init_weights`."""
        self.check_are_placed("init_weights")
        self._init(seed, init_fn, None)

    @in_normal_mode
    def _init(self, seed: int, init_fn: InitFunction | None, only: Collection[str] | None) -> None:
        record = partial(self.compiler.record_initialisation, self.model, self.engine.device, init_fn)
        init_weights(self.model, self.engine, record, seed, self.unset.names(self.model), only)
