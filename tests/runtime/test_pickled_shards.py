"""One rank alone can pickle whole tensors, which become plain tensors, and not shards."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autoshard
from autoshard import Mesh, NotAvailableError, P
from tests.runtime.processes import checked_once, report

PAIR = Mesh({"data": 2})
INPUTS = torch.ones(4, 6)
WHOLE = {"0.*": P(), "2.*": P()}
PARTS = {"0.weight": P("data"), "2.weight": P(None, "data")}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def stepped(constraints: dict[str, P]) -> tuple[nn.Sequential, Any]:
    """Return a model after a training step, and the step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    step = autoshard.compile(
        model, PAIR, optimizer=optimizer, loss_fn=nn.MSELoss(), constraints={**constraints, "1.*": P()}
    )
    step(INPUTS, torch.ones(4, 2))
    return model, step


def reread(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def check_one_rank_refuses_parts() -> None:
    """If one rank alone saves shards in any common way, it raises, and all ranks can go on."""
    model, step = stepped(PARTS)
    output = autoshard.compile(nn.Linear(6, 2), PAIR, constraints={"input:0": P("data")})(INPUTS)
    if dist.get_rank() == 0:
        weight = model[0].weight
        states = (model.state_dict(), step.sharded.state_dict(), step.optimizer.state_dict())
        for value in (*states, model, [weight], weight.data, output):
            for save in (pickle.dumps, reread):
                with pytest.raises(NotAvailableError, match=r"is sharded on DeviceMesh.*full_state_dict=True"):
                    save(value)
    step(INPUTS, torch.ones(4, 2))


def check_one_rank_saves_wholes() -> None:
    """If parameters are whole on each rank, rank 0 alone saves files that one device loads."""
    model, step = stepped(WHOLE)
    if dist.get_rank() == 0:
        state = reread(model.state_dict())
        assert {type(value) for value in state.values()} == {torch.Tensor}
        other = network()
        other.load_state_dict(state)
        torch.testing.assert_close(dict(other.named_parameters()), wholes(dict(model.named_parameters())))
        assert {type(value) for value in reread(list(model.parameters()))} == {nn.Parameter}
        optimizer = torch.optim.AdamW(other.parameters())
        optimizer.load_state_dict(reread(step.optimizer.state_dict()))
        average = optimizer.state[other.get_parameter("0.weight")]["exp_avg"]
        assert torch.equal(average, step.optimizer.state[model.get_parameter("0.weight")]["exp_avg"].to_local())
        frozen = pickle.loads(pickle.dumps(model))
        assert torch.equal(frozen(INPUTS), other(INPUTS))
    step(INPUTS, torch.ones(4, 2))


def check_all_ranks_save_what_they_gathered() -> None:
    """`get_model_state_dict` with `full_state_dict`, which the error names, gives rank 0 the whole state."""
    model, step = stepped(PARTS)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    expected = wholes(model.state_dict())
    if dist.get_rank() == 0:
        torch.testing.assert_close(reread(gathered), expected)
    step(INPUTS, torch.ones(4, 2))


def check_copies_and_processes_get_dtensors() -> None:
    """Copies of a parameter, and a tensor sent to another process, are DTensors with the rank's shard."""
    for constraints in (WHOLE, PARTS):
        model, _ = stepped(constraints)
        weight: Any = model.get_parameter("0.weight")
        sent = pickle.loads(bytes(ForkingPickler.dumps(weight.detach())))
        for made in (copy.copy(weight), copy.deepcopy(weight), copy.deepcopy(model.state_dict())["0.weight"], sent):
            assert isinstance(made, DTensor)
            assert made.placements == weight.placements
            assert torch.equal(made.to_local(), weight.to_local())


def check_other_dtensors_are_torchs() -> None:
    """A DTensor on a mesh without a compiled model is pickled and loaded as without autoshard."""
    stepped(PARTS)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("another",))
    tensor: Any = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    found: Any = pickle.loads(pickle.dumps(tensor))
    assert isinstance(found, DTensor)
    assert torch.equal(found.to_local(), tensor.to_local())


def wholes(state: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "full_tensor", lambda value=value: value)().detach() for name, value in state.items()}


CHECKS: dict[str, Callable[[], None]] = {
    "one rank refuses parts": check_one_rank_refuses_parts,
    "one rank saves wholes": check_one_rank_saves_wholes,
    "all ranks save what they gathered": check_all_ranks_save_what_they_gathered,
    "copies and processes": check_copies_and_processes_get_dtensors,
    "other DTensors": check_other_dtensors_are_torchs,
}

outcomes = checked_once(CHECKS, ranks=2)


@pytest.mark.parametrize("name", CHECKS)
def test_with_a_process_per_rank(outcomes: dict[str, str], name: str) -> None:
    """The check passes on both ranks."""
    report(outcomes, name)
