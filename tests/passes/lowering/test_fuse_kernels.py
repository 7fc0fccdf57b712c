"""Programs with kernels are proven equal to programs without kernels, and compute the same numbers."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoshard.errors import VerificationError
from autoshard.ir.boundary import shard_all
from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan_parts import NodePlan
from autoshard.ir.program import InputKind
from autoshard.ir.spec import PartitionSpec as P
from autoshard.kernels import triton_linear_cross_entropy
from autoshard.kernels.generated.define import generated_kernel
from autoshard.kernels.kernel import FusedKernel
from autoshard.kernels.registry import FUSED
from autoshard.runtime.simulator import simulate
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.fuse_kernels import FuseKernels
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.verification.verify_passes import verify_pass
from passes.verification.verify_phases import verify_phases
from tests.passes.blocks import Blocks, h100s
from tests.passes.launches import fused_calls

MESH = Mesh({"x": 2})


class Gated(nn.Module):
    """x + down(act(gate(norm(x))) up(norm(x))), with a norm of torch's own."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.norm, self.activation = nn.RMSNorm(8), activation
        self.enter, self.leave = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.enter(x)
        h = self.norm(x)
        gate = F.silu(self.gate(h)) if self.activation == "silu" else F.gelu(self.gate(h), approximate=self.activation)
        return self.leave(x + self.down(gate * self.up(h))).square().mean()


class Biased(nn.Module):
    """x + down(gelu(up(x) + bias)), before and after a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return (x + self.down(F.gelu(self.up(self.norm(x))))).square().mean()


def _lower(model: nn.Module) -> LoweredProgram:
    program = trace(model, (torch.randn(2, 3, 8),), {})
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(with_baselines=False))
    return lower_program(program, plan).lowered


def _phases(model: nn.Module, *, with_generated: bool = True) -> PhasedProgram:
    program = trace(model, (torch.randn(2, 3, 8),), {})
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(with_baselines=False))
    return lower_program(program, plan, options=LoweringOptions(with_kernels=True, with_generated=with_generated))


def _check_equal(lowered: LoweredProgram, fused: LoweredProgram, target: torch.Tensor | None = None) -> None:
    """Check that two programs have equal results on random inputs. `target` is the value of the input of integers."""
    values = []
    for slot in lowered.inputs:
        value = torch.ones(slot.shape) if slot.slot.kind == InputKind.TANGENT else torch.randn(slot.shape)
        if not slot.dtype.is_floating_point:
            assert target is not None, "this program has an input of whole numbers"
            value = target
        values.append(value)
    locals_ = [shard_all(value, slot.spec, MESH) for value, slot in zip(values, lowered.inputs, strict=True)]
    expected = simulate(lowered.graph_module, MESH, locals_)
    torch.testing.assert_close(simulate(fused.graph_module, MESH, locals_), expected, rtol=1e-4, atol=1e-4)


def test_norms_become_kernels_and_results_stay() -> None:
    """A layer norm and its residual addition become one kernel, and so do their backwards, with equal results."""
    torch.manual_seed(0)
    lowered = _lower(Blocks(8, 2))
    fused = FuseKernels()(lowered)
    assert fused_calls(fused.graph_module) == {
        "autoshard.triton_layer_norm.default": 1,
        "autoshard.triton_add_layer_norm.default": 1,
        "autoshard.triton_layer_norm_backward.default": 1,
        "autoshard.triton_add_layer_norm_backward.default": 1,
    }
    assert not fused_calls(lowered.graph_module)
    _check_equal(lowered, fused)


@pytest.mark.parametrize("activation", ["silu", "none", "tanh"])
def test_gated_units_become_one_kernel(activation: str) -> None:
    """SwiGLU and both GeGLUs become one kernel in each direction, and so does an RMS norm with its residual."""
    torch.manual_seed(0)
    lowered = _lower(Gated(activation))
    fused = FuseKernels()(lowered)
    assert fused_calls(fused.graph_module) == {
        "autoshard.triton_gated.default": 1,
        "autoshard.triton_gated_backward.default": 1,
        "autoshard.triton_add_rms_norm.default": 1,
        "autoshard.triton_add_rms_norm_backward.default": 1,
    }
    _check_equal(lowered, fused)


def test_gelu_takes_its_bias_along() -> None:
    """The GELU of a linear layer is one kernel that also adds the layer's bias, and so is its backward."""
    torch.manual_seed(0)
    lowered = _lower(Biased())
    fused = FuseKernels()(lowered)
    assert fused_calls(fused.graph_module)["autoshard.triton_bias_gelu.default"] == 2
    assert fused_calls(fused.graph_module)["autoshard.triton_bias_gelu_backward.default"] == 2
    _check_equal(lowered, fused)


def test_phases_with_kernels_verify() -> None:
    """Forward and backward contain kernels, the joint program contains none, and `verify_phases` proves them equal."""
    phased = _phases(Gated("silu"))
    assert fused_calls(phased.forward)
    assert fused_calls(phased.backward)
    assert not fused_calls(phased.lowered.graph_module)
    verify_phases(phased)


def test_what_hand_written_kernels_leave_can_be_left_to_others() -> None:
    """With `with_generated=False` there are only hand-written kernels, so that Inductor can fuse the other calls."""
    phased = _phases(Gated("silu"), with_generated=False)
    assert fused_calls(phased.forward)["autoshard.triton_gated.default"] == 1
    assert not [node for node in phased.forward.graph.nodes if generated_kernel(node.target)]
    assert [node for node in _phases(Gated("silu")).forward.graph.nodes if generated_kernel(node.target)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_over_a_split_vocabulary(smoothing: float) -> None:
    """Over a split vocabulary, the local part of cross-entropy between collectives is one kernel in each direction."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 12, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            target = torch.arange(6) * 2
            return F.cross_entropy(self.head(x.reshape(6, 8)), target, label_smoothing=smoothing)

    torch.manual_seed(0)
    program = trace(Head(), (torch.randn(2, 3, 8),), {})
    options = PlanOptions(with_baselines=False, constraints={"head.weight": P("x", None)})
    plan = plan_program(program, MESH, h100s(MESH), options)
    words = P(None, "x")
    split = {
        "cross_entropy": NodePlan((words, P()), (P(), P())),
        "cross_entropy_backward": NodePlan((P(), words, P(), P()), (words,)),
    }
    assert split.keys() <= plan.nodes.keys()
    plan = dataclasses.replace(plan, nodes={**plan.nodes, **split})
    phased = lower_program(program, plan, options=LoweringOptions(with_kernels=True))
    fused = FuseKernels()(phased.lowered)
    assert fused_calls(fused.graph_module) == {
        "autoshard.triton_split_cross_entropy.default": 1,
        "autoshard.triton_split_cross_entropy_backward.default": 1,
    }
    verify_phases(phased)
    _check_equal(phased.lowered, fused)


class Numbers(nn.Module):
    """A model with constants in the places of biases, residuals and gates, and a layer norm behind."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x.flatten(0, 1)) + 1
        x = self.norm(F.gelu(x) * 2.0 + 3)
        return (F.silu(self.enter(x)) * 2).square().mean()


def test_numbers_are_no_operands_of_kernels() -> None:
    """Calls with a constant operand stay out of hand-written kernels, and the layer norm next to them is a kernel."""
    torch.manual_seed(0)
    phased = _phases(Numbers())
    fused = FuseKernels()(phased.lowered)
    assert fused_calls(fused.graph_module) == {
        "autoshard.triton_layer_norm.default": 1,
        "autoshard.triton_layer_norm_backward.default": 1,
    }
    verify_phases(phased)
    _check_equal(phased.lowered, fused)


class Loss(nn.Module):
    """The mean cross-entropy of a linear layer over a norm, with the logits on request."""

    def __init__(self, dtype: torch.dtype, *, returns_logits: bool) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(8, dtype=dtype), nn.Linear(8, 40, bias=False, dtype=dtype)
        self.returns_logits = returns_logits

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        logits = self.head(self.norm(x)).float()
        loss = F.cross_entropy(logits.view(-1, 40), target.view(-1))
        return (loss, logits) if self.returns_logits else loss


@pytest.fixture
def _chunks_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the chunk size, so that a head of 40 classes has three chunks."""
    monkeypatch.setattr(triton_linear_cross_entropy, "LEAST_CLASSES", 16)


def _phases_of_loss(*shape: int, dtype: torch.dtype = torch.float32, returns_logits: bool = False) -> PhasedProgram:
    torch.manual_seed(0)
    model = Loss(dtype, returns_logits=returns_logits)
    program = trace(model, (torch.randn(*shape, 8, dtype=dtype), torch.randint(40, shape)), {})
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(with_baselines=False))
    return lower_program(program, plan, options=LoweringOptions(with_kernels=True))


@pytest.mark.usefixtures("_chunks_of_16")
@pytest.mark.parametrize("shape", [(4, 3), (6,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_never_holds_its_logits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A linear layer and its cross-entropy are one kernel per phase, and no value has the size of the logits."""
    phased = _phases_of_loss(*shape, dtype=dtype)
    assert fused_calls(phased.forward)["autoshard.triton_linear_cross_entropy.default"] == 1
    assert fused_calls(phased.backward)["autoshard.triton_linear_cross_entropy_backward.default"] == 1
    for phase in (phased.forward, phased.backward):
        values = [node.meta.get("val") for node in phase.graph.nodes]
        sizes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        assert not any(size[-1:] == (40,) for size in sizes)
    verify_phases(phased)


@pytest.mark.usefixtures("_chunks_of_16")
def test_a_loss_in_chunks_equals_the_whole() -> None:
    """Loss and gradients with the chunked kernel equal the values without the kernel."""
    phased = _phases_of_loss(4, 3)
    fused = FuseKernels()(phased.lowered)
    _check_equal(phased.lowered, fused, torch.arange(12).reshape(4, 3))


@pytest.mark.usefixtures("_chunks_of_16")
def test_logits_that_are_returned_are_not_made_twice() -> None:
    """If a model returns its logits, only its cross-entropy is a kernel, without the linear layer."""
    phased = _phases_of_loss(4, 3, returns_logits=True)
    calls = fused_calls(phased.forward) + fused_calls(phased.backward)
    assert not any("linear_cross_entropy" in name for name in calls)
    assert any("cross_entropy" in name for name in calls)


@pytest.mark.parametrize("mutation", ["swap", "constant", "form", "result"])
def test_wrong_kernels_do_not_verify(mutation: str) -> None:
    """Swapped operands, another activation, another form, or another result of a kernel is refused."""
    phased = _phases(Gated("silu"))
    (call,) = (node for node in phased.backward.graph.nodes if "gated_backward" in str(node.target))
    grad, gate, up, activation = call.args
    if mutation == "swap":
        call.args = (grad, up, gate, activation)
    elif mutation == "constant":
        call.args = (grad, gate, up, "gelu")
    elif mutation == "form":
        call.meta["form"] = 1
    else:
        first, second = (user for user in call.users if user.target is operator.getitem)
        first.args, second.args = second.args, first.args
    with pytest.raises(VerificationError):
        verify_phases(phased)


def test_what_is_read_elsewhere_stays() -> None:
    """A gated unit whose gate the model also returns is not fused, and the results stay equal."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(8, 16), nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            gate = F.silu(self.gate(x))
            return (gate * self.up(x)).square().mean(), gate

    torch.manual_seed(0)
    lowered = _lower(Returns())
    fused = FuseKernels()(lowered)
    assert "autoshard.triton_gated.default" not in fused_calls(fused.graph_module)
    _check_equal(lowered, fused)


def test_products_in_either_order_verify() -> None:
    """The product up * act(gate) becomes the same kernel as act(gate) * up, and the program verifies."""

    class Reversed(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            return (self.up(h) * F.silu(self.gate(h))).square().mean()

    program = trace(Reversed("silu"), (torch.randn(2, 3, 8),), {})
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(with_baselines=False))
    phased = lower_program(program, plan, options=LoweringOptions(with_kernels=True, on_pass=verify_pass))
    assert "autoshard.triton_gated.default" in fused_calls(phased.forward)
    verify_phases(phased)


@pytest.mark.parametrize("kernel", FUSED, ids=lambda kernel: kernel.name)
def test_every_form_says_what_each_argument_is(kernel: FusedKernel) -> None:
    """The form of a hand-written kernel names each argument as a variable or a constant."""
    for form in kernel.forms:
        shapes = [(2, 3, 8)] if form.dims is None else [tuple(range(2, 2 + form.dims))]
        for shape in shapes:
            constants = form.constants(torch.empty(shape))
            assert set(kernel.parameters) <= {*form.variables, *constants}


def test_every_form_has_the_kernels_results() -> None:
    """The variables of a form are arguments of its kernel or derived, and the remaining arguments are constants."""
    for kernel in FUSED:
        for form in kernel.forms:
            known = set(kernel.parameters) | set(form.derived_variables)
            assert set(form.variables) <= known
            assert set(form.constants(torch.empty(2, 3, 4, 6))) == set(kernel.parameters) - set(form.variables)
