"""Recipes' axes follow from how values are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from torch import nn

from autoshard.ir.program import InputKind
from autoshard.ir.spec import P
from passes.search.layers.fold_program import FoldedProgram
from passes.search.layers.propagate_axis import AXIS, AxisLayout, MoveKind, Policy, axis_space, propagate_axis
from tests.passes.decoders import dense, folded, sparse


@pytest.fixture(scope="module")
def program() -> FoldedProgram:
    """A dense decoder."""
    return folded(dense())


def _context(program: FoldedProgram) -> AxisLayout:
    inputs = {slot.node: P(None, AXIS) for slot in program.single.inputs_of(InputKind.INPUT)}
    return propagate_axis(axis_space(program.single), Policy(inputs=inputs))


def _block_moves(program: FoldedProgram, layout: AxisLayout) -> Counter[tuple[str, str]]:
    nodes = program.single.nodes_by_name()
    return Counter(
        (nodes[move.reader].meta["phase"], move.kind.value)
        for move in layout.moves
        if program.layer_of.get(move.reader) == "layers:0"
    )


def _parameters(program: FoldedProgram, layout: AxisLayout) -> dict[str, P]:
    slots = program.single.inputs_of(InputKind.PARAMETER)
    return {slot.name: layout.results[slot.node][0] for slot in slots}


def test_tensor_parallelism_alternates_columns_and_rows(program: FoldedProgram) -> None:
    """Weights [out, in] are split by rows before attention and activation, and by columns behind; norms are whole."""
    layout = propagate_axis(axis_space(program.single), Policy(splits_parameters=True))
    found = _parameters(program, layout)
    assert found["layers.1.mixed.weight"] == found["layers.1.wide.weight"] == P(AXIS)
    assert found["layers.1.mixed.bias"] == P(AXIS)
    assert found["layers.1.back.weight"] == found["layers.1.narrow.weight"] == P(None, AXIS)
    assert found["layers.1.back.bias"] == found["layers.1.one.weight"] == P()
    assert found["words.weight"] == P(AXIS)
    assert found["places.weight"] == P()


def test_tensor_parallelism_reduces_twice_each_way(program: FoldedProgram) -> None:
    """Megatron's f and g: two all-reduces in a block's forward, two in its backward, nothing else."""
    layout = propagate_axis(axis_space(program.single), Policy(splits_parameters=True))
    assert _block_moves(program, layout) == {("forward", "reduce"): 2, ("backward", "reduce"): 2}


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_sequence_parallelism_scatters_and_gathers(norm: Callable[[int], nn.Module]) -> None:
    """Sequence parallelism replaces each all-reduce by a reduce-scatter and an all-gather, also in the backward.

    Norms stay split along the sequence, although their rule allows the hidden dim.
    """
    program = folded(dense(norm=norm))
    policy = Policy(splits_parameters=True, sequence=_context(program))
    layout = propagate_axis(axis_space(program.single), policy)
    moves = _block_moves(program, layout)
    assert moves["forward", "gather"] == moves["forward", "scatter"] == 2
    assert moves["backward", "scatter"] == 2
    assert moves["backward", "gather"] == 4
    assert not moves["forward", "reduce"]
    assert not moves["forward", "exchange"]


def test_context_parallelism_gathers_keys_and_values(program: FoldedProgram) -> None:
    """Splitting the sequence moves nothing but attention's keys, values, and their gradients."""
    moves = _block_moves(program, _context(program))
    assert moves["forward", "gather"] == 2
    assert not moves["forward", "reduce"]


def test_experts_are_exchanged_on_the_way_in_and_out() -> None:
    """Splitting stacks of weights sends tokens there and back, forward and backward."""
    program = folded(sparse())
    stacks = [
        slot.node for slot in program.single.inputs_of(InputKind.PARAMETER) if slot.name.endswith((".up", ".down"))
    ]
    layout = propagate_axis(
        axis_space(program.single), Policy(parameters=dict.fromkeys(stacks, P(AXIS)), exchanges=True)
    )
    nodes = program.single.nodes_by_name()
    large = [
        nodes[move.reader].meta["phase"]
        for move in layout.moves
        if program.layer_of.get(move.reader) == "layers:1" and move.kind is MoveKind.EXCHANGE
    ]
    assert large.count("forward") == 2
    assert large.count("backward") >= 2
