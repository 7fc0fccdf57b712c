"""Calls on several processes return DTensors, whole tensors or only the loss, for use in further computation."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

import autoshard
from autoshard import Mesh, NotAvailableError, P
from autoshard.ir.program import OutputKind
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep
from tests.benchmarks.live_memory import peak_bytes_of
from tests.end_to_end.training import assert_close, whole
from tests.models import gpt2
from tests.runtime.processes import on_processes


@dataclass
class Found:
    """The outputs of `Net`."""

    loss: torch.Tensor | None
    logits: torch.Tensor
    hidden: torch.Tensor


class Net(nn.Module):
    """A classifier of each position, with a loss if targets are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Found:
        hidden = self.up(x).tanh()
        logits = self.down(hidden)
        loss = None if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return Found(loss, logits, hidden)


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, 6, generator=generator), torch.randint(0, 12, (rows, 4), generator=generator)


BY_ROWS = {"input:*": P("data"), "*.weight": P(), "*.bias": P(), "output:1": P("data"), "output:2": P("data")}


def ranks() -> int:
    return dist.get_world_size()


def compiled(constraints: dict[str, P] | None = None, **options: Any) -> tuple[ShardedModule, nn.Module]:
    """Return the model compiled on all processes along one axis, with the batch split by default, and a plain model."""
    constraints = BY_ROWS if constraints is None else constraints
    sharded = autoshard.compile(Net(), Mesh({"data": ranks()}), constraints=constraints, **options)
    assert isinstance(sharded, ShardedModule)
    return sharded, Net()


def assert_same_gradients(sharded: nn.Module, plain: nn.Module, where: str = "") -> None:
    for name, parameter in plain.named_parameters():
        grad = sharded.get_parameter(name).grad
        assert grad is not None, name
        assert_close(whole(grad), parameter.grad, f"{name}, {where}")


def check_they_lie_as_planned() -> None:
    """Outputs are DTensors with the plan's placements, and the loss is a plain tensor; no output is gathered."""
    sharded, plain = compiled()
    x, y = batch()
    with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("gathered")):
        found = sharded(x, y)
    assert sharded.plan is not None
    assert isinstance(found, Found)
    assert type(found.loss) is torch.Tensor
    expected = plain(x, y)
    assert_close(found.loss.detach(), expected.loss.detach(), "loss")
    for number, name in enumerate(("logits", "hidden"), start=1):
        output, spec = getattr(found, name), sharded.plan.outputs[f"output output:{number}"]
        assert isinstance(output, DTensor)
        assert spec == P("data"), spec
        assert list(output.placements) == list(spec.to_placements(sharded.mesh))
        assert output.to_local().shape[0] == len(x) // ranks()
        assert_close(output.full_tensor().detach(), getattr(expected, name).detach(), name)


def check_bytes_on_the_wire() -> None:
    """In evaluation, ranks send only parts of the loss, never an output."""
    x, y = batch()
    for options in ({}, {"options": autoshard.Options(outputs="loss")}):
        sharded, _ = compiled(**options)
        with torch.no_grad():
            sharded(x, y)
        assert sharded.program is not None
        nodes = sharded.program.phased.forward.graph.nodes
        sent = [
            node.args[0].meta["val"] for node in nodes if "c10d" in str(node.target) and "wait" not in str(node.target)
        ]
        assert sent
        assert all(value.numel() <= y.numel() for value in sent), sent


def check_whole() -> None:
    """With `gather_outputs=True`, outputs that no constraint names are plain tensors, and train as one device."""
    sharded, plain = compiled(
        {name: spec for name, spec in BY_ROWS.items() if name != "output:1"},
        options=autoshard.Options(gather_outputs=True),
    )
    x, y = batch()
    found, expected = sharded(x, y), plain(x, y)
    assert type(found.logits) is torch.Tensor
    assert isinstance(found.hidden, DTensor)
    assert_close(found.logits.detach(), expected.logits.detach(), "logits")
    (found.logits.square().mean() + found.loss).backward()
    (expected.logits.square().mean() + expected.loss).backward()
    assert_same_gradients(sharded, plain)


LAYOUTS: dict[str, dict[str, P]] = {
    "rows": BY_ROWS,
    "positions": {"output:1": P(None, "data")},
    "classes": {"down.weight": P("data"), "output:1": P(None, None, "data")},
    "whole": {"output:1": P()},
}


def check_further_computation() -> None:
    """Losses computed from split logits outside the model have values and gradients of one device."""
    criteria = {
        "cross entropy": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
        "of classes in the middle": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y),
        "mean square": lambda logits, y: F.mse_loss(logits, F.one_hot(y, 12).float()),
        "of a part": lambda logits, y: (logits[:, -1] * 2).logsumexp(-1).sum() + logits.exp().mean(),
    }
    for layout, constraints in LAYOUTS.items():
        sharded, plain = compiled(constraints)
        for rows in (8, 7):
            x, y = batch(rows)
            if rows == 7 and layout != "rows":
                continue
            for criterion, compute in criteria.items():
                losses = []
                for network in (sharded, plain):
                    network.zero_grad()
                    loss = compute(only_logits(network)(x), y)
                    loss.backward()
                    losses.append(loss)
                where = f"{criterion}, {layout}, {rows} rows"
                assert abs(losses[0].item() - losses[1].item()) < 1e-5, where
                assert_same_gradients(sharded, plain, where)


def only_logits(network: nn.Module) -> Any:
    return lambda x: network(x).logits


def check_both_ways_back() -> None:
    """A model's own loss plus a loss of its split outputs has the gradients of one device."""
    sharded, plain = compiled()
    x, y = batch()
    for network in (sharded, plain):
        found = network(x, y)
        (found.loss + 0.1 * found.logits.square().sum() + found.hidden.mean()).backward()
    assert_same_gradients(sharded, plain)


def check_uneven() -> None:
    """Output rows that ranks do not divide have the values and reductions of one device."""
    sharded, plain = compiled()
    x, y = batch(2 * ranks() - 1)
    with torch.no_grad():
        found, expected = sharded(x, y), plain(x, y)
    assert found.logits.to_local().shape[0] == (1 if dist.get_rank() == ranks() - 1 else 2)
    assert_close(found.logits.full_tensor(), expected.logits, "logits")
    assert found.logits.mean().item() == pytest.approx(expected.logits.mean().item(), abs=1e-6)
    assert found.logits.square().sum().item() == pytest.approx(expected.logits.square().sum().item(), rel=1e-5)


def check_evaluation() -> None:
    """Typical evaluation code on split logits gives the numbers of one device."""
    for constraints in (BY_ROWS, {"output:1": P(None, None, "data")}):
        sharded, plain = compiled(constraints)
        x, y = batch()
        with torch.no_grad():
            found, expected = sharded(x, y).logits, plain(x, y).logits
        assert torch.equal(found.argmax(-1).full_tensor(), expected.argmax(-1))
        assert (found.argmax(-1) == y).float().mean().item() == (expected.argmax(-1) == y).float().mean().item()
        assert float(found.sum()) == pytest.approx(float(expected.sum()), rel=1e-4)
        assert f"{found.max():.4f}" == f"{expected.max():.4f}"
        assert torch.allclose(found, expected, atol=1e-5)
        assert found[0, 1].tolist() == pytest.approx(expected[0, 1].tolist(), abs=1e-5)
        assert found.detach().numpy().shape == expected.numpy().shape
        assert bool((found.softmax(-1).sum(-1) > 0.99).all())
        assert isinstance(found.topk(2).values, DTensor)
        assert found.topk(2).values.full_tensor().shape == (8, 4, 2)


def check_errors_name_the_way_out() -> None:
    """An operator that fails on a split output raises an error that names `gather_outputs` or `full_tensor`."""
    sharded, _ = compiled()
    x, y = batch()
    with torch.no_grad():
        logits = sharded(x, y).logits
    with pytest.raises(
        NotAvailableError, match=r"__setitem__ failed .* changes a tensor in place.*gather_outputs=True"
    ):
        logits[:, -1] = -torch.inf
    with pytest.raises(NotAvailableError, match=r"mul_ failed .* changes a tensor in place"):
        logits.mul_(2)
    with pytest.raises(NotAvailableError, match=r"add failed on an output of the model .*full_tensor\(\)"):
        logits.add(torch.ones(5))


def check_loss_alone() -> None:
    """With `outputs="loss"`, a call returns only the loss, and its backward gives the gradients of one device.

    If the model returns no loss, the call raises an error.
    """
    x, y = batch()
    sharded, plain = compiled(options=autoshard.Options(outputs="loss"))
    loss = sharded(x, y)
    assert type(loss) is torch.Tensor
    loss.backward()
    plain(x, y).loss.backward()
    assert_same_gradients(sharded, plain)
    with pytest.raises(autoshard.TraceError, match=r"outputs='loss'.*returns no floating scalar"):
        sharded(x)
    again = copy.deepcopy(sharded)
    assert type(again(x, y)) is torch.Tensor


def check_options_differ() -> None:
    """If ranks ask for different outputs, all raise."""
    options = {"options": autoshard.Options(gather_outputs=True)} if dist.get_rank() else {}
    sharded, _ = compiled(**options)
    with pytest.raises(autoshard.RankMismatchError, match="all outputs, whole"):
        sharded(*batch())


def check_partial_gradients() -> None:
    """If the given gradient of an output is partial or replicated, the backward gives the gradients of one device."""
    sharded, plain = compiled()
    x, _ = batch()
    found, expected = sharded(x).logits, plain(x).logits
    torch.manual_seed(3)
    gradient = torch.randn(expected.shape)
    mesh = found.device_mesh
    first = dist.get_rank() == 0
    addend = DTensor.from_local(gradient if first else torch.zeros_like(gradient), mesh, [Partial()], run_check=False)
    copies = DTensor.from_local(gradient, mesh, [Replicate()], run_check=False)
    for tangent in (addend, copies):
        sharded.zero_grad()
        found.backward(tangent, retain_graph=True)
        plain.zero_grad()
        expected.backward(gradient, retain_graph=True)
        assert_same_gradients(sharded, plain)


def check_transformers() -> None:
    """A model of transformers returns its own output type, with logits as a DTensor."""
    model, inputs = gpt2(1)
    sharded = autoshard.compile(copy.deepcopy(model), Mesh({"data": ranks()}), constraints={"input:*": P("data")})
    with torch.no_grad():
        found, expected = sharded(**inputs), model(**inputs)
    assert type(found) is type(expected)
    assert isinstance(found.logits, DTensor)
    assert_close(found.loss, expected.loss, "loss")
    assert_close(found["logits"].full_tensor(), expected.logits, "logits")


def check_lengths() -> None:
    """Outputs of padded calls have the given length and the gradients of one device, also if split along the length."""
    for spec in (P("data"), P(None, "data")):
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 4)).eval()
        sharded = autoshard.compile(
            copy.deepcopy(model),
            Mesh({"data": ranks()}),
            constraints={"output:0": spec},
            options=autoshard.Options(dynamic_lengths={"input": 0}),
        )
        tokens = torch.arange(4 * 9).view(4, 9) % 5
        found, expected = sharded(tokens), model(tokens)
        assert isinstance(found, DTensor)
        assert_close(found.full_tensor().detach(), expected.detach(), "output")
        for network, output in ((sharded, found), (model, expected)):
            network.zero_grad()
            output.square().sum().backward()
        assert_same_gradients(sharded, model)


class Wide(nn.Module):
    """A model that returns a loss, and scores that the loss does not need."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.scores = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.up(x).tanh()
        return self.down(hidden).square().mean(), self.scores(hidden.detach())


def check_memory() -> None:
    """With `outputs="loss"`, measured and predicted peaks lack at least half of an unread output's bytes."""
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    peaks, predicted = {}, {}
    for outputs in ("all", "loss"):
        mesh = Mesh({"data": ranks()})
        sharded = autoshard.compile(
            Wide(), mesh, constraints=BY_ROWS, options=autoshard.Options(outputs=outputs, check="off")
        )
        assert isinstance(sharded, ShardedModule)

        def step(sharded: ShardedModule = sharded) -> None:
            sharded.zero_grad()
            result = sharded(x)
            (result if isinstance(result, torch.Tensor) else result[0]).backward()
            assert not isinstance(result, tuple) or result[1].to_local().shape == (16 // ranks(), 512)

        step()
        peaks[outputs] = peak_bytes_of(step, [*sharded.parameters(), x])
        assert sharded.plan is not None
        predicted[outputs] = sharded.plan.predicted.peak_memory_bytes
    for peak in (peaks, predicted):
        output = 16 // ranks() * 512 * 4
        assert peak["all"] - peak["loss"] >= output / 2, (peaks, predicted)  # without it the backward has the peak


def test_a_step_computes_the_loss_alone() -> None:
    """The program of a training step computes the loss alone, and evaluation returns all outputs."""
    x = torch.randn(8, 6)
    for kind in (torch.optim.SGD, torch.optim.RMSprop):
        model, plain = Wide(), Wide()
        step = autoshard.compile(model, Mesh({"data": 2}), optimizer=kind(model.parameters(), lr=0.1))
        assert isinstance(step, TrainStep)
        assert_close(step(x), plain(x)[0].detach(), "loss")
        assert step.sharded.program is not None
        traced = step.sharded.program.phased.lowered.traced
        assert [slot.name for slot in traced.outputs_of(OutputKind.OUTPUT)] == ["output:0"]
        assert not any("scores" in node.meta.get("module", "") for node in traced.graph.nodes)
        with torch.no_grad():
            assert step.sharded(x)[1].shape == (8, 512)


def _plan_with(options: autoshard.Options, x: torch.Tensor) -> autoshard.Plan:
    """Return the plan that `compile` makes for a `Wide` with the given options."""
    sharded = autoshard.compile(Wide(), Mesh({"data": 2}), example_inputs=(x,), options=options)
    assert isinstance(sharded, ShardedModule)
    assert sharded.program is not None
    assert sharded.program.plan is not None
    return sharded.program.plan


def test_what_was_planned_runs() -> None:
    """A plan of all outputs also runs with `outputs="loss"`; a plan of the loss alone is refused for all outputs."""
    x, mesh = torch.randn(8, 6), Mesh({"data": 2})
    every = autoshard.plan(Wide(), mesh, example_inputs=(x,), precision=None)
    alone = _plan_with(autoshard.Options(outputs="loss"), x)
    assert [name for name in alone.outputs if "output:" in name] == ["output output:0"]
    assert alone.predicted.launches < every.predicted.launches
    expected = Wide()(x)[0].detach()
    for plan in (every, alone):
        loss = autoshard.compile(Wide(), mesh, plan=plan, options=autoshard.Options(outputs="loss"))(x)
        assert_close(loss.detach(), expected, "loss")
    with pytest.raises(autoshard.PlanMismatchError, match=r"hands out the loss alone.*outputs='loss'"):
        autoshard.compile(Wide(), mesh, plan=alone)(x)
    whole_outputs = _plan_with(autoshard.Options(gather_outputs=True), x)
    assert whole_outputs.outputs["output output:1"] == P()


def test_words_are_checked() -> None:
    """Unknown values of `outputs` and `gather_outputs` raise an error that names them."""
    with pytest.raises(NotAvailableError, match="outputs='logits' must be 'all' or 'loss'"):
        autoshard.compile(Wide(), Mesh({"data": 2}), options=autoshard.Options(outputs="logits"))
    with pytest.raises(NotAvailableError, match="gather_outputs='no' is a str"):
        autoshard.compile(Wide(), Mesh({"data": 2}), options=autoshard.Options(gather_outputs="no"))  # type: ignore[arg-type]


CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        *(check_they_lie_as_planned, check_bytes_on_the_wire, check_whole, check_further_computation),
        *(check_both_ways_back, check_uneven, check_evaluation, check_errors_name_the_way_out, check_loss_alone),
        *(check_options_differ, check_partial_gradients, check_transformers, check_lengths, check_memory),
    )
}


test_on_two_processes = on_processes(CHECKS, ranks=2, sample=4)

test_on_four_processes = on_processes(CHECKS, ranks=4, slow=CHECKS)
