"""`enumerate_strategies` lists the strategies that a rule allows on a mesh."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.notation import Rule, bind
from autoshard.testing.strategies import meshes

_PRODUCT = bind(Rule("m k, k n -> m n", reduce={"k": "sum"}, linear=[(0,), (1,)]), [(4, 4), (4, 4)], [(4, 4)])


@given(meshes(max_axes=2))
def test_the_replicated_strategy_is_first(mesh: Mesh) -> None:
    """The first strategy of a product is fully replicated, and every strategy splits dims evenly."""
    found = enumerate_strategies(_PRODUCT, mesh)
    assert all(spec.is_fully_replicated for spec in (*found[0].inputs, *found[0].outputs))
    for strategy in found:
        assert all(spec.is_even((4, 4), mesh) for spec in (*strategy.inputs, *strategy.outputs))


def test_axes_act_independently() -> None:
    """On two axes, a product has two split dims, a dim split twice, a split beside a sum, or a sum over both axes."""
    outputs = {s.outputs[0] for s in enumerate_strategies(_PRODUCT, Mesh({"a": 2, "b": 2}))}
    assert {P("a", "b"), P(("a", "b")), P("a", partial={"b": "sum"}), P(partial={"a": "sum", "b": "sum"})} <= outputs


def test_a_minor_factor_waits_for_the_major_ones() -> None:
    """The second factor of a dim is split only if the first factor is split into single elements."""
    rule = bind(Rule("(a b) -> a b", sizes={"a": 2}), [(8,)], [(2, 4)])
    found = {s.outputs[0] for s in enumerate_strategies(rule, Mesh({"x": 2, "y": 2}))}
    assert found == {P(), P("x"), P("y"), P("x", "y"), P("y", "x")}


def test_pending_reductions_do_not_mix() -> None:
    """No result has two kinds of pending reduction, because a maximum of sums is not a sum of maxima."""
    rule = bind(Rule("r c -> c", reduce={"r": "max"}, linear=[(0,)]), [(4, 4)], [(4,)])
    found = enumerate_strategies(rule, Mesh({"a": 2, "b": 2}))
    assert all(len({reduction for _, reduction in s.outputs[0].partial}) <= 1 for s in found)


def test_addends_are_pending_where_a_factor_is_reduced() -> None:
    """If the contracted factor of a product is split, the addend must be a pending sum."""
    rule = bind(Rule("n, m k, k n -> m n", reduce={"k": "sum"}, added=(0,)), [(4,), (4, 4), (4, 4)], [(4, 4)])
    found = {s.inputs[1]: s.inputs[0] for s in enumerate_strategies(rule, Mesh({"a": 2}))}
    assert found[P(None, "a")] == P(partial={"a": "sum"})


def test_results_that_do_not_depend_on_a_factor_stay_whole() -> None:
    """If a reduced factor is split, a result that does not depend on the factor stays whole, and is no pending sum."""
    rule = bind(Rule("r c -> r, r", reduce={"c": "sum"}, whole={"c": (1,)}), [(4, 4)], [(4,), (4,)])
    split = next(s for s in enumerate_strategies(rule, Mesh({"a": 2})) if s.inputs[0] == P(None, "a"))
    assert split.outputs == (P(partial={"a": "sum"}), P())


def test_padding_leaves_pending_sums_as_they_are() -> None:
    """An uneven split beside a pending sum is possible if padding is filled with zeros, and not with ones."""
    rule = bind(Rule("n -> n", linear=[(0,)]), [(3,)], [(3,)])
    zeros, ones = (replace(rule, padding={"n": (fill,)}) for fill in (0, 1))
    padded = [{s.outputs[0] for s in enumerate_strategies(each, Mesh({"a": 2, "b": 2}))} for each in (zeros, ones)]
    sums = P("a", partial={"b": "sum"})
    assert [sums in found for found in padded] == [True, False]
