"""The engine of `torch.distributed` on four Gloo processes."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader

import autoshard
from autoshard import P
from autoshard.data import sampler
from autoshard.errors import MeshError, RankMismatchError
from autoshard.ir.mesh import Mesh
from autoshard.runtime.distributed import DistributedEngine
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.launch import make_engine
from autoshard.runtime.process_groups import ProcessGroups, bind
from autoshard.runtime.sharded_module import ShardedModule
from tests.end_to_end.training import whole
from tests.runtime.processes import checked_once, report

funcol = torch.ops._c10d_functional
WIDTH, HIDDEN = 3, 6
MEGATRON = {"first.weight": P("model"), "second.weight": P(None, "model"), "input:*": P("data"), "output:1": P("data")}


class TwoLayers(nn.Module):
    """A model that returns the loss and output of `second(first(x))`, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.register_buffer("calls", torch.zeros(()))
        self.config = {"hidden": HIDDEN}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        y = self.second(self.first(x))
        return y.square().sum(), y


def device_mesh(shape: tuple[int, int] = (2, 2)) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))


def pair(shape: tuple[int, int] = (2, 2)) -> tuple[TwoLayers, ShardedModule]:
    """Return a model and a compiled copy, with hidden values split over "model" and the batch over "data"."""
    torch.manual_seed(0)
    plain = TwoLayers()
    return plain, autoshard.compile(copy.deepcopy(plain), device_mesh(shape), constraints=MEGATRON)


def batch(size: int = 4) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1))


def assert_same_gradients(plain: nn.Module, sharded: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).grad.full_tensor(), parameter.grad)


def check_each_purpose_has_its_communicator() -> None:
    """Each purpose has its own process group, made once, of the same ranks in the same order."""
    groups = ProcessGroups(device_mesh())
    names = ["data", "data/gradients", "data/parameters", "data,model/gradients"]
    found = [groups.name(name) for name in names]
    assert len({*found, groups.name("model")}) == 5
    assert [groups.name(name) for name in names] == found
    for name in found[:3]:
        result = funcol.wait_tensor.default(funcol.all_gather_into_tensor.default(torch.tensor([groups.rank]), 2, name))
        assert result.tolist() == [groups.rank % 2, groups.rank % 2 + 2]


def check_loss_and_gradients() -> None:
    """Loss, output, gradients and buffers equal one device, also with sizes that ranks do not divide."""
    for shape, size in (((2, 2), 4), ((2, 2), 5), ((4, 1), 5), ((1, 4), 4)):
        plain, sharded = pair(shape)
        x = batch(size).requires_grad_()
        x_sharded = batch(size).requires_grad_()
        (loss, y), (loss_sharded, y_sharded) = plain(x), sharded(x_sharded)
        assert not isinstance(loss_sharded, DTensor)
        torch.testing.assert_close(loss_sharded, loss)
        torch.testing.assert_close(whole(y_sharded), y.detach())
        loss.backward()
        loss_sharded.backward()
        assert_same_gradients(plain, sharded)
        torch.testing.assert_close(x_sharded.grad, x.grad)
        torch.testing.assert_close(sharded.calls, plain.calls)


def check_parameters_are_sharded_dtensors() -> None:
    plain, sharded = pair()
    before = dict(sharded.named_parameters())
    sharded(batch())
    weight = sharded.first.weight
    assert list(sharded.state_dict()) == list(plain.state_dict())
    assert before["first.weight"] is weight
    assert weight.placements == (Replicate(), Shard(0))
    assert weight.to_local().shape == (3, WIDTH)
    assert weight.to_local().untyped_storage().nbytes() == weight.to_local().nbytes
    torch.testing.assert_close(weight.full_tensor(), plain.first.weight)
    assert sharded.config == {"hidden": 6}


def check_accumulation_retain_graph_and_late_outputs() -> None:
    plain, sharded = pair()
    for model in (plain, sharded):
        loss, y = model(batch())
        loss.backward(retain_graph=True)
        loss.backward()
        loss, y = model(batch())
        (0.5 * loss + (y**3).sum()).backward()
    assert_same_gradients(plain, sharded)


def check_dtensor_input_and_sharded_output() -> None:
    plain, sharded = pair()
    x = distribute_tensor(batch(), sharded._engine.device_mesh, [Replicate(), Shard(1)], src_data_rank=None)
    x.requires_grad_()
    y_plain = plain(batch())[1]
    loss, y = sharded(x)
    assert isinstance(y, DTensor)
    assert y.placements == (Shard(0), Replicate())
    torch.testing.assert_close(y.full_tensor(), y_plain)
    loss.backward()
    assert isinstance(x.grad, DTensor)
    assert x.grad.placements == x.placements


def check_a_rank_loads_its_rows_alone() -> None:
    """Rows that each rank's sampler loads, as one DTensor, give loss and output of the whole batch."""
    plain, sharded = pair()
    sharded(batch())
    dataset = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(2))
    rows = sampler(dataset, sharded, seed=3)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    assert rows.batch_size == 2
    place = dist.get_rank() // 2
    assert list(rows) == [*order[2 * place : 2 * place + 2].tolist(), *order[4 + 2 * place : 6 + 2 * place].tolist()]
    loader = DataLoader(dataset, batch_size=rows.batch_size, sampler=rows)  # type: ignore[arg-type]
    for number, local in enumerate(loader):
        given = rows.whole(local)
        assert given.placements == (Shard(0), Replicate())
        loss, y = sharded(given)
        expected, y_plain = plain(dataset[order[4 * number : 4 * number + 4]])
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(whole(y), y_plain.detach())


def check_groups_over_several_axes() -> None:
    """A graph bound to a rank can all-reduce over a group of two mesh axes."""
    engine = DistributedEngine(device_mesh())
    graph = fx.Graph()
    x = graph.placeholder("x")
    c10d = torch.ops._c10d_functional
    both = graph.call_function(c10d.all_reduce.default, (x, "sum", "data,model"))
    graph.output((graph.call_function(c10d.wait_tensor.default, (both,)),))
    bound = bind(fx.GraphModule(nn.Module(), graph), engine.groups)
    assert bound(torch.ones(2))[0].tolist() == [4.0, 4.0]
    assert engine.groups.coordinates == {"data": dist.get_rank() // 2, "model": dist.get_rank() % 2}


def check_an_update_in_place_makes_no_dtensors() -> None:
    """A second training step makes no new DTensor, since parameters and state are overwritten."""
    torch.manual_seed(0)
    model = TwoLayers()
    step = autoshard.compile(model, device_mesh(), optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    step(batch())
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "from_local", lambda *args, **kwargs: made.append(args))
        step(batch())
    assert not made


def check_meshes_and_processes() -> None:
    """A mesh as large as the run uses its processes; a larger mesh raises, and one rank is simulated."""
    assert isinstance(make_engine(Mesh({"data": 2, "model": 2}), torch.device("cpu")), DistributedEngine)
    assert isinstance(make_engine(Mesh({"data": 1}), torch.device("cpu")), SimulatorEngine)
    with pytest.raises(MeshError, match=r"has 8 ranks, but this run has 4 processes"):
        make_engine(Mesh({"data": 8}), torch.device("cpu"))


def check_ranks_with_different_seeds() -> None:
    """Ranks with different seeds raise at the first call."""
    torch.manual_seed(0)
    sharded = autoshard.compile(TwoLayers(), device_mesh())
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RankMismatchError, match=re.escape("torch.initial_seed(): 0 on ranks [0], 1 on ranks [1]")):
        sharded(batch())


def check_an_error_of_the_first_rank_reaches_all() -> None:
    engine = DistributedEngine(device_mesh())
    assert engine.share(dist.get_rank) == 0

    def fail() -> None:
        raise MeshError("no plan")

    with pytest.raises(MeshError, match="no plan"):
        engine.share(fail)


CHECKS = {name.removeprefix("check_"): item for name, item in globals().items() if name.startswith("check_")}


outcomes = checked_once(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_on_four_processes(outcomes: dict[str, str], name: str) -> None:
    """The check passes on every rank."""
    report(outcomes, name)
