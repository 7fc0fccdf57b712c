"""The sharded module on the simulator, with a program written by hand."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle

import pytest
import torch
from torch import nn
from transformers.utils.generic import find_labels

import autoshard
from autoshard.ir.mesh import Mesh
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.sharded_module import ShardedModule
from tests.runtime.handmade import WIDTH, HandCompiler, TwoLayers

MESHES = [Mesh({"data": 1, "model": 1}), Mesh({"data": 2, "model": 2}), Mesh({"data": 4, "model": 3})]


def _pair(mesh: Mesh) -> tuple[TwoLayers, ShardedModule, HandCompiler]:
    torch.manual_seed(0)
    plain = TwoLayers()
    compiler = HandCompiler()
    return plain, ShardedModule(copy.deepcopy(plain), SimulatorEngine(mesh), compiler), compiler


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("batch", [4, 5])
def test_loss_outputs_and_gradients_equal_the_model(mesh: Mesh, batch: int) -> None:
    """Loss, outputs, buffers, gradients of parameters and of inputs are the plain model's, uneven batch included."""
    plain, sharded, _ = _pair(mesh)
    x = torch.randn(batch, WIDTH, requires_grad=True)
    x_sharded = x.detach().clone().requires_grad_()
    loss, y = plain(x)
    loss_sharded, y_sharded = sharded(x_sharded)
    torch.testing.assert_close(loss_sharded, loss)
    torch.testing.assert_close(y_sharded, y)
    torch.testing.assert_close(sharded.calls, plain.calls)
    loss.backward()
    loss_sharded.backward()
    torch.testing.assert_close(x_sharded.grad, x.grad)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).grad, parameter.grad)


def test_it_has_the_names_and_objects_of_the_model() -> None:
    """Names, parameter objects, modes and attributes are the user's model's."""
    model = TwoLayers()
    names = list(model.state_dict())
    sharded = ShardedModule(model, SimulatorEngine(MESHES[1]), HandCompiler())
    assert list(sharded.state_dict()) == names
    assert dict(sharded.named_parameters())["first.weight"] is model.first.weight
    assert sharded.config == {"hidden": 6}
    assert not sharded.eval().first.training
    assert not model.training
    with pytest.raises(AttributeError, match="nonsense"):
        sharded.nonsense


def test_calls_of_one_kind_share_a_program(caplog: pytest.LogCaptureFixture) -> None:
    """A new shape, mode or gradient mode compiles once, with one line in the log; parameters keep their specs."""
    _, sharded, compiler = _pair(MESHES[1])
    with caplog.at_level(logging.INFO, logger="autoshard"):
        sharded(torch.randn(4, WIDTH))
        sharded(torch.randn(4, WIDTH))
        assert len(compiler.requests) == 1
        assert not caplog.records
        sharded(torch.randn(8, WIDTH))
        assert len(caplog.records) == 1
        with torch.no_grad():
            sharded(torch.randn(4, WIDTH))
        sharded.eval()
        sharded(torch.randn(4, WIDTH))
    assert len(compiler.requests) == 4
    assert [request.grad for request in compiler.requests] == [True, True, False, True]
    assert set(compiler.requests[1].placed) == {"first.weight", "second.weight"}
    assert not compiler.requests[0].placed


def test_no_grad_gives_outputs_without_graph() -> None:
    """Under no_grad the outputs need no gradient and the values are the same."""
    plain, sharded, _ = _pair(MESHES[1])
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        loss, y = sharded(x)
    assert not loss.requires_grad
    torch.testing.assert_close(y, plain(x)[1].detach())


def test_backward_through_an_output_beside_the_loss() -> None:
    """A gradient that reaches another output than the loss runs the program with all tangents."""
    plain, sharded, compiler = _pair(MESHES[1])
    x = torch.randn(4, WIDTH)
    for model in (plain, sharded):
        loss, y = model(x)
        (0.5 * loss + (y**3).sum()).backward()
    assert [request.all_tangents for request in compiler.requests] == [False, True]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).grad, parameter.grad)


def test_changed_input_between_forward_and_late_backward_is_an_error() -> None:
    """When the whole program must run from kept inputs, an in-place change of one is named."""
    _, sharded, _ = _pair(MESHES[1])
    x = torch.randn(4, WIDTH)
    _, y = sharded(x)
    x.add_(1)
    with pytest.raises(Exception, match=r"input 'input:0' was changed in place"):
        y.sum().backward()


def test_a_changed_parameter_is_noticed_by_backward() -> None:
    """An in-place change of a saved parameter between forward and backward is torch's own error."""
    _, sharded, _ = _pair(MESHES[1])
    loss, _ = sharded(torch.randn(4, WIDTH))
    with torch.no_grad():
        sharded.first.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_runs_once_unless_retained() -> None:
    """A second backward is torch's own error, and works with retain_graph."""
    _, sharded, _ = _pair(MESHES[1])
    loss, _ = sharded(torch.randn(4, WIDTH))
    loss.backward(retain_graph=True)
    once = sharded.first.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(sharded.first.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_torch_optimizers_and_clipping_work() -> None:
    """AdamW steps with clipping give the plain model's parameters."""
    plain, sharded, _ = _pair(MESHES[1])
    x = torch.randn(4, WIDTH)
    for model in (plain, sharded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x)[0].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name), parameter)


def test_frozen_parameters_get_no_gradient() -> None:
    """A parameter that does not require grad has none, and the others have theirs."""
    plain, sharded, _ = _pair(MESHES[1])
    x = torch.randn(4, WIDTH)
    for model in (plain, sharded):
        model.first.weight.requires_grad_(False)
        model(x)[0].backward()
    assert sharded.first.weight.grad is None
    torch.testing.assert_close(sharded.second.weight.grad, plain.second.weight.grad)


def test_ranks_agree_on_what_they_run_and_with_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step: mesh, torch's version, seed, call, weights, and digests of both programs."""
    seen: dict[object, str] = {}
    monkeypatch.setattr(SimulatorEngine, "agree", lambda self, facts: seen.update(facts()))
    autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}), example_inputs=(torch.ones(4, 4),))
    assert seen["mesh"] == "Mesh(data=2)"
    assert seen["torch version"] == torch.__version__
    programs = {"compiled program", "traced program"}
    expected = {"torch.initial_seed()", "call", "parameter 'weight'", "parameter 'bias'", *programs}
    assert expected <= set(map(str, seen))


def test_forward_has_the_signature_of_the_model() -> None:
    """The bound method, the class and a copy say which arguments the model takes, as transformers' Trainer asks."""

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
    """A pickled module runs and has the model's signature."""
    sharded = autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}))
    loaded = pickle.loads(pickle.dumps(sharded))
    assert [*inspect.signature(loaded.forward).parameters] == ["input"]
    assert torch.equal(loaded(torch.ones(4, 4)), sharded(torch.ones(4, 4)))
