"""Updates of optimizers as data, and whether a program of one update serves another."""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.update import Update, UpdateGroup, UpdateRule, parameter_of, state_slot

PLAIN = UpdateRule("sgd_update", (), (False,), ("lr",))
HEAVY = UpdateRule("momentum_update", ("momentum_buffer",), (False, False), ("lr",))
UPDATE = Update("SGD", (UpdateGroup(PLAIN, ("a", "b")), UpdateGroup(HEAVY, ("c",))), 1.0)


def test_a_program_serves_updates_that_group_alike() -> None:
    """A program serves an update unless the update separates parameters with gradients that the
    program's groups join."""
    finer = replace(UPDATE, groups=(UpdateGroup(PLAIN, ("a",)), UpdateGroup(PLAIN, ("b",)), UPDATE.groups[1]))
    assert UPDATE.serves(UPDATE, {"a", "b", "c"})
    assert finer.serves(UPDATE, {"a", "b", "c"})
    assert not UPDATE.serves(finer, {"a", "b", "c"})
    assert UPDATE.serves(finer, {"a", "c"})


def test_a_program_serves_no_other_update() -> None:
    """A program of an update refuses an update with another limit, optimizer, rule or set of parameters."""
    names = {"a", "b", "c"}
    assert not UPDATE.serves(replace(UPDATE, max_grad_norm=None), names)
    assert not UPDATE.serves(replace(UPDATE, optimizer="Adam"), names)
    assert not UPDATE.serves(replace(UPDATE, groups=(UpdateGroup(HEAVY, ("a", "b")), UPDATE.groups[1])), names)
    assert not UPDATE.serves(replace(UPDATE, groups=UPDATE.groups[:1]), names)
    assert not replace(UPDATE, groups=UPDATE.groups[:1]).serves(UPDATE, names)


def test_slots_of_state_name_their_parameter() -> None:
    """The slot of a state is the state's name, a colon, and the parameter's name."""
    assert state_slot("exp_avg", "layers.0.weight") == "exp_avg:layers.0.weight"
    assert parameter_of("exp_avg:layers.0.weight") == "layers.0.weight"
