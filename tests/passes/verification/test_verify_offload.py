"""Programs that offload are accepted, and refused if a call reads a value on the wrong side or too early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from torch import fx

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.errors import VerificationError
from autoshard.kernels.offload import from_host, to_host
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_program import verify_program
from tests.benchmarks.mutation_campaign import prove
from tests.passes.layouts import phased_of
from tests.passes.mutants import KINDS, Place, mutate
from tests.passes.mutations import copy_of
from tests.passes.rewrite_mutations import copy_other_value, fetch_other_copy, read_before_made, skip_transfer

OFFLOADED = ("recommender", "offloaded")


def without(graph_module: fx.GraphModule, target: Callable[..., object]) -> fx.GraphModule:
    """The program without its first copy in one direction, `to_host` or `from_host`."""
    module = copy_of(graph_module)
    node = next(node for node in module.graph.nodes if node.target is target)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    module.graph.erase_node(node)
    return module


def test_an_offloaded_program_is_accepted() -> None:
    """A program that copies values to the host in the forward, and back in the backward, is accepted."""
    phased = phased_of(*OFFLOADED)
    assert any(node.target is to_host for node in phased.forward.graph.nodes)
    assert any(node.target is from_host for node in phased.backward.graph.nodes)
    verify_program(phased.lowered.traced, phased.lowered, phased.carried)
    verify_phases(phased)


def test_a_backward_that_reads_the_host_is_refused() -> None:
    """A backward that computes on host values is refused, because an accelerator could not run the backward."""
    phased = phased_of(*OFFLOADED)
    with pytest.raises(VerificationError, match="which lies on the host"):
        verify_phases(replace(phased, backward=without(phased.backward, from_host)))


def test_a_forward_that_keeps_on_the_device_what_is_fetched_is_refused() -> None:
    """A program whose backward fetches a value that its forward did not copy to the host is refused."""
    phased = phased_of(*OFFLOADED)
    with pytest.raises(VerificationError, match="which does not lie on the host"):
        verify_phases(replace(phased, forward=without(phased.forward, to_host)))


def test_a_program_that_reads_what_is_not_computed_yet_is_refused() -> None:
    """A joint program that copies a value before it is computed is refused, and the error names the value."""
    phased = phased_of(*OFFLOADED)
    module = copy_of(phased.lowered.graph_module)
    assert read_before_made(module.graph, Random(0), phased.lowered.mesh)
    with pytest.raises(VerificationError, match=r"reads '\w+' before it is computed"):
        verify_program(phased.lowered.traced, replace(phased.lowered, graph_module=module), phased.carried)


@pytest.mark.parametrize("mutation", [fetch_other_copy, copy_other_value, skip_transfer, read_before_made])
def test_mistakes_of_offload_are_refused(mutation: Callable[..., object]) -> None:
    """Offload mistakes that change numbers are refused in the prepared program, the joint program and its phases."""
    phased, traced, run = prove(*OFFLOADED)
    places = [place for place in Place if (place, mutation.__name__) in KINDS]
    assert len(places) == 3
    drawn = [mutate(phased, place, mutation.__name__, Random(seed)) for place in places for seed in range(4)]
    found = [mutant for mutant in drawn if mutant is not None]
    accepted = [mutant for mutant in found if not mutant.is_refused(traced)]
    assert len(found) > len(accepted)
    assert [mutant.what for mutant in accepted if run.is_changed_by(mutant)] == []
