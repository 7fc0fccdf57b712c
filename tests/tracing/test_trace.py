"""`trace`: calls, slots, phases, names, and the errors."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from autoshard.errors import TraceError
from autoshard.ir.program import InputKind, OutputKind
from autoshard.tracing import check_guards, trace
from tests.tracing.running import assert_equals_eager, count_operators, run_program


class Mlp(nn.Module):
    """Two layers with a batch norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.down(self.norm(self.up(x)))


def test_buffers_are_updated() -> None:
    """Running statistics and assigned buffers, also non-persistent ones, are updates of the program."""
    model, x = Mlp(), torch.randn(6, 4)
    program = trace(model, (x,))
    assert {s.name for s in program.outputs_of(OutputKind.BUFFER_UPDATE)} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "calls",
    }
    assert_equals_eager(program, model, (x,))


def test_loss_fn_takes_the_last_inputs_as_targets() -> None:
    """`loss_fn(outputs, target)` gets the last positional input, and only the loss has a tangent."""
    model, x, y = Mlp().eval(), torch.randn(6, 4), torch.tensor([0, 1, 2, 3, -100, 1])
    program = trace(model, (x, y), loss_fn=nn.CrossEntropyLoss())
    assert [s.name for s in program.inputs_of(InputKind.TANGENT)] == ["tangent:0"]
    assert_equals_eager(program, model, (x, y), call=lambda x, y: nn.functional.cross_entropy(model(x), y))


@dataclasses.dataclass
class Batch:
    """A dataclass input and output."""

    x: Tensor
    scale: float
    parts: list[Tensor]


class Nested(nn.Module):
    """A model with nested inputs, outputs and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, batch: Batch, *, mode: str, extra: dict[str, Tensor]) -> dict[str, object]:
        y = self.weight * batch.x * batch.scale + batch.parts[0]
        if mode == "add":
            y = y + extra["bias"]
        return {"batch": Batch(y, 2.0, [y.sum(0), batch.parts[0]]), "nothing": None, "mode": mode}


def test_nested_inputs_and_outputs() -> None:
    """Dataclasses, dicts and lists are flattened, and leaves other than tensors are constants."""
    model = Nested()
    args = (Batch(torch.randn(2, 3), 0.5, [torch.randn(2, 3, requires_grad=True)]),)
    kwargs = {"mode": "add", "extra": {"bias": torch.randn(3)}}
    program = trace(model, args, kwargs)
    assert set(program.output_constants.values()) == {2.0, None, "add"}
    assert len(program.outputs_of(OutputKind.INPUT_GRADIENT)) == 1
    assert_equals_eager(program, model, args, kwargs)


class LossAndLogits(nn.Module):
    """Returns a loss and logits, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y.square().mean(), y


def test_tangents_are_for_losses_or_for_all() -> None:
    """A loss alone is differentiated by default, and all outputs or none on request."""
    model, x = LossAndLogits(), torch.randn(2, 3)
    assert [s.name for s in trace(model, (x,)).inputs_of(InputKind.TANGENT)] == ["tangent:0"]
    every = trace(model, (x,), all_tangents=True)
    assert [s.name for s in every.inputs_of(InputKind.TANGENT)] == ["tangent:0", "tangent:1"]
    assert_equals_eager(every, model, (x,))
    none = trace(model, (x,), grad=False)
    assert not none.inputs_of(InputKind.TANGENT)
    assert not none.outputs_of(OutputKind.GRADIENT)
    assert {node.meta["phase"] for node in none.graph.nodes if node.op == "call_function"} == {"forward"}


def test_the_forward_alone_is_that_of_training() -> None:
    """The program of `forward_only` has the operators of a forward with gradients enabled, and no backward."""

    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return (y.tanh() if torch.is_grad_enabled() else y).mean()

    model, x = Training(), torch.randn(2, 3)
    alone = trace(model, (x,), forward_only=True)
    assert count_operators(alone) == count_operators(trace(model, (x,), grad=False)) | {"tanh": 1}
    assert {slot.kind for slot in alone.outputs} == {OutputKind.OUTPUT}


def test_without_parameters_that_require_grad_there_is_no_backward() -> None:
    """A frozen model gives a forward-only program."""
    model = LossAndLogits().requires_grad_(False)
    program = trace(model, (torch.randn(2, 3),))
    assert {s.kind for s in program.outputs} == {OutputKind.OUTPUT}


def test_phases_split_at_the_tangent() -> None:
    """A forward node depends on forward nodes alone, and all gradients are backward nodes."""
    program = trace(Mlp(), (torch.randn(6, 4),))
    for node in program.graph.nodes:
        if node.op == "call_function" and node.meta["phase"] == "forward":
            assert all(operand.meta["phase"] == "forward" for operand in node.all_input_nodes)
    nodes = program.nodes_by_name()
    gradients = [nodes[slot.node] for slot in program.outputs_of(OutputKind.GRADIENT)]
    assert {node.meta["phase"] for node in gradients} == {"backward"}


def test_every_node_has_a_value_of_global_shape() -> None:
    """Each node except the output has its value as `val`."""
    program = trace(Mlp(), (torch.randn(6, 4),))
    assert all("val" in node.meta for node in program.graph.nodes if node.op != "output")


def test_lines_and_modules() -> None:
    """Products name their module, and their line in this file."""
    program = trace(Mlp(), (torch.randn(6, 4),))
    matmuls = [node for node in program.graph.nodes if node.target is torch.ops.aten.addmm.default]
    assert [node.meta["module"] for node in matmuls] == ["up", "down"]
    assert all(node.meta["source"].startswith("test_trace.py:") for node in matmuls)
    assert all(node.meta["source"].endswith(" in forward") for node in matmuls)


class Branch(nn.Module):
    """A model that branches on the values of its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.all():
            return self.layer(x).sum()
        return (self.layer(x) * mask[:, None]).sum()


def test_a_branch_on_values_is_guarded() -> None:
    """The branch that the example takes is traced with a guard, which a mask with the other outcome fails."""
    model, x = Branch(), torch.randn(3, 4)
    ones, some = torch.ones(3, dtype=torch.bool), torch.tensor([True, False, True])
    for mask, other in ((ones, some), (some, ones)):
        program = trace(model, (x, mask))
        assert_equals_eager(program, model, (x, mask))
        assert [guard.value for guard in program.guards] == [bool(mask.all())]
        assert "all" not in count_operators(program)
        assert check_guards(program, (x, mask))
        assert not check_guards(program, (x, other))


def test_without_values_a_branch_is_refused_with_its_line() -> None:
    """A branch on a mask on meta is refused with its line, because the mask has no values."""
    mask = torch.ones(3, dtype=torch.bool, device="meta")
    with pytest.raises(TraceError, match=r"test_trace\.py:\d+ in forward reads a value from a tensor"):
        trace(Branch(), (torch.randn(3, 4), mask))


class StateBranch(nn.Module):
    """A model that branches on the value of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate if self.gate.item() > 0.5 else x - self.gate


def test_a_branch_on_a_parameter_needs_the_state_to_check() -> None:
    """A guard on a parameter is checked against `state`, and checking without the state is refused."""
    model, x = StateBranch(), torch.randn(3)
    program = trace(model, (x,))
    assert check_guards(program, (x,), {"gate": torch.ones(())})
    assert not check_guards(program, (x,), {"gate": torch.zeros(())})
    with pytest.raises(TraceError, match=r"depend on .'gate'., which `state` does not hold"):
        check_guards(program, (x,))


class Numpy(nn.Module):
    """A model that computes with numpy, which does not run on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.from_numpy(np.tanh(x.numpy()))).sum()


class NumpyPair(nn.Module):
    """A model that computes with numpy and has two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.layer(torch.from_numpy(np.tanh(x.numpy()))) - target).square().sum()


def test_dynamo_keeps_inputs_apart_that_are_one_tensor() -> None:
    """With one tensor passed as both inputs, the program still has two inputs and works for different tensors."""
    model, x, target = NumpyPair(), torch.randn(2, 3), torch.randn(2, 3)
    program = trace(model, (x, x))
    assert program.digest() == trace(model, (x, target)).digest()
    assert_equals_eager(program, model, (x, target))


def test_dynamo_captures_what_fake_tensors_cannot_run() -> None:
    """A model with numpy calls is traced by Dynamo, with the model's own parameter names and eager's results."""
    model, x = Numpy(), torch.randn(2, 3)
    program = trace(model, (x,))
    assert [s.name for s in program.inputs_of(InputKind.PARAMETER)] == ["layer.weight", "layer.bias"]
    assert_equals_eager(program, model, (x,))


class Checkpointed(nn.Module):
    """A model with a dropout under an activation checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        body = nn.Sequential(self.layer, nn.Dropout(0.5))
        return checkpoint.checkpoint(body, x, use_reentrant=self.use_reentrant).sum()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_are_plain_calls(use_reentrant: bool) -> None:
    """A checkpointed dropout is traced once forward and once backward, with the same site."""
    program = trace(Checkpointed(use_reentrant), (torch.randn(4, 3),))
    drops = [node for node in program.graph.nodes if "autoshard.dropout" in str(node.target)]
    assert [node.args[3] for node in drops] == [0, 0]


def test_tied_parameters_have_aliases() -> None:
    """A parameter under two names is one slot, and its gradient is the sum."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3, bias=False)
            self.b = nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)).sum()

    model, x = Tied(), torch.randn(2, 3)
    program = trace(model, (x,))
    (slot,) = program.inputs_of(InputKind.PARAMETER)
    assert (slot.name, slot.aliases) == ("a.weight", ("b.weight",))
    assert_equals_eager(program, model, (x,))


def test_a_module_with_two_names_keeps_its_tensors() -> None:
    """A module with two names keeps its own buffers after a trace, and an assignment to a buffer is an update of the
    program."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.full((3,), 2.0))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return x * self.factor * self.count

    scale = Scale()
    model, held = nn.Sequential(nn.Linear(3, 3), scale, nn.Tanh(), scale), dict(scale.named_buffers())
    x = torch.randn(2, 3)
    program = trace(model, (x,))
    assert all(tensor is held[name] for name, tensor in scale.named_buffers())
    assert [slot.name for slot in program.outputs if slot.kind is OutputKind.BUFFER_UPDATE] == ["1.count"]
    assert_equals_eager(program, model, (x,))


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (nn.MultiheadAttention(8, 2, batch_first=True), [(2, 3, 8)] * 3),
        (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), [(2, 3, 8)]),
        (nn.LSTM(4, 5, batch_first=True), [(2, 3, 4)]),
        (nn.LSTM(4, 5, num_layers=2, bidirectional=True), [(3, 2, 4)]),
        (nn.GRU(4, 5), [(3, 2, 4)]),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2)), [(2, 3, 8, 8)]),
    ],
    ids=["multi-head attention", "encoder layer", "lstm", "deep lstm", "gru", "convolution"],
)
def test_modules_of_torch(model: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    """Modules of torch give eager's outputs and gradients."""
    args = tuple(torch.randn(shape) for shape in shapes)
    assert_equals_eager(trace(model, args), model, args)


_SCRIPT = """
from tests.tracing.test_trace import digest_of_two_traces
print(digest_of_two_traces())
"""


def digest_of_two_traces() -> str:
    """The digest of a small transformer, traced for the second time."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        x = torch.empty(2, 4, 8)
    trace(layer, (x,))
    return trace(layer, (x,)).digest()


@pytest.mark.slow  # programs lowered in two processes are compared in `make test`, see test_lower
def test_text_does_not_depend_on_the_process() -> None:
    """A process with another hash seed traces the same program, by its digest."""
    other = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest_of_two_traces()


def test_seeds_give_masks() -> None:
    """A seed determines the dropout mask, and unequal seeds give unequal masks."""
    model, x = nn.Dropout(0.5), torch.randn(50, requires_grad=True)
    program = trace(model, (x,))
    first, again, other = (run_program(program, model, (x,), seed=seed) for seed in (1, 1, 2))
    key = (OutputKind.OUTPUT, "output:0")
    assert torch.equal(first[key], again[key])
    assert not torch.equal(first[key], other[key])
    kept = first[key] != 0
    assert torch.equal(first[(OutputKind.INPUT_GRADIENT, "input:0")], kept * 2.0)


class _Failing(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(3))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "input":
            x.add_(1.0)
        if self.what == "parameter":
            with torch.no_grad():
                self.weight.add_(1.0)
        if self.what == "random":
            x = torch.ops.aten._fused_dropout(x, 0.5)[0]
        if self.what == "grad buffer":
            self.total.add_(self.weight)
        if self.what == "raise":
            raise ValueError("no such thing")
        return x * self.weight


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("input", r"changes input args\[0\] in place"),
        ("parameter", r"changes parameter 'weight' in place"),
        ("random", r"random operator aten\._fused_dropout\.default at test_trace\.py:\d+ in forward"),
        ("grad buffer", r"Buffer 'total' is updated in forward with a value that requires grad"),
        (
            "raise",
            r"Cannot trace _Failing: test_trace\.py:\d+ in forward raised ValueError: no such thing\. Call the model",
        ),
    ],
)
def test_refusals_name_the_mistake(what: str, message: str) -> None:
    """Each thing that a program cannot do is refused by name."""
    with pytest.raises(TraceError, match=message):
        trace(_Failing(what), (torch.randn(3),))


def test_opaque_inputs_are_refused() -> None:
    """An input object that may hold tensors is refused."""

    class Box:
        pass

    with pytest.raises(TraceError, match=r"Input args\[0\]\[1\] is an object of type .*Box"):
        trace(Mlp(), ([torch.randn(2, 4), Box()],))


def test_missing_targets_are_refused() -> None:
    """A loss function that takes more targets than the call has inputs is refused."""
    with pytest.raises(TraceError, match="takes 2 targets after the outputs"):
        trace(Mlp(), (torch.randn(2, 4),), loss_fn=lambda outputs, first, second: outputs.sum())


def test_no_noise_is_left() -> None:
    """The program has no detach, alias or copy."""
    counts = count_operators(trace(Mlp(), (torch.randn(6, 4),)))
    assert not counts.keys() & {"detach", "alias", "lift_fresh_copy", "copy"}


class _Reversed(torch.autograd.Function):
    """A function whose backward runs a backward of its own."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            torch.autograd.backward((x.detach() * weight), grad)
        return grad * weight, None


def test_a_backward_of_the_models_own_is_refused() -> None:
    """A model whose backward runs `torch.autograd.backward` is refused, because gradients would be missing from the
    program."""

    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return _Reversed.apply(x * self.scale, self.weight).sum()

    with pytest.raises(TraceError, match=r"runs torch\.autograd\.backward itself"):
        trace(Reversible(), (torch.ones(2, 4),))


def test_a_call_that_fails_is_reported_by_the_error_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A failing trace raises one error without records in torch's log, and the logger is enabled afterwards."""
    with pytest.raises(TraceError, match=r"a and b must have same reduction dim, but got \[2, 5\] X \[4, 3\]"):
        trace(nn.Linear(4, 3), (torch.ones(2, 5),))
    assert not caplog.records
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def test_lists_of_values_are_read() -> None:
    """`tolist` works on an input, whose values are then guarded, and on a constant. The results equal eager."""

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, grid: Tensor) -> Tensor:
            merges = torch.tensor([2]).expand(len(grid)).tolist()
            scales = [height * width * merge for (height, width), merge in zip(grid.tolist(), merges, strict=True)]
            return (x * self.weight).sum() * sum(scales)

    inputs = (torch.ones(4), torch.tensor([[1, 4], [2, 3]]))
    program = trace(Grid(), inputs)
    assert_equals_eager(program, Grid(), inputs)
    assert check_guards(program, list(inputs))
    assert not check_guards(program, [inputs[0], torch.tensor([[1, 4], [2, 2]])])
