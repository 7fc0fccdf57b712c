"""The weights of a compiled model: where they lie, whether they have values, and how they are given some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from autoshard.errors import NotAvailableError
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.staged import StagedProgram
from autoshard.runtime.compiler import Compiler
from autoshard.runtime.engine import Engine
from autoshard.runtime.inference import in_normal_mode
from autoshard.runtime.weights.init_weights import init_weights
from autoshard.runtime.weights.unset_weights import UnsetWeights, check_is_placed

InitFunction = Callable[[nn.Module], Any]


@dataclass(slots=True)
class Weights:
    """Parameters and buffers of `model`, the user's own, on `engine`; `compiler` looks at its initialisers."""

    model: nn.Module
    engine: Engine
    compiler: Compiler
    unset: UnsetWeights = field(default_factory=UnsetWeights)
    holders: dict[str, int] = field(default_factory=dict)
    """By each name of a parameter, the place of the pipeline whose ranks alone hold it; empty where there is none."""

    def place(self, specs: Mapping[str, PartitionSpec]) -> None:
        """Lay parameters out as `specs` say; what is on the meta device gets memory, on the ranks that hold it."""
        with self.unset.getting_memory(self.model):
            self.engine.place(self.model, specs, self.holders)

    def share_out(self, staged: StagedProgram) -> None:
        """Say which place of a pipeline holds each parameter; the first one what no stage has read so far.

        Raises:
            NotAvailableError: an earlier program has one at another place.
        """
        ranks, stages = staged.order.stage_ranks, staged.stage_of_parameters()
        firsts = {id(item): name for name, item in self.model.named_parameters()}
        every = self.model.named_parameters(remove_duplicate=False)
        found = {name: self._holder_of(name, stages.get(firsts[id(item)]), ranks) for name, item in every}
        moved = [name for name, holder in self.holders.items() if found.get(name, holder) != holder]
        if moved:
            raise NotAvailableError(
                f"For this call the pipeline is cut elsewhere: {moved[0]!r} would have to go from place "
                f"{self.holders[moved[0]]} of the axis 'pipeline' to {found[moved[0]]}, and parameters stay where they "
                "are. Give calls the shapes that the first one had (pad them), or compile the model anew."
            )
        self.holders = found

    def _holder_of(self, name: str, stage: int | None, ranks: Sequence[int]) -> int:
        return self.holders.get(name, 0) if stage is None else ranks[stage]

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
        unset = self.unset.names_everywhere(self.model, self.engine)
        init_weights(self.model, self.engine, record, seed, unset, only, self.holders)
