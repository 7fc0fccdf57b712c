"""Programs with a compute dtype: where they cast, and which values they leave uncast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.errors import NotAvailableError, TraceError
from autoshard.ir.program import OutputKind, Program
from autoshard.tracing import trace
from autoshard.tracing.precision import run_in_precision
from tests.tracing.running import run_program

BF16 = torch.bfloat16
CAST = torch.ops.aten._to_copy.default


def dtypes_of(program: Program) -> dict[str, torch.dtype]:
    """Return the dtype of each result of a program, by the result's kind and name, such as "output output:0"."""
    nodes = program.nodes_by_name()
    return {f"{slot.kind.value} {slot.name}": nodes[slot.node].meta["val"].dtype for slot in program.outputs}


def output_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the first output of a call, computed by the call's traced program in bfloat16."""
    return run_program(trace(model, inputs, compute_dtype=BF16), model, inputs)[OutputKind.OUTPUT, "output:0"]


class Block(nn.Module):
    """A model with a tied embedding, a float32 table of positions, a norm, a product, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.product, self.head = nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.randn(4, 8))

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(tokens) + self.positions
        hidden = hidden + self.product(self.norm(hidden))
        logits = self.head(hidden)
        return F.cross_entropy(logits.view(-1, 16), targets.view(-1)), logits


def block_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(0, 16, (2, 4), generator=generator) for _ in range(2))


def test_parameters_are_cast_once_where_they_are_used() -> None:
    """A parameter is cast once, right before its first use and in its own module, and its gradient right after it
    is computed."""
    program = trace(Block(), block_inputs(), compute_dtype=BF16)
    order = list(program.graph.nodes)
    casts = [node for node in order if node.target is CAST and node.args[0].op == "placeholder"]
    assert [node.args[0].name for node in casts].count("p_embed_weight") == 1
    for node in casts:
        assert node.meta["val"].dtype is BF16
        assert order.index(min(node.users, key=order.index)) == order.index(node) + 1 or node.next in casts
        assert f"p_{node.meta['module']}_" in node.args[0].name
    nodes = program.nodes_by_name()
    gradients = [nodes[slot.node] for slot in program.outputs_of(OutputKind.GRADIENT)]
    for node in gradients:
        between = order[order.index(node.args[0]) + 1 : order.index(node)]
        assert not any("mm" in str(other.target) for other in between)


def test_types_of_results() -> None:
    """Gradients have the parameters' float32, the loss is float32, and other outputs are bfloat16."""
    found = dtypes_of(trace(Block(), block_inputs(), compute_dtype=BF16))
    assert found.pop("output output:1") is BF16
    assert set(found.values()) == {torch.float32}


def test_a_program_computes_what_the_casts_do_on_one_device() -> None:
    """Loss and gradients equal one device's run with the same casts, to bfloat16's rounding."""
    model, inputs = Block(), block_inputs()
    program = trace(model, inputs, compute_dtype=BF16)
    found = {name: value for (_, name), value in run_program(program, model, inputs).items()}
    loss, logits = run_in_precision(model, BF16, *inputs)
    loss.backward()
    assert (loss.dtype, logits.dtype) == (torch.float32, BF16)
    torch.testing.assert_close(found["output:0"], loss, rtol=2**-7, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        close = torch.finfo(BF16).eps * float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=4 * close)


def test_the_loss_is_not_rounded() -> None:
    """Cross-entropy of bfloat16 logits has a float32 loss: plain, with class weights, or of probabilities."""
    logits = torch.randn(64, 16).to(BF16)
    targets = torch.randint(0, 16, (64,))
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.cross_entropy(x, targets),
        lambda x: F.cross_entropy(x, targets, weight=torch.linspace(0.5, 1.5, 16)),
        lambda x: F.cross_entropy(x, F.one_hot(targets, 16).float(), label_smoothing=0.1),
    ]
    for call in calls:

        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.logits = nn.Parameter(logits.float())

            def forward(self, call: Callable[[Tensor], Tensor] = call) -> Tensor:
                return call(self.logits)

        model = Loss()
        found = output_of(model, ())
        torch.testing.assert_close(found, call(logits.float()).detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(run_in_precision(model, BF16), call(logits.float()).detach(), rtol=1e-5, atol=0)


def test_a_loss_function_gets_float32() -> None:
    """With a loss function, the layer computes in bfloat16, and the loss gets float32 outputs and the
    uncast targets."""
    program = trace(nn.Linear(4, 3), (torch.randn(2, 4), torch.randn(2, 3)), loss_fn=F.mse_loss, compute_dtype=BF16)
    loss = next(node for node in program.graph.nodes if "mse_loss" in str(node.target))
    assert [operand.meta["val"].dtype for operand in loss.all_input_nodes] == [torch.float32, torch.float32]
    products = [node for node in program.graph.nodes if "addmm" in str(node.target)]
    assert [node.meta["val"].dtype for node in products] == [BF16]


def test_norms_with_running_statistics_keep_their_parameters() -> None:
    """Batch norm keeps float32 parameters and statistics, and only inputs and other parameters are cast."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    program = trace(model, (torch.randn(4, 3, 4, 4),), compute_dtype=BF16)
    cast = {node.args[0].name for node in program.graph.nodes if node.target is CAST}
    assert {"p_0_weight", "p_4_weight", "input_0"} <= cast
    assert not {"p_1_weight", "p_1_bias", "b_1_running_mean"} & cast
    assert dtypes_of(program)["buffer_update 1.running_mean"] is torch.float32


def test_a_norm_in_float64_is_refused_by_name() -> None:
    """Under a precision, a batch norm in float64 is refused by its name; without a precision it is traced."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(TraceError, match=r"precision=bfloat16: norm '1' \(BatchNorm1d\) has float64"):
        trace(model, (x,), compute_dtype=BF16)
    assert trace(model, (x,)).outputs


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_compute_narrowly(kind: type[nn.Module]) -> None:
    """A recurrent layer computes in bfloat16, although it reads its parameters from a list."""
    program = trace(kind(4, 4), (torch.randn(3, 2, 4),), compute_dtype=BF16)
    layer = next(node for node in program.graph.nodes if "autoshard" in str(node.target))
    assert layer.args[0].meta["val"].dtype is BF16
    assert layer.args[1].meta["val"].dtype is BF16


class Mixed(nn.Module):
    """A model of operators that need operands of one type, each applied to a float32 value and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("one", torch.ones(4))
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.conv, self.norm = nn.Conv1d(2, 2, 3, padding=1), nn.LayerNorm(4)
        self.groups, self.rms = nn.GroupNorm(1, 2), nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        found = [F.linear(x * self.one, self.weight), (x * self.one) @ self.weight]
        found.append(torch.einsum("bij,jk->bik", x * self.one, self.weight))
        found += [layer(x * self.one) for layer in (self.conv, self.norm, self.groups, self.rms)]
        found.append(F.scaled_dot_product_attention(x * self.one, x * self.one, x))
        assert all(item.dtype in (torch.float32, BF16) for item in found)
        return torch.stack([item.float() for item in found]).square().mean()


def test_operands_of_several_types_are_brought_to_the_narrow_one() -> None:
    """Operands of unlike types, which PyTorch refuses, are cast to bfloat16, and the output equals one device's with
    casts."""
    model, x = Mixed(), torch.randn(3, 2, 4)
    torch.testing.assert_close(output_of(model, (x,)), run_in_precision(model, BF16, x), rtol=2**-7, atol=0)


class Explicit(nn.Module):
    """A model with an explicit float32 product, as in a router of experts, beside a narrow product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.wide = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.narrow(x)
        return F.linear(hidden.float(), self.wide.weight.float()).square().mean()


def test_products_that_are_asked_for_in_float32_are_computed_so() -> None:
    """Explicit float32 products stay float32 in the program, forward and backward, as in a model
    converted to bfloat16."""
    model, x = Explicit(), torch.randn(16, 8)
    program = trace(model, (x,), compute_dtype=BF16)
    products = [node for node in program.graph.nodes if ".mm." in str(node.target) or "addmm" in str(node.target)]
    kinds = [{operand.meta["val"].dtype for operand in node.all_input_nodes} for node in products]
    assert sorted(kinds, key=str) == [{BF16}] * 2 + [{torch.float32}] * 3
    copied = Explicit().to(BF16)
    expected = copied(x.to(BF16))
    expected.backward()
    assert expected.dtype is torch.float32
    found = {name: value for (_, name), value in run_program(program, model, (x,)).items()}
    torch.testing.assert_close(found["output:0"], expected, rtol=1e-6, atol=0)
    for name, parameter in copied.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad.float(), rtol=2**-8, atol=1e-6)


def test_replaced_operators_come_back() -> None:
    """After a trace with a precision, and after a run on one device, PyTorch refuses unlike types as before."""
    model, x = Mixed(), torch.randn(3, 2, 4)
    trace(model, (x,), compute_dtype=BF16)
    run_in_precision(model, BF16, x)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(x, model.weight.to(BF16))


class Scaling(nn.Module):
    """A model that changes its weight in place, or counts in an assigned buffer."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            with torch.no_grad():
                self.weight.mul_(2)
        self.total = self.total + x.detach()
        return (self.weight * x + self.total).sum()


def test_a_parameter_changed_in_place_is_refused() -> None:
    """Under a precision, a parameter that forward changes in place is refused, and the error names the parameter."""
    with pytest.raises(TraceError, match=r"changes parameter 'weight' in place in forward, which under a precision"):
        trace(Scaling(in_place=True), (torch.ones(3),), compute_dtype=BF16)


def test_an_assigned_buffer_is_updated_in_its_own_type() -> None:
    found = dtypes_of(trace(Scaling(in_place=False), (torch.ones(3),), compute_dtype=BF16))
    assert found["buffer_update total"] is torch.float32


def test_frozen_parameters_are_cast_and_have_no_gradient() -> None:
    model = nn.Linear(4, 3)
    model.weight.requires_grad_(False)
    program = trace(model, (torch.randn(2, 4),), compute_dtype=BF16)
    assert [slot.name for slot in program.outputs_of(OutputKind.GRADIENT)] == ["bias"]
    assert {node.args[0].name for node in program.graph.nodes if node.target is CAST} >= {"p_weight", "p_bias"}


def test_what_only_dynamo_can_trace_is_refused() -> None:
    """A model that only Dynamo can trace is refused under a precision."""

    class Numpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * torch.from_numpy(x.numpy() ** 2)

    with pytest.raises(
        NotAvailableError, match=r"by way of Dynamo, where a precision is not available: leave precision out"
    ):
        trace(Numpy(), (torch.ones(3),), compute_dtype=BF16)


def test_a_call_that_nothing_can_trace_is_not_blamed_on_the_precision() -> None:
    """A call that no tracer can trace raises the call's own error, without blaming the precision."""
    with pytest.raises(TraceError, match=r"must have same reduction dim, but got \[3, 5\] X \[8, 16\]") as caught:
        trace(nn.Linear(8, 16), (torch.ones(3, 5),), compute_dtype=BF16)
    assert "leave precision out" not in str(caught.value)
