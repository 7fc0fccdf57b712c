"""The weights of a compiled model: where they are, whether they have values, and their initialisation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
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
    """The parameters and buffers of a compiled model.

    Args:
        model: the user's model.
        engine: shards the parameters.
        compiler: records the model's initialisers.
        unset: the weights that have no values yet.
    """

    model: nn.Module
    engine: Engine
    compiler: Compiler
    unset: UnsetWeights = field(default_factory=UnsetWeights)
    pipeline_rank_of: dict[str, int] = field(default_factory=dict)
    """Name of a parameter → the pipeline rank (index along the axis "pipeline") that alone holds it.

    A tied parameter is there under each of its names. The dict is empty without a pipeline.
    """

    def place(self, specs: Mapping[str, PartitionSpec]) -> None:
        """Shard parameters by their spec in `specs`. Weights on meta get memory on the ranks that hold them."""
        with self.unset.getting_memory(self.model):
            self.engine.place(self.model, specs, self.pipeline_rank_of)

    def assign_to_pipeline_ranks(self, staged: StagedProgram) -> None:
        """Set the pipeline rank that holds each parameter: the rank of its stage in `staged`.

        A parameter that no stage has read so far goes to pipeline rank 0.

        Raises:
            NotAvailableError: an earlier program has a parameter on another pipeline rank.
        """
        ranks, stages = staged.order.stage_ranks, staged.stage_of_parameters()
        firsts = {id(item): name for name, item in self.model.named_parameters()}
        every = self.model.named_parameters(remove_duplicate=False)
        found = {name: self._choose_pipeline_rank(name, stages.get(firsts[id(item)]), ranks) for name, item in every}
        moved = [name for name, rank in self.pipeline_rank_of.items() if found.get(name, rank) != rank]
        if moved:
            before, after = self.pipeline_rank_of[moved[0]], found[moved[0]]
            raise NotAvailableError(
                f"For this call the pipeline is split elsewhere: {moved[0]!r} would move from place {before} of the "
                f"axis 'pipeline' to {after}. Parameters stay where they are. Give calls the shapes of the first call "
                "(pad them), or compile the model a second time."
            )
        self.pipeline_rank_of = found

    def _choose_pipeline_rank(self, name: str, stage: int | None, ranks: Sequence[int]) -> int:
        return self.pipeline_rank_of.get(name, 0) if stage is None else ranks[stage]

    def check_are_placed(self, action: str) -> None:
        """Raise `NotAvailableError` if a weight that `action` would write has no memory yet."""
        check_is_placed(self.model, action)

    def refuse_use(self) -> None:
        """Raise `TraceError`, on every rank, if a weight has no values yet on any rank.

        If only non-persistent buffers have no values, initialise them instead.
        """
        self.unset.refuse_use(self.model, self.engine, partial(self._init, 0, None))

    def init(self, seed: int, init_fn: InitFunction | None) -> None:
        """Initialise all weights by the modules' initialisers, then `init_fn` (`HasWeights.init_weights`)."""
        self.check_are_placed("init_weights")
        if not isinstance(seed, Integral):
            raise NotAvailableError(f"init_weights(seed={seed!r}): seed is a {type(seed).__name__}; pass an integer.")
        self._init(int(seed), init_fn, None)

    @in_normal_mode
    def _init(self, seed: int, init_fn: InitFunction | None, only: Collection[str] | None) -> None:
        record = partial(self.compiler.record_initialisation, self.model, self.engine.device, init_fn)
        unset = self.unset.names_everywhere(self.model, self.engine)
        init_weights(self.model, self.engine, record, seed, unset, only, self.pipeline_rank_of)
