"""`ORDER` lists the lowering passes in their order, and an entry there is all that a new pass needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from random import Random

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, VerificationError
from autoshard.ir.lowered import PhasedProgram
from passes.lowering import order
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.name_communicators import NameCommunicators
from passes.lowering.order import ORDER, Moment, passes_at
from tests.passes.mutants import in_phase
from tests.passes.mutations import scale_value

MESH = Mesh({"x": 2})


@dataclass(frozen=True)
class Watch:
    """A pass that notes the number of nodes of each forward. With `spoils` it makes the phases wrong."""

    seen: list[int] = field(default_factory=list)
    spoils: bool = False

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """Return the phases unchanged, or with one value scaled."""
        self.seen.append(len(phased.forward.graph.nodes))
        return spoiled(phased) if self.spoils else phased


def spoiled(phased: PhasedProgram) -> PhasedProgram:
    """The phases with one value scaled."""
    return in_phase(scale_value)(phased, Random(0))[1]


def with_entry(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Put a pass into the order, behind `NameCommunicators`."""
    options = LoweringOptions(plan=compile_layer().plan)
    made = [make(options) if when is Moment.LOWERED else None for when, make in ORDER]
    place = 1 + next(place for place, item in enumerate(made) if isinstance(item, NameCommunicators))
    entry = (Moment.LOWERED, lambda _: watch)
    monkeypatch.setattr(order, "ORDER", (*ORDER[:place], entry, *ORDER[place:]))


def compile_layer() -> autoshard.ShardedModule:
    """Compile a linear layer and a tanh, whose batch is split over two devices."""
    constraints = {"input:0": autoshard.P("x")}
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    return autoshard.compile(model, MESH, example_inputs=(torch.ones(4, 8),), constraints=constraints)


def test_an_entry_is_all_that_a_pass_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is added to `ORDER` runs when a module is compiled and called."""
    watch = Watch()
    with_entry(monkeypatch, watch)
    compile_layer()(torch.ones(4, 8))
    assert len(watch.seen) > 0
    assert min(watch.seen) > 0


def test_a_new_pass_that_goes_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AUTOSHARD_VERIFY=each-pass, the error names the added pass, which changed the results."""
    with_entry(monkeypatch, Watch(spoils=True))
    monkeypatch.setenv("AUTOSHARD_VERIFY", "each-pass")
    with pytest.raises(VerificationError, match=rf"^{__name__} changed the results of its program"):
        compile_layer()


def test_entries_of_one_moment_stand_together() -> None:
    """The passes of each `Moment` stand together in `ORDER`, in the order of the moments."""
    assert [moment for moment, _ in groupby(when for when, _ in ORDER)] == list(Moment)


def test_options_choose_passes() -> None:
    """A pass that the options do not ask for is not made."""
    few = LoweringOptions(with_native=False, with_overlap=False, plan=compile_layer().plan)
    usual = ["Lower", "SplitPhases", "Hoist", "NameCommunicators"]
    names = [type(item).__name__ for item in passes_at(Moment.LOWERED, few)]
    assert [name for name in names if name in usual] == usual  # a pass of a newcomer may stand between
    assert not {"SelectKernels", "JoinBiases", "NarrowReductions", "KeepRows"} & set(names)
