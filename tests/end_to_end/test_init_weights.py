"""`init_weights` makes the same weights, bit by bit, under any layout, and the model trains from these weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import Mesh, NotAvailableError, P, PartitionSpec, RankMismatchError, TraceError
from autoshard.runtime.distributed import DistributedEngine
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.weights.init_weights import init_weights
from autoshard.runtime.weights.local_part import LocalPart
from autoshard.tracing import record_initialisation
from tests.end_to_end.layouts import layouts
from tests.end_to_end.test_meta import TOKENS, Tied, compiled, on_meta, refusing_to_gather
from tests.end_to_end.training import index_of
from tests.models import llama
from tests.runtime.processes import on_processes
from tests.tracing.test_initialisers import CONFIGS

CPU = torch.device("cpu")


def gpt2_on_meta() -> nn.Module:
    """Return a GPT-2 on meta with sizes that 2, 3 and 4 ranks do not divide, and an extra layer of width 7."""
    config = transformers.GPT2Config(vocab_size=31, n_positions=9, n_embd=14, n_layer=1, n_head=2)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        model.extra = nn.Linear(7, 5)
    return model


def orthogonal(module: nn.Module) -> None:
    """Initialise the extra layer's weight; an example of a user's initialiser."""
    if isinstance(module, nn.Linear) and module.in_features == 7:
        nn.init.orthogonal_(module.weight)


def model_on_meta(name: str) -> nn.Module:
    """Return a model of transformers on meta, by the name of its class."""
    with torch.device("meta"):
        return getattr(transformers, name)(CONFIGS[name]())


def on_one_device(build: Callable[[], nn.Module] = gpt2_on_meta) -> nn.Module:
    model = build()
    engine = SimulatorEngine(Mesh({"data": 1}))
    engine.place(model, {})
    init_weights(model, engine, lambda: record_initialisation(model, CPU, orthogonal), 0, ())
    return model


PLACES: dict[str, Callable[[Any], PartitionSpec]] = {
    "replicated": lambda weight: P(),
    "first dim": lambda weight: P("data"),
    "last dim": lambda weight: P(*[None] * (weight.dim() - 1), "data"),
    "both dims": lambda weight: P("data", "model") if weight.dim() > 1 else P("model"),
    "one dim twice": lambda weight: P(("data", "model")),
}
MESHES = {2: (2, 1), 3: (3, 1), 4: (2, 2)}


def check_places(build: Callable[[], nn.Module] = gpt2_on_meta) -> None:
    """Under five layouts, each rank's part of each weight equals one device's, and no weight is gathered."""
    expected = on_one_device(build).state_dict()
    device_mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()], mesh_dim_names=("data", "model"))
    for place in PLACES.values():
        model, engine = build(), DistributedEngine(device_mesh)
        engine.adopt(model)
        engine.place(model, {name: place(weight) for name, weight in model.named_parameters()})
        with refusing_to_gather():
            init_weights(model, engine, partial(record_initialisation, model, CPU, orthogonal), 0, ())
        for name, weight in model.state_dict().items():
            part = LocalPart.of(weight)
            assert torch.equal(part.tensor, expected[name][index_of(part)]), (name, weight)


def check_step() -> None:
    """A model from meta gets one device's weights and first loss; seeds that differ between ranks raise."""
    step = compiled(on_meta())
    one = autoshard.compile(on_meta(), Mesh({"data": 1}), example_inputs=(TOKENS,))
    init = partial(init_without_table, seed=3)
    init(step)
    init(one)
    for name, weight in step.sharded.state_dict().items():
        part = LocalPart.of(weight)
        assert torch.equal(part.tensor, one.state_dict()[name][index_of(part)]), name
    assert torch.allclose(step(TOKENS), one(TOKENS).detach())
    with pytest.raises(RankMismatchError, match=r"init_weights\(seed\): 0 on ranks \[0\]"):
        init_without_table(step, seed=dist.get_rank())


def init_without_table(step: Any, seed: int) -> None:
    """Call `init_weights` with an initialiser of the table of `Tied`, which otherwise only its constructor makes."""

    def fill(module: nn.Module) -> None:
        if isinstance(module, Tied):
            module.table.copy_(torch.linspace(0, 1, 8))

    step.init_weights(seed, fill)


def check_llama() -> None:
    """Under hand-written layouts and under the planner's choice, a Llama's weights equal those of one device."""
    model, inputs = llama()
    config = model.config

    def made(mesh: Mesh, constraints: dict[str, PartitionSpec]) -> Any:
        with torch.device("meta"):
            on_meta = type(model)(config)
        sharded = autoshard.compile(on_meta, mesh, example_inputs=inputs, constraints=constraints, time_budget_s=5.0)
        sharded.init_weights(0)
        return sharded

    expected = made(Mesh({"data": 1}), {})
    for constraints in layouts("llama").values():
        sharded = made(Mesh({"data": 2, "model": 2}), constraints)
        for name, weight in sharded.state_dict().items():
            part = LocalPart.of(weight)
            assert torch.equal(part.tensor, expected.state_dict()[name][index_of(part)]), name
        assert torch.equal(
            sharded.get_buffer("model.rotary_emb.inv_freq"), model.get_buffer("model.rotary_emb.inv_freq")
        )


MODELS = {name: partial(check_places, partial(model_on_meta, name)) for name in CONFIGS}
PLACED = {"places": check_places, **MODELS}

test_on_two_ranks = on_processes({**PLACED, "step": check_step}, ranks=2)

test_on_three_ranks = on_processes(PLACED, ranks=3, slow=MODELS)

test_on_four_ranks = on_processes({**PLACED, "llama": check_llama}, ranks=4, slow=[*PLACED, "llama"])


def test_what_no_initialiser_writes_is_named() -> None:
    with pytest.raises(TraceError, match=r"No initialiser gives a value to 'table', made on the meta device.*init_fn"):
        compiled(on_meta(), None).init_weights(0)


def test_a_seed_is_an_integer() -> None:
    """A NumPy integer as seed gives the weights of the equal Python integer; a float is refused."""
    model = nn.Linear(3, 3)
    sharded = autoshard.compile(model, Mesh({"data": 2}))
    sharded.init_weights(3)
    expected = model.weight.clone()
    sharded.init_weights(np.int64(3))  # type: ignore[arg-type]
    assert torch.equal(model.weight, expected)
    with pytest.raises(NotAvailableError, match=r"init_weights\(seed=1.5\): seed is a float"):
        sharded.init_weights(1.5)  # type: ignore[arg-type]


def test_weights_need_a_place_first() -> None:
    with pytest.raises(NotAvailableError, match=r"init_weights would write.*example_inputs="):
        compiled(on_meta(), None, example_inputs=None).init_weights(0)


def test_a_model_in_memory_keeps_what_no_initialiser_writes() -> None:
    model = Tied()
    before, table = model.embed.weight.detach().clone(), model.table.clone()
    sharded = compiled(model, None)
    sharded.init_weights(5)
    assert not torch.equal(sharded.embed.weight, before)
    assert torch.equal(sharded.table, table)


class Scale(nn.Module):
    """A module with a non-persistent table, which `reset_parameters` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


def test_tables_are_made_where_weights_were_loaded() -> None:
    """`load_state_dict` into a model from meta also computes its non-persistent tables."""
    source = nn.Sequential(nn.Linear(8, 8), Scale())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Scale())
    sharded: Any = autoshard.compile(model, Mesh({"data": 2}), example_inputs=(torch.ones(4, 8),))
    sharded.load_state_dict(source.state_dict())
    torch.testing.assert_close(sharded(torch.ones(4, 8)), source(torch.ones(4, 8)))
    assert torch.equal(sharded.get_buffer("1.table"), torch.arange(8) / 8)
