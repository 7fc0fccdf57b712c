"""Expert layers keep their received rows for the backward within memory.

Wrong pairs of forward and backward calls are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from torch import fx

import autoshard.kernels as kernels
from autoshard.errors import VerificationError
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.recompute import PHASE
from autoshard.tracing import trace
from passes.lowering.keep_rows import KeepRows
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.memory.lowered_memory import peak_bytes
from passes.memory.stage_load import StageLoad
from passes.verification.verify_phases import verify_phases
from tests.end_to_end.test_experts import EXCHANGED, PAIR, built, plan_with
from tests.passes.mutants import Place, mutate
from tests.passes.mutations import copy_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's models

ROOMY = 10**12
LAYERS = 2


@cache
def case() -> tuple[Program, Plan]:
    """Mixtral with two layers whose tokens are exchanged between two ranks."""
    model, inputs = built("mixtral", LAYERS)
    return trace(model, (), inputs), plan_with(EXCHANGED, model, inputs, PAIR)


def with_room(memory_bytes: int | None) -> PhasedProgram:
    """The lowered program under a memory limit in bytes, or without a limit."""
    program, plan = case()
    return lower_program(program, replace(plan, memory_budget=memory_bytes))


@cache
def plain() -> PhasedProgram:
    """Return the program without kept rows, with waits directly behind collectives."""
    program, plan = case()
    return lower_program(program, plan, options=LoweringOptions(with_overlap=False))


def calls(graph_module: fx.GraphModule, target: Any) -> list[fx.Node]:
    return graph_module.graph.find_nodes(op="call_function", target=target)


def kept(phased: PhasedProgram) -> int:
    """Count the layers that keep rows."""
    count = len(calls(phased.forward, kernels.exchanged_experts_keeping))
    targets = Counter(node.target for module in (phased.forward, phased.backward) for node in module.graph.nodes)
    assert targets[kernels.exchanged_experts_kept_backward] == count
    assert targets[kernels.exchanged_experts] == targets[kernels.exchanged_experts_backward] == LAYERS - count
    return count


def test_with_room_all_layers_keep_rows() -> None:
    """With enough memory all layers keep rows, the phases are proven, and the backward reads every input."""
    phased = with_room(ROOMY)
    assert kept(phased) == LAYERS
    verify_phases(phased)
    assert all(node.users for node in phased.backward.graph.find_nodes(op="placeholder"))
    assert sum("kept" in name for name in phased.saved) == 3 * LAYERS


def test_as_many_layers_keep_rows_as_fit() -> None:
    """The last layers keep rows, as many as fit in the limit. Without a limit the peak does not grow."""
    all_keep = peak_bytes(KeepRows(1, ROOMY)(plain()))
    found = {limit: KeepRows(1, limit)(plain()) for limit in (0, all_keep - 1, all_keep)}
    assert [kept(phased) for phased in found.values()] == [0, LAYERS - 1, LAYERS]
    assert all(peak_bytes(phased) <= limit for limit, phased in found.items() if limit)
    last = calls(plain().forward, kernels.exchanged_experts)[-1]
    assert f"{last.name}_kept_rows" in found[all_keep - 1].saved
    assert peak_bytes(KeepRows()(plain())) <= peak_bytes(plain()) < all_keep


def test_micro_batches_in_flight_each_keep_rows() -> None:
    """The kept rows of a stage are counted once for each micro-batch in flight on its rank."""
    load = StageLoad(in_flight=4)
    all_keep = peak_bytes(KeepRows(1, ROOMY)(plain()), load=load)
    found = KeepRows(1, all_keep - 1, load)(plain())
    assert kept(found) == LAYERS - 1
    assert peak_bytes(found, load=load) < all_keep
    assert kept(KeepRows(1, all_keep - 1)(plain())) == LAYERS


def test_a_layer_that_is_recomputed_keeps_nothing() -> None:
    """A layer whose input is recomputed in the backward keeps no rows."""
    phased = replace(plain(), backward=copy_of(plain().backward))
    first, _ = calls(phased.backward, kernels.exchanged_experts_backward)
    tokens: Any = first.args[1]
    tokens.all_input_nodes[0].meta["phase"] = PHASE
    assert kept(KeepRows(1, ROOMY)(phased)) == LAYERS - 1


Args = list[Any]
WRONG: dict[str, Callable[[Args, Args], Args]] = {
    "what another layer keeps": lambda mine, other: [*mine[:6], *other[6:9], *mine[9:]],
    "another layer's rows": lambda mine, other: [*mine[:6], other[6], *mine[7:]],
    "another layer's products": lambda mine, other: [*mine[:7], other[7], *mine[8:]],
    "another layer's counts": lambda mine, other: [*mine[:8], other[8], *mine[9:]],
    "products for rows": lambda mine, other: [*mine[:6], mine[7], mine[6], *mine[8:]],
    "other tokens' experts": lambda mine, other: [mine[0], other[1], *mine[2:]],
    "other weights": lambda mine, other: [*mine[:2], other[2], *mine[3:]],
    "other first matrices": lambda mine, other: [*mine[:3], other[3], *mine[4:]],
    "other last matrices": lambda mine, other: [*mine[:5], other[5], *mine[6:]],
    "another activation": lambda mine, other: [*mine[:10], "gelu", *mine[11:]],
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", range(LAYERS))
def test_a_wrong_pair_is_refused(wrong: str, place: int) -> None:
    """A backward call with a wrong operand, such as the rows of the other layer, is refused."""
    right = KeepRows(1, ROOMY)(plain())
    phased = replace(right, backward=copy_of(right.backward))
    layers = calls(phased.backward, kernels.exchanged_experts_kept_backward)
    mine, other = layers[place], layers[1 - place]
    mine.args = tuple(WRONG[wrong](list(mine.args), list(other.args)))
    with pytest.raises(VerificationError):
        verify_phases(phased)


def test_rows_of_other_tokens_are_refused() -> None:
    """A forward call that keeps the rows of another layer's tokens is refused."""
    right = KeepRows(1, ROOMY)(plain())
    phased = replace(right, forward=copy_of(right.forward))
    first, second = calls(phased.forward, kernels.exchanged_experts_keeping)
    second.args = (first.args[0], *second.args[1:])
    with pytest.raises(VerificationError):
        verify_phases(phased)


@pytest.mark.parametrize("seed", range(20))
def test_values_that_are_exchanged_on_their_way_are_refused(seed: int) -> None:
    """Phases are refused if two values are exchanged between the phase that keeps and the phase that reads them."""
    found = mutate(KeepRows(1, ROOMY)(plain()), Place.PHASES, "exchange_kept", Random(seed))
    if found is not None:
        with pytest.raises(VerificationError):
            verify_phases(found.phased)
