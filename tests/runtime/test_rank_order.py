"""Reductions on Gloo add in the order of ranks, and send no more bytes than needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard.ir.mesh import Mesh
from autoshard.runtime.distributed import DistributedEngine
from autoshard.runtime.rank_order import SMALL_BYTES, reduce_in_rank_order
from autoshard.runtime.simulator import simulate
from tests.runtime.processes import report, run_checks

_c10d = torch.ops._c10d_functional
REDUCTIONS = ("sum", "max", "min", "product")


def reducing(target: Any, *args: Any, known: Tensor | None = None) -> fx.GraphModule:
    """Return a program that starts a reduction of its first input, doubles its second twice, and waits."""
    graph = fx.Graph()
    value, other = graph.placeholder("value"), graph.placeholder("other")
    value.meta["val"] = known
    started = graph.call_function(target, (value, *args))
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (other, 2))
    again = graph.call_function(torch.ops.aten.mul.Tensor, (doubled, 2))
    graph.output((graph.call_function(_c10d.wait_tensor.default, (started,)), again))
    return fx.GraphModule(nn.Module(), graph)


def values(size: int, dtype: torch.dtype = torch.float32, *shape: int) -> list[Tensor]:
    """Return a value for each rank; the bits of their sum depend on the order."""
    drawn = torch.randn(size, *shape, generator=torch.Generator().manual_seed(0)) * 100
    return list(drawn.to(dtype).unbind(0))


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    """Return whether shapes and bits are equal; zeros of different signs are different."""
    return found.shape == wanted.shape and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (found, wanted)))


def engine() -> DistributedEngine:
    size = dist.get_world_size()
    return DistributedEngine(init_device_mesh("cpu", (size,), mesh_dim_names=("data",)))


def check_bits_are_the_simulators() -> None:
    """Each reduction of each type has the simulator's bits, for small, large and uneven shapes."""
    size, rank, here = dist.get_world_size(), dist.get_rank(), engine()
    for reduction in REDUCTIONS:
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((4 * size, 5), (2 * size, SMALL_BYTES), (7, 3), ()):
                mine, other = values(size, dtype, *shape), torch.ones(2)
                programs = [reducing(_c10d.all_reduce.default, reduction, "data", known=mine[0])]
                if shape and shape[0] % size == 0:
                    programs.append(reducing(_c10d.reduce_scatter_tensor.default, reduction, size, "data"))
                for program in programs:
                    wanted = simulate(program, here.mesh, [mine, [other] * size])
                    found = here.load(program)([mine[rank], other])
                    assert same_bits(found[0], wanted[0][rank]), (reduction, dtype, shape)


def check_bits_do_not_depend_on_the_bucket() -> None:
    """The bits of a sum are the same for a tensor alone and within a larger tensor."""
    size, rank, here = dist.get_world_size(), dist.get_rank(), engine()
    alone, before, behind = (values(size, torch.float32, count)[rank] for count in (10007, 337, 5000))
    program = reducing(_c10d.all_reduce.default, "sum", "data")
    other = torch.ones(1)
    (found, _), (bucket, _) = (
        here.load(program)([value, other]) for value in (alone, torch.cat([before, alone, behind]))
    )
    assert same_bits(found, bucket[337 : 337 + 10007])


def check_bytes() -> None:
    """A reduce-scatter writes its input's bytes once, less the rank's own part, and an all-reduce twice."""
    size, here = dist.get_world_size(), engine()
    value = torch.ones(size * 2**17)
    halves = {_c10d.reduce_scatter_tensor.default: ("sum", size, "data"), _c10d.all_reduce.default: ("sum", "data")}
    for count, (target, args) in enumerate(halves.items(), 1):
        run = here.load(reducing(target, *args))
        run([value, value])
        dist.barrier()
        before = written_bytes()
        run([value, value])
        sent = written_bytes() - before
        assert sent == pytest.approx(count * value.nbytes * (size - 1) / size, rel=0.01)


def written_bytes() -> int:
    """Return the bytes that this process has written, to sockets too."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def check_a_nan_of_any_rank_is_kept() -> None:
    """Maximum and minimum are NaN if any rank has a NaN, for small and large tensors."""
    size, rank, here = dist.get_world_size(), dist.get_rank(), engine()
    for reduction in ("max", "min"):
        for shape in ((3,), (2 * SMALL_BYTES,)):
            program = reducing(_c10d.all_reduce.default, reduction, "data", known=torch.ones(shape))
            for holder in range(size):
                value = torch.full(shape, torch.nan if rank == holder else 1.0)
                assert here.load(program)([value, torch.ones(1)])[0].isnan().all(), (reduction, shape, holder)


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        check_bits_are_the_simulators,
        check_bits_do_not_depend_on_the_bucket,
        check_a_nan_of_any_rank_is_kept,
        check_bytes,
    )
}


@pytest.fixture(scope="module", params=[2, 3, 4])
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    return run_checks(CHECKS, ranks=request.param)


@pytest.mark.parametrize("name", CHECKS)
def test_on_processes(outcomes: dict[str, str], name: str) -> None:
    """The check passes on two, three and four processes."""
    report(outcomes, name)


def called(program: fx.GraphModule, size: int) -> list[str]:
    """Return the names of calls in the program that reduces in rank order, without calls for shapes."""
    graph = reduce_in_rank_order(program, Mesh({"data": size})).graph
    nodes = [node for node in graph.nodes if node.op == "call_function" and "_shape_of" not in node.name]
    names = [node.name.rstrip("0123456789").rstrip("_") for node in nodes]
    return [name.removesuffix("_default").removesuffix("_tensor") for name in names]


def test_what_is_sent_is_issued_at_the_start() -> None:
    """Messages start where the reduction starts, so that the work before its wait hides them."""
    scatter = reducing(_c10d.reduce_scatter_tensor.default, "sum", 2, "data")
    assert called(scatter, 2) == ["_rows", "all_to_all_single", "mul", "mul", "wait", "_reduce"]
    whole = reducing(_c10d.all_reduce.default, "sum", "data")
    assert called(whole, 2) == ["all_reduce", "mul", "mul", "wait"]
    assert called(whole, 3) == [
        *("_rows", "all_to_all_single", "mul", "wait", "_reduce", "all_gather_into"),
        *("mul", "wait", "_joined"),
    ]
    small = reducing(_c10d.all_reduce.default, "sum", "data", known=torch.ones(()))
    assert called(small, 3) == ["_flat", "all_gather_into", "mul", "mul", "wait", "_reduce"]


def test_orders_that_do_not_matter_are_left() -> None:
    """A maximum of integers stays Gloo's all-reduce; one of floats is rewritten, to keep NaN."""
    for kind, first in ((torch.int32, "all_reduce"), (torch.float32, "_flat")):
        program = reducing(_c10d.all_reduce.default, "max", "data", known=torch.ones(3, dtype=kind))
        assert called(program, 4)[0] == first
