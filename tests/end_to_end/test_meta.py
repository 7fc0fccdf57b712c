"""For a model on the meta device, each rank allocates its shards alone, and a call without weights raises."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autoshard
from autoshard import Mesh, NotAvailableError, P, TraceError
from autoshard.runtime import distributed
from tests.runtime.processes import on_processes

PAIR = Mesh({"data": 2})


class Tied(nn.Module):
    """A model with embeddings tied to the head, a batch norm, and a non-persistent table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens) * self.table)
        return nn.functional.cross_entropy(self.head(hidden), tokens)


TOKENS = torch.arange(16) % 12
SPLIT = {"embed.weight": P("data"), "input:0": P("data")}


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def compiled(model: nn.Module, optimizer: Callable[..., Any] | None = torch.optim.AdamW, **options: Any) -> Any:
    """Compile a model whose optimizer was made over its parameters on meta; return the step or the module."""
    if optimizer is not None:
        options["optimizer"] = optimizer(model.parameters(), lr=1e-2)
    return autoshard.compile(model, PAIR, constraints=SPLIT, **{"example_inputs": (TOKENS,), **options})


def give(step: Any, source: nn.Module) -> None:
    """Load the weights of `source` into a step or module, with the non-persistent table."""
    sharded = getattr(step, "sharded", step)
    sharded.load_state_dict(source.state_dict())
    sharded.get_buffer("table").copy_(source.get_buffer("table"))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in model.state_dict().items()
    }


def check_training(optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
    """Check that a model from meta trains bit by bit as a model that was made in memory."""
    torch.manual_seed(0)
    source = Tied()
    steps = [compiled(on_meta(), optimizer), compiled(copy.deepcopy(source), optimizer)]
    give(steps[0], source)
    losses = [[step(TOKENS) for _ in range(3)] for step in steps]
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]
    found, expected = (weights_of(step.sharded) for step in steps)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    model = steps[0].sharded
    assert model.head.weight is model.embed.weight


def check_refusal() -> None:
    """A call before weights exist raises one error on every rank, and the call after loading runs."""
    step = compiled(on_meta())
    with pytest.raises(TraceError, match=r"no values yet: 'embed.weight', 'norm.weight'.* Call init_weights"):
        step(TOKENS)
    give(step, Tied())
    assert step(TOKENS).isfinite()


def check_shards() -> None:
    """A rank has memory for its own part of a weight alone, and compiling for another shape gathers no weight."""
    sharded = compiled(on_meta(), None)
    weight = sharded.get_parameter("embed.weight")
    assert (weight.to_local().shape, weight.device.type) == ((6, 8), "cpu")
    give(sharded, Tied())
    with refusing_to_gather():
        sharded.compile_for(TOKENS[:8])
        sharded(TOKENS[:4]).backward()


@contextmanager
def refusing_to_gather() -> Iterator[None]:
    def refuse(tensor: DTensor) -> Tensor:
        raise AssertionError(f"a tensor of shape={tuple(tensor.shape)} was gathered")

    saved, distributed.whole = distributed.whole, refuse
    try:
        yield
    finally:
        distributed.whole = saved


def check_gather() -> None:
    """Gathering a split tensor slice by slice gives the whole tensor."""
    whole = torch.arange(70.0).view(7, 10)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    saved, distributed._GATHERED_AT_ONCE_BYTES = distributed._GATHERED_AT_ONCE_BYTES, 64
    try:
        for placement in (Shard(0), Shard(1), Replicate()):
            shards = distribute_tensor(whole, mesh, [placement])
            assert torch.equal(distributed.whole(shards), whole)
    finally:
        distributed._GATHERED_AT_ONCE_BYTES = saved


CHECKS = {"gather": check_gather, "training": check_training, "refusal": check_refusal, "shards": check_shards}

test_with_a_process_per_rank = on_processes(CHECKS, ranks=2)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_on_the_simulator(optimizer: Callable[..., Any]) -> None:
    """A model from meta trains on the simulator as a model in memory, with a traced and an untraced optimizer."""
    check_training(optimizer)
    check_refusal()


def test_a_copy_needs_weights_as_its_model_does() -> None:
    sharded = compiled(on_meta(), None)
    other = copy.deepcopy(sharded)
    give(sharded, Tied())
    sharded(TOKENS)
    with pytest.raises(TraceError, match="no values yet"):
        other(TOKENS)
    copy.deepcopy(sharded)(TOKENS)


def test_weights_cannot_be_loaded_before_they_have_a_place() -> None:
    sharded = compiled(on_meta(), None, example_inputs=None)
    with pytest.raises(NotAvailableError, match=r"load_state_dict would write.*example_inputs="):
        sharded.load_state_dict(Tied().state_dict())
    sharded.compile_for(TOKENS)
    give(sharded, Tied())
    assert sharded(TOKENS).isfinite()


def test_a_model_may_be_on_meta_in_part() -> None:
    model, source = on_meta(), Tied()
    model.norm, model.table = source.norm, source.table
    sharded = compiled(model, None)
    with pytest.raises(TraceError, match=r"no values yet: 'embed.weight'. Call"):
        sharded(TOKENS)
    with torch.no_grad():
        sharded.get_parameter("embed.weight").copy_(source.embed.weight)
    assert torch.equal(sharded(TOKENS), source(TOKENS))


def test_padded_calls_are_proven_before_there_are_weights() -> None:
    """A model on meta is compiled for padded lengths, and runs after its weights are loaded."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 4))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    sharded = autoshard.compile(
        model, PAIR, options=autoshard.Options(dynamic_lengths={"input:0": 0}), example_inputs=(tokens,)
    )
    sharded.load_state_dict(nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 4)).state_dict())
    assert sharded(tokens).shape == (*sharded(tokens[:, :3]).shape[:1], 5, 4)
    assert len(sharded.programs) == 1


def test_an_optimizer_with_state_from_the_start_is_refused() -> None:
    with pytest.raises(TraceError, match="optimizer=Adagrad makes its state when it is built"):
        compiled(on_meta(), torch.optim.Adagrad)
