"""The table of rules admits what brute force finds valid: a part of `python -m tests.benchmarks.rule_completeness`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.benchmarks.rule_completeness import AXIS_SIZE, Count, count_calls, counts_by_operator, summarise
from tests.rules.dtensor_rules import admitted_outputs, fake_mesh
from tests.rules.recording import Call, database_calls, even_samples, is_functional, tensor

aten = torch.ops.aten

# fmt: off
_SAMPLED = [
    "add", "amax", "any", "baddbmm", "cat", "clamp", "cumsum", "div", "exp", "flip", "gather", "index_add",
    "index_select", "maximum", "mean", "mul", "neg", "nn.functional.embedding", "nn.functional.linear",
    "nn.functional.relu", "nn.functional.softmax", "permute", "prod", "sum", "tril", "where",
]
# fmt: on


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(AXIS_SIZE) as mesh:
        yield mesh


@pytest.mark.filterwarnings("ignore")
def test_most_valid_placements_are_admitted(mesh: DeviceMesh) -> None:
    """At least 95 % on a part of PyTorch's samples, in this process: these operators check their indices."""
    with even_samples():
        calls = [call for _, call in database_calls(_SAMPLED, 1, is_functional)]
    count = count_calls(calls, mesh)
    assert count.valid > 300
    assert count.ours >= 0.95 * count.valid, count.missed
    assert 0 < count.dtensors < count.valid


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_most_valid_placements_of_all_operators_are_admitted(mesh: DeviceMesh) -> None:
    """The same over everything that PyTorch's samples call."""
    summary = summarise(dict(counts_by_operator(None, 2, mesh)))
    assert summary.operators > 400
    assert summary.ours >= 0.95 * summary.valid, summary


def test_missed_placements_are_named(mesh: DeviceMesh) -> None:
    """A call without a rule counts what it misses, and the reason why one is not judged."""
    x = tensor(4, 6)
    count = count_calls([Call(aten.logdet.default, (tensor(2, 2),), {}), Call(aten.rand_like.default, (x,), {})], mesh)
    assert count.not_judged == {"is random.": 1}
    count = Count()
    count.add(Call(aten.tril_indices.default, (3, 3), {}), mesh)
    assert count.not_judged == {"is called without a tensor.": 1}


def test_dtensors_rules_are_asked(mesh: DeviceMesh) -> None:
    """DTensor's rules say how results lie, that an operand would move, and that there is no rule."""
    a, b = tensor(4, 6), tensor(6, 4)
    shard, whole = Shard(0), Replicate()
    assert admitted_outputs(aten.mm.default, (a, b), {}, (shard, whole), mesh) == (Shard(0),)
    assert admitted_outputs(aten.mm.default, (a, b), {}, (shard, shard), mesh) is None
    assert admitted_outputs(aten.add.Tensor, (a, a), {}, (Partial("sum"),) * 2, mesh) == (Partial("sum"),)
    assert admitted_outputs(aten.unbind.int, (a,), {}, (Shard(1),), mesh) == (Shard(0),) * 4
    assert admitted_outputs(aten.logdet.default, (tensor(4, 4),), {}, (shard,), mesh) is None
