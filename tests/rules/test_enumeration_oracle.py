"""`find_valid_placements` finds all valid placements of a call, and no placement by chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.rules.oracle import NotJudgedError, ValidPlacement, find_valid_placements

aten = torch.ops.aten

_X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
_ROW = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _found(op: Any, *args: Any, **options: Any) -> set[str]:
    """The found placements as text, such as `S0 R > Pmax`, with one label for each result."""
    return {
        f"{' '.join(map(_short, valid.inputs[0]))} > {' '.join(min(map(_short, labels)) for labels in valid.outputs)}"
        for valid in find_valid_placements(op, args, {}, **options)
    }


def _short(place: Placement) -> str:
    if isinstance(place, Partial):
        return f"P{place.reduce_op}"
    return f"S{place.dim}" if isinstance(place, Shard) else "R"


def _name(parameter: Any) -> str:
    """Return the operator's name as id, because other parts are random and test workers must agree."""
    return str(parameter) if isinstance(parameter, torch._ops.OpOverload) else ""


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.mv.default, (_X, _ROW), {"S0 R > S0", "S1 S0 > Psum", "Psum R > Psum", "R Psum > Psum"}),
        (aten.sin.default, (_X,), {"S0 > S0", "S1 > S1"}),
        (aten.relu.default, (_X,), {"S0 > S0", "S1 > S1"}),
        (aten.neg.default, (_X,), {"S0 > S0", "S1 > S1", "Psum > Psum"}),
        (aten.amax.default, (_X, [0]), {"S0 > Pmax", "S1 > S0"}),
        (aten.mean.dim, (_X, [0]), {"S0 > Pavg", "S1 > S0", "Psum > Psum"}),
        (aten.cumsum.default, (_X, 0), {"S1 > S1", "Psum > Psum"}),
        (aten.sort.default, (_X, 0), {"S1 > S1 S1"}),
    ],
    ids=_name,
)
def test_what_is_valid_is_found(op: Any, args: tuple[Any, ...], expected: set[str]) -> None:
    """The search finds exactly the placements under which the unchanged operator is right."""
    assert _found(op, *args) == expected


def test_masks_are_redrawn() -> None:
    """A mask that is false everywhere in the sample is drawn anew, so that both operands of `where` matter."""
    nowhere = torch.zeros(4, 6, dtype=torch.bool)
    assert "R R Psum > Psum" not in _found(aten.where.self, nowhere, _X, _X)
    assert "R Psum Psum > Psum" in _found(aten.where.self, nowhere, _X, _X)


def _valid(*labels: Placement) -> ValidPlacement:
    return ValidPlacement(((Shard(0),), (Shard(1),)), (frozenset(labels),))


def test_a_rewritten_average_is_a_sum() -> None:
    """A pending sum is admitted in place of a pending average, but not if the pieces are copies too."""
    assert _valid(Partial("avg")).is_admitted_by([((Shard(0),), (Partial("sum"),))])
    assert not _valid(Partial("avg"), Replicate()).is_admitted_by([((Shard(0),), (Partial("sum"),))])


@pytest.mark.parametrize(
    ("op", "args", "reason"),
    [
        (aten.rand_like.default, (_X,), "is random"),
        (aten.add_.Tensor, (_X, _X), "writes to an operand"),
        (aten.relu.default, (torch.zeros(0, 4),), "empty tensor"),
        (aten.ones.default, ([2, 2],), "without a tensor"),
        (aten.empty_like.default, (_X,), "does not say"),
        (aten.mul.Scalar, (_X, float("nan")), "finite"),
        (aten.equal.default, (_X, _X), "gives no tensor"),
        (aten.relu.default, (_X.to_sparse(),), "sparse"),
        (aten.mv.default, (_X, _X), "refuses"),
    ],
    ids=_name,
)
def test_what_is_not_judged(op: Any, args: tuple[Any, ...], reason: str) -> None:
    """A call that the search cannot judge, such as a random or empty call, raises `NotJudgedError` with the reason."""
    with pytest.raises(NotJudgedError, match=reason):
        find_valid_placements(op, args, {})
