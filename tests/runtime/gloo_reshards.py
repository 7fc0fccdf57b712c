"""Compare reshards on two Gloo processes with the simulator."""

from itertools import product

import torch
from torch.distributed.device_mesh import init_device_mesh

from autoshard.ir.boundary import shard_all
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P, PartitionSpec, Reduction
from autoshard.runtime.distributed import DistributedEngine, reshard_program
from autoshard.runtime.simulator import simulate

MESH = Mesh({"data": 2})
WHOLE = (P("data"), P(None, "data"), P())
PARTIAL = tuple(P(partial={"data": reduction}) for reduction in Reduction)
ORDERED = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
)  # fmt: skip
UNORDERED = (torch.complex64, torch.float8_e4m3fn, torch.uint16)


def compare(engine: DistributedEngine, source: PartitionSpec, target: PartitionSpec, dtype: torch.dtype) -> None:
    """Check that one reshard on Gloo gives the simulator's bits, at an even and an uneven shape."""
    for shape in ((3, 5), (4, 4)):
        value = torch.arange(shape[0] * shape[1]).reshape(shape).remainder(7).to(dtype)
        inputs, program = shard_all(value, source, MESH), reshard_program(source, target, shape, dtype, MESH)
        expected = simulate(program, MESH, [inputs])[0][engine.groups.rank]
        (found,) = engine.load(program)([inputs[engine.groups.rank]])
        assert found.dtype == expected.dtype
        assert found.is_contiguous()
        same = torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))
        assert same, (source, target, dtype, shape, found, expected)


def check_reshards() -> None:
    """Check every pair of specs for every element type; types without an order have no partial specs."""
    engine = DistributedEngine(init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.axis_names))
    for dtype in ORDERED:
        for source, target in product((*WHOLE, *PARTIAL), repeat=2):
            compare(engine, source, target, dtype)
    for dtype in UNORDERED:
        for source, target in product(WHOLE, repeat=2):
            compare(engine, source, target, dtype)
