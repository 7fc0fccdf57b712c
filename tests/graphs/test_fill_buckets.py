"""Members of a bucket are computed directly in the bucket's memory, with the bits of a packed bucket."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from autoshard.graphs.fill_buckets import fill_buckets, members_of
from autoshard.ir.collectives import reduces_in_place
from autoshard.ir.mesh import Mesh
from autoshard.runtime.simulator import simulate
from passes.memory.lowered_memory import peak_bytes
from passes.memory.storages import Storages
from passes.verification.verify_in_place import verify_in_place
from tests.passes.lowering.overlapped import calls, differ, plain
from tests.passes.overlap_mutants import in_buckets

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
RANKS = Mesh({"x": 2})
SIZES = {"x": (8, 16), "y": (8, 32), "z": (8, 5)}


def bucket_of(*members: str, rows: int = 0) -> fx.GraphModule:
    """A graph that reduces some members in one bucket. With `rows`, the members are scattered by rows."""
    graph: Any = fx.Graph()
    call = graph.call_function
    given = {name: graph.placeholder(name) for name in SIZES}
    turned = call(aten.t.default, (given["x"],))
    made = {
        "product": lambda: call(aten.contiguous.default, (call(aten.mm.default, (turned, given["y"])),)),
        "sum": lambda: call(aten.view.default, (call(aten.sum.dim_IntList, (given["x"], [0], True)), [16])),
        "turned": lambda: call(aten.contiguous.default, (call(aten.t.default, (call(aten.exp.default, (turned,)),)),)),
        "odd": lambda: call(aten.sum.dim_IntList, (given["z"], [0])),
        "given": lambda: given["z"],
        "total": lambda: call(aten.add.Tensor, (given["y"], given["y"])),
    }
    values = [made[name]() for name in members]
    read = [call(aten.mul.Tensor, (values[0], 2))] if members[0] == "total" else []
    shape, dims = ([rows, -1], (1,)) if rows else ([-1], ())
    packed = call(aten.cat.default, ([call(aten.view.default, (value, shape)) for value in values], *dims))
    if rows:
        started = call(c10d.reduce_scatter_tensor.default, (packed, "sum", rows, "x"))
    else:
        started = call(c10d.all_reduce.default, (packed, "sum", "x"))
    graph.output((call(c10d.wait_tensor.default, (started,)), *read))
    module = fx.GraphModule(nn.Module(), graph)
    with FakeTensorMode() as mode:
        FakeTensorProp(module, mode).propagate(*(torch.empty(size) for size in SIZES.values()))
    return module


def results_of(module: fx.GraphModule) -> list[Tensor]:
    """The results of a graph on two ranks."""
    torch.manual_seed(0)
    given = [[torch.randn(size) for _ in range(2)] for size in SIZES.values()]
    return [value for ranks in simulate(module, RANKS, given) for value in ranks]


CASES = {
    "products and sums": (("product", "sum"), 0),
    "behind an odd one": (("sum", "odd", "product"), 0),
    "not in order": (("turned", "product"), 0),
    "given": (("given", "product", "given"), 0),
    "read elsewhere": (("total", "product"), 0),
    "scattered": (("product", "total"), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_filled_bucket_holds_the_same_bits(case: str) -> None:
    """A bucket whose members are computed in place holds the bits of a packed bucket, and the change is proven."""
    names, rows = CASES[case]
    module = bucket_of(*names, rows=rows)
    made = fill_buckets(module)
    assert "aten.cat.default" not in calls(made)
    verify_in_place(module, made, {})
    for one, other in zip(results_of(made), results_of(module), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("case", "computed"),
    [
        ("products and sums", [True, True]), ("behind an odd one", [True, True, False]),
        ("read elsewhere", [False, True]), ("scattered", [False, False]),
    ],
)  # fmt: skip
def test_what_can_be_is_computed_in_its_place(case: str, computed: list[bool]) -> None:
    """A member that is read elsewhere, is scattered, or would be unaligned in the bucket is copied, and any other
    member is computed there."""
    names, rows = CASES[case]
    module = bucket_of(*names, rows=rows)
    (packed,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert [member.computed is not None for member in members_of(packed)] == computed
    assert calls(fill_buckets(module)).count("aten.copy_.default") == computed.count(False)


def test_what_a_graph_is_only_given_is_packed() -> None:
    """A bucket whose members are all inputs of the graph stays packed."""
    module = bucket_of("given", "given")
    assert fill_buckets(module) is module


def test_a_filled_bucket_takes_memory_once() -> None:
    """A packed bucket takes its memory twice, and a bucket filled in place takes it once."""
    module = bucket_of("product", "sum")
    made = fill_buckets(module)
    peaks = []
    for item in (module, made):
        memory = Storages()
        memory.run(item.graph, [memory.new(0) for _ in SIZES])
        peaks.append(memory.peak)
    sent = (16 * 32 + 16) * 4
    assert peaks == [2 * sent, sent]
    (started,) = made.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    assert reduces_in_place(started)


@pytest.mark.parametrize(("family", "layout"), [("lstm", "data"), ("gpt", "tensor"), ("gpt", "ZeRO-3")])
def test_backwards_of_models_fill_their_buckets(family: str, layout: str) -> None:
    """Backwards of models with filled buckets give the same results, are proven, and have the peak
    that was predicted."""
    phased = in_buckets(plain(family, layout))
    made = replace(phased, backward=fill_buckets(phased.backward))
    assert "aten.new_empty.default" in calls(made.backward)
    verify_in_place(phased.backward, made.backward, {})
    assert differ(family, layout, made) == []
    assert peak_bytes(made) == peak_bytes(phased)
