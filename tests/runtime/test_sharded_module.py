"""A `ShardedModule` has the interface of the original model, and compiles one program for each kind of call."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.utils import find_labels

import autoshard
from autoshard import Mesh
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.sharded_module import ShardedModule
from cost_models.errors import UnknownHardwareError

MESH = Mesh({"data": 2, "model": 2})


def test_it_has_the_names_and_objects_of_the_model() -> None:
    """Names, parameter objects, attributes and modes of the compiled module are those of the user's model."""
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 3))
    model.config = {"hidden": 6}  # type: ignore[assignment]
    names = list(model.state_dict())
    sharded = autoshard.compile(model, MESH)
    assert list(sharded.state_dict()) == names
    assert dict(sharded.named_parameters())["0.weight"] is model.get_parameter("0.weight")
    assert sharded.config == {"hidden": 6}
    assert not sharded.eval().get_submodule("0").training
    assert not model.training
    with pytest.raises(AttributeError, match="nonsense"):
        sharded.nonsense


def test_state_dicts_run_the_hooks_of_the_model() -> None:
    """State-dict hooks, registered on the model or on the compiled module, run once each, also in a copy."""
    model, ran = nn.Linear(3, 6), list[str]()
    sharded = autoshard.compile(model, MESH)
    for module in (model, sharded):
        module.register_state_dict_pre_hook(lambda *_: ran.append("before saving"))
        module.register_state_dict_post_hook(lambda _, state, *__: state.update(extra=torch.ones(1)))
        module.register_load_state_dict_pre_hook(lambda _, state, *__: state.pop("extra", None))
        module.register_load_state_dict_post_hook(lambda *_: ran.append("after loading"))
    for module in (sharded, copy.deepcopy(sharded)):
        ran.clear()
        state = module.state_dict()
        assert list(state) == ["weight", "bias", "extra"]
        module.load_state_dict(state)
        assert ran == [*["before saving"] * 2, *["after loading"] * 2]


def test_calls_of_one_kind_share_a_program() -> None:
    """A new shape, a new mode and `no_grad` compile one program each, and repeated calls none."""
    sharded = autoshard.compile(nn.Linear(3, 6), MESH)
    for _ in range(2):
        sharded(torch.randn(4, 3))
        assert len(sharded.programs) == 1
    sharded(torch.randn(8, 3))
    with torch.no_grad():
        sharded(torch.randn(4, 3))
    sharded.eval()
    sharded(torch.randn(4, 3))
    assert len(sharded.programs) == 4


def test_no_grad_gives_outputs_without_graph() -> None:
    """Under `no_grad`, outputs require no gradient and equal one device."""
    model, x = nn.Linear(3, 6), torch.randn(4, 3)
    sharded = autoshard.compile(copy.deepcopy(model), MESH)
    with torch.no_grad():
        y = sharded(x)
    assert not y.requires_grad
    torch.testing.assert_close(y, model(x).detach())


def test_frozen_parameters_get_no_gradient() -> None:
    """A frozen parameter gets no gradient, and gradients of the others equal one device."""
    plain = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 3))
    sharded, x = autoshard.compile(copy.deepcopy(plain), MESH), torch.randn(4, 3)
    for model in (plain, sharded):
        model.get_parameter("0.weight").requires_grad_(False)
        model(x).square().mean().backward()
    assert sharded.get_parameter("0.weight").grad is None
    torch.testing.assert_close(sharded.get_parameter("1.weight").grad, plain[1].weight.grad)


def test_ranks_agree_on_what_they_run_and_with_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """When compiling, ranks compare mesh, torch's version, seed, call, parameters and both programs."""
    seen: dict[object, str] = {}
    monkeypatch.setattr(SimulatorEngine, "agree", lambda self, facts: seen.update(facts()))
    autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}), example_inputs=(torch.ones(4, 4),))
    assert seen["mesh"] == "Mesh(data=2)"
    assert seen["torch version"] == torch.__version__
    programs = {"compiled program", "traced program"}
    expected = {"torch.initial_seed()", "call", "parameter 'weight'", "parameter 'bias'", *programs}
    assert expected <= set(map(str, seen))


def test_forward_has_the_signature_of_the_model() -> None:
    """The compiled module, its class and a copy have the model's `forward` signature, for transformers' Trainer."""

    class Answering(nn.Module):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            return inputs if labels is None else inputs + labels

    sharded = autoshard.compile(Answering(), Mesh({"data": 2}))
    for module in (sharded, copy.deepcopy(sharded)):
        assert [*inspect.signature(module.forward).parameters] == ["inputs", "labels"]
        assert [*inspect.signature(type(module).forward).parameters] == ["self", "inputs", "labels"]
        assert isinstance(module, ShardedModule)
        assert find_labels(type(module)) == ["labels"]


def test_module_is_loaded_with_its_signature() -> None:
    """A pickled and loaded module has the model's signature and the same outputs."""
    sharded = autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}))
    loaded = pickle.loads(pickle.dumps(sharded))
    assert [*inspect.signature(loaded.forward).parameters] == ["input"]
    assert torch.equal(loaded(torch.ones(4, 4)), sharded(torch.ones(4, 4)))


def test_containers_are_read_and_changed_like_the_model() -> None:
    """A compiled `nn.Sequential` can be indexed, sliced, looped over and changed; other models have no length."""
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3))
    x, sharded = torch.randn(4, 3), cast(Any, autoshard.compile(model, MESH))
    assert sharded[0] is model[0]
    assert list(sharded) == list(model)
    assert len(sharded) == 3
    assert len(sharded[:2]) == 2
    assert sharded(x).shape == (4, 3)
    sharded[1] = nn.Tanh()
    torch.testing.assert_close(sharded(x), model(x))
    with pytest.raises(TypeError, match="has no len"):
        len(cast(Any, autoshard.compile(nn.Linear(3, 6), MESH)))


def test_a_call_without_targets_returns_the_outputs() -> None:
    """With `loss_fn`, a call without targets returns the model's outputs; a training step without targets raises."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 6), torch.randn(4, 3), torch.randint(6, (4,))
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy
    step: Any = autoshard.compile(model, MESH, optimizer=optimizer, loss_fn=loss_fn, micro_batches=2)
    step(x, y)
    for outputs in (step.sharded(x), step.sharded(input=x)):
        torch.testing.assert_close(outputs, model(x))
    torch.testing.assert_close(step.sharded(x, y), loss_fn(model(x), y))
    for wrong in (lambda: step(x), lambda: step.sharded(), lambda: step.sharded(x, y, y)):
        with pytest.raises(autoshard.TraceError, match="loss_fn"):
            wrong()


def test_errors_of_cost_models_have_a_public_class_at_calls_too() -> None:
    """An error of the cost models that planning raises is an `autoshard.errors` class."""

    def plan() -> None:
        raise UnknownHardwareError("no host_link")

    with pytest.raises(autoshard.errors.UnknownHardwareError, match="no host_link"):
        SimulatorEngine(MESH).share(plan)
