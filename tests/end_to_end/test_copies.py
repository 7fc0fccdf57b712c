"""Copies, pickles and state dicts of a sharded model behave as those of a model on one device."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import Mesh, P
from tests.end_to_end.training import assert_close, plain_step, whole
from tests.runtime.processes import on_processes, shared_folder

PAIR = Mesh({"data": 2})
SPLIT = {"up.weight": P("data"), "down.weight": P(None, "data")}


class Net(nn.Module):
    """Two layers, a third layer with a tied weight, a parameter and buffers of the root, and dropout."""

    def __init__(self, rate: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.up, self.down, self.again = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 8, bias=False)
        self.again.weight = self.up.weight
        self.drop = nn.Dropout(rate)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("offset", torch.ones(()), persistent=False)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.again(self.down(torch.tanh(self.up(x)))) * self.factor + self.offset
        return self.drop(y * self.scale).square().mean()


def data() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6)


def compiled(model: nn.Module, **options: Any) -> autoshard.ShardedModule:
    sharded = autoshard.compile(model, PAIR, constraints=SPLIT, **options)
    assert isinstance(sharded, autoshard.ShardedModule)
    return sharded


def train(model: nn.Module, steps: int = 2) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    return [plain_step(model, optimizer, data()).item() for _ in range(steps)]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: whole(item) for name, item in named}


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = values(found), values(expected)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert_close(mine[name], value, name)


def is_distributed() -> bool:
    return dist.is_initialized()


def check_deepcopy() -> None:
    """Copies made before the first call, after a call and of a copy train independently, as on one device."""
    plain, sharded = Net(), compiled(Net())
    for network in (plain, sharded):
        first = copy.deepcopy(network)
        train(network)
        second = copy.deepcopy(network)
        third = copy.deepcopy(second)
        for number, item in enumerate((first, second, third), start=1):
            train(item, number)
        assert third.again.weight is third.up.weight
        if network is plain:
            expected = (network, first, second, third)
        else:
            for one, other in zip((network, first, second, third), expected, strict=True):
                assert_same(one, other)


def check_deepcopy_searches_nothing() -> None:
    """A copy runs its original's plan, and a changed attribute of the copy changes the copy alone."""
    sharded = compiled(Net())
    plain = Net()
    train(sharded)
    train(plain)
    other, plain_other = copy.deepcopy(sharded), copy.deepcopy(plain)
    assert other.plan is sharded.plan
    train(other)
    train(plain_other)
    assert other.plan is sharded.plan
    for network in (other._original[0], plain_other):
        vars(network)["factor"] = 3.0
    assert_close(other(data()), plain_other(data()), "loss")
    assert_close(sharded(data()), plain(data()), "loss")


def check_deepcopy_of_a_training_step() -> None:
    """A copied step trains the copy's parameters with the original's kind of optimizer."""
    losses = []
    for kind in (torch.optim.SGD, torch.optim.RMSprop):
        model = Net()
        optimizer = kind(model.parameters(), lr=0.1)
        step = autoshard.compile(model, PAIR, optimizer=optimizer, constraints=SPLIT)
        step(data())
        other = copy.deepcopy(step)
        losses.append([step(data()).item(), step(data()).item()])
        assert losses[-1] == [other(data()).item(), other(data()).item()]
    assert losses[0] != losses[1]


def check_pickle() -> None:
    """A simulated model is pickled with its state; on processes, pickling raises an error that names the way out."""
    torch.manual_seed(5)
    sharded = compiled(Net(rate=0.5))
    train(sharded)
    if is_distributed():
        for save in (pickle.dumps, lambda item: torch.save(item, io.BytesIO())):
            with pytest.raises(autoshard.NotAvailableError, match=r"with torch\.distributed\.checkpoint"):
                save(sharded)
        return
    buffer = io.BytesIO()
    torch.save(sharded, buffer)
    buffer.seek(0)
    torch.manual_seed(7)
    expected = train(copy.deepcopy(sharded))
    for other in (pickle.loads(pickle.dumps(sharded)), torch.load(buffer, weights_only=False)):
        assert_same(other, sharded)
        assert other.specs == sharded.specs
        torch.manual_seed(7)
        assert train(other) == expected


def check_loading_a_plain_state() -> None:
    """`load_state_dict` takes a plain model's state, with and without `assign`, before and after the first call."""
    for assign in (False, True):
        for called in (False, True):
            sharded, plain = compiled(Net()), Net()
            if called:
                train(sharded)
            weight = sharded.up.weight
            assert not any(sharded.load_state_dict(Net(seed=1).state_dict(), strict=True, assign=assign))
            plain.load_state_dict(Net(seed=1).state_dict(), assign=assign)
            assert (sharded.up.weight is weight) is not assign
            assert isinstance(sharded.up.weight, nn.Parameter)
            assert isinstance(sharded.up.weight, DTensor) == is_distributed()
            for network in (sharded, plain):
                network.again.weight = network.up.weight  # what is assigned is tied no more
                train(network)
            assert_same(sharded, plain)


def check_what_does_not_fit() -> None:
    """Missing, unexpected and misshapen values raise torch's own errors; without `strict`, the rest is loaded."""
    sharded = compiled(Net())
    state = dict(Net(seed=1).state_dict())
    state["other"] = state.pop("down.weight")
    state["up.bias"] = torch.zeros(3)
    with pytest.raises(RuntimeError) as caught:
        sharded.load_state_dict(state)
    for text in ('Missing key(s) in state_dict: "down.weight"', '"other"', "size mismatch for up.bias"):
        assert text in str(caught.value)
    del state["up.bias"]
    result = sharded.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["up.bias", "down.weight"], ["other"])
    assert_close(whole(sharded.down.bias), Net(seed=1).down.bias.detach(), "loaded")


def check_dropout_goes_on() -> None:
    """After a saved state is loaded, dropout draws the same masks as after saving, whatever torch's seed is."""
    torch.manual_seed(3)
    sharded = compiled(Net(rate=0.5))
    train(sharded)
    state = copy.deepcopy(sharded.state_dict())
    expected = train(sharded)
    torch.manual_seed(11)
    other = compiled(Net(rate=0.5, seed=11))
    other(data())
    assert not any(other.load_state_dict(state, strict=True))
    assert train(other) == expected
    torch.manual_seed(12)
    assert train(other) != expected
    assert not any(other.load_state_dict(Net(rate=0.5).state_dict(), strict=True))


def check_names_of_a_state() -> None:
    """State dicts have the names of the plain model, and `_extra_state` too if the model draws random numbers."""
    sharded, model = compiled(Net()), Net(rate=0.5)
    train(sharded)
    assert list(sharded.state_dict()) == list(Net().state_dict())
    drawing = compiled(model)
    assert set(drawing.state_dict()) - set(Net().state_dict()) == {"_extra_state"}
    assert list(model.state_dict()) == list(Net().state_dict())


def check_own_extra_state() -> None:
    """`state_dict` keeps the model's own extra state, with and without dropout."""

    class Counting(Net):
        def get_extra_state(self) -> dict[str, float]:
            return {"factor": self.factor}

        def set_extra_state(self, state: dict[str, float]) -> None:
            self.factor = state["factor"]

    for rate in (0.0, 0.5):
        first, second = Counting(rate), Counting(rate)
        one, other = compiled(first), compiled(second)
        first.factor = 2.0
        train(one)
        assert not any(other.load_state_dict(one.state_dict()))
        assert second.factor == 2.0
        assert train(other) == train(one)
        second.factor = 1.0
        assert not any(other.load_state_dict(first.state_dict() if not is_distributed() else one.state_dict()))
        assert second.factor == 2.0


def check_checkpoint() -> None:
    """After `torch.distributed.checkpoint` saves and loads, training goes on as before, also in an uncalled model."""
    with shared_folder() as folder:
        sharded = compiled(Net(rate=0.5))
        train(sharded)
        dcp.save({"model": sharded}, checkpoint_id=folder / "module")
        dcp.save({"model": get_model_state_dict(sharded)}, checkpoint_id=folder / "state")
        expected = train(sharded)
        first = compiled(Net(rate=0.5, seed=1))
        dcp.load({"model": first}, checkpoint_id=folder / "module")
        second = compiled(Net(rate=0.5, seed=2))
        train(second)
        state = {"model": get_model_state_dict(second)}
        dcp.load(state, checkpoint_id=folder / "state")
        set_model_state_dict(second, state["model"])
        for other in (first, second):
            assert train(other) == pytest.approx(expected, rel=1e-6)


CHECKS = {name.removeprefix("check_"): item for name, item in globals().items() if name.startswith("check_")}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_on_the_simulator(name: str) -> None:
    """The check passes if all ranks are simulated in this process."""
    CHECKS[name]()


test_on_two_processes = on_processes(CHECKS, ranks=2, deadline_s=200, slow=CHECKS)


def test_a_copy_of_a_model_is_not_planned_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Training a copy searches no new plan."""
    sharded = compiled(Net())
    train(sharded)
    other = copy.deepcopy(sharded)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="passes.driver.planner"):
        train(other)
    assert not [record for record in caplog.records if "predicted" in record.getMessage()]


def test_a_pickled_plan_leaves_the_model_behind() -> None:
    """A pickled plan is smaller than its model, equals the plan, and cannot explain, which needs the model."""
    model = nn.Linear(512, 512)
    plan = autoshard.plan(model, PAIR, example_inputs=(torch.zeros(4, 512),), loss_fn=lambda y: y.square().mean())
    assert plan.explain("weight")
    assert all(plan.baselines.values())  # a pickled plan has those that were read
    sent = pickle.dumps(plan)
    assert len(sent) < 512 * 512
    found = pickle.loads(sent)
    assert found == plan
    with pytest.raises(autoshard.NotAvailableError, match="no model at hand"):
        found.explain("weight")
