"""Calls that semantic operators support become one operator each, and other calls become ordinary operators with equal
results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoshard.errors import NotAvailableError, TraceError
from autoshard.ir.program import OutputKind
from autoshard.tracing import trace
from tests.tracing.running import assert_equals_eager, count_operators, run_program


class Call(nn.Module):
    """A model that applies a function to its parameter and the inputs."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(0)))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(self.weight, *args, **kwargs)


def _check(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], whole: str, is_whole: bool = True) -> None:
    program = trace(model, args, kwargs)
    counts = count_operators(program)
    assert (whole in counts) is is_whole, counts
    assert_equals_eager(program, model, args, kwargs)


_WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3), (5,)])
def test_cross_entropy_is_whole(reduction: str, smoothing: float, shape: tuple[int, ...]) -> None:
    """Hard targets of any shape, ignored targets included, become the semantic operator."""
    target = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if target.dim():
        target.view(-1)[1] = 3
        kwargs = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 3}
    else:
        kwargs = {"reduction": reduction, "label_smoothing": smoothing}
    _check(Call(F.cross_entropy, *shape), (target,), kwargs, "autoshard::cross_entropy")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["weights", "probabilities", "weighted probabilities"])
def test_other_cross_entropies_are_composites(reduction: str, smoothing: float, kind: str) -> None:
    """Cross-entropy with class weights or probabilities becomes ordinary operators with equal results."""
    target = torch.tensor([0, 1, 4, -100, 2, 2]) if kind == "weights" else torch.rand(6, 5).softmax(-1)
    weight = None if kind == "probabilities" else _WEIGHT
    kwargs = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
    _check(Call(F.cross_entropy, 6, 5), (target,), kwargs, "autoshard::cross_entropy", is_whole=False)


def _attend(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **kwargs)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "kwargs"),
    [
        ((2, 4, 3, 8), (2, 4, 5, 8), {}),
        ((2, 4, 3, 8), (2, 4, 5, 8), {"is_causal": True}),
        ((2, 4, 3, 8), (2, 2, 3, 8), {"is_causal": True, "enable_gqa": True}),
        ((2, 4, 3, 8), (2, 4, 5, 8), {"attn_mask": torch.rand(3, 5), "scale": 0.3}),
        ((2, 4, 3, 8), (2, 4, 5, 8), {"attn_mask": torch.rand(2, 1, 3, 5) > 0.4}),
        ((4, 3, 8), (4, 5, 8), {"attn_mask": torch.rand(4, 3, 5)}),
        ((3, 8), (5, 8), {}),
        ((2, 2, 4, 3, 8), (2, 2, 4, 5, 8), {"attn_mask": torch.rand(2, 2, 1, 3, 5)}),
        ((2, 2, 4, 3, 8), (2, 2, 4, 5, 8), {"attn_mask": torch.rand(2, 1, 3, 5)}),
        ((2, 3, 4, 3, 8), (2, 3, 4, 5, 8), {"attn_mask": torch.rand(2, 1, 1, 1, 5)}),
        ((2, 3, 4, 3, 8), (1, 3, 2, 5, 8), {"enable_gqa": True}),
        ((4, 3, 8), (2, 5, 8), {"enable_gqa": True, "attn_mask": torch.rand(4, 3, 5)}),
        ((2, 4, 3, 8), (2, 1, 5, 8), {}),
        ((2, 4, 3, 8), (5, 8), {}),
    ],
)
def test_attention_is_whole(q_shape: tuple[int, ...], k_shape: tuple[int, ...], kwargs: dict[str, Any]) -> None:
    """Attention with any leading dims, masks and head groups becomes one operator with eager's results."""
    keys = torch.randn(k_shape, requires_grad=True), torch.randn(k_shape, requires_grad=True)
    _check(Call(_attend, *q_shape), keys, kwargs, "autoshard::attention")


def test_a_mask_that_requires_grad_is_differentiated() -> None:
    """Attention with a mask that requires a gradient becomes ordinary operators, and the mask's gradient equals
    eager's."""
    model = Call(lambda mask, q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=mask), 3, 5)
    args = (torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8))
    _check(model, args, {}, "autoshard::attention", is_whole=False)


def test_norms_are_whole() -> None:
    """RMS norm and layer norm are one operator forward and one backward."""
    x = torch.randn(3, 4, requires_grad=True)
    _check(Call(lambda w, x: F.rms_norm(x, (4,), w, 1e-5), 4), (x,), {}, "_fused_rms_norm")
    _check(Call(lambda w, x: F.rms_norm(x, (4,), w), 4), (x,), {}, "_fused_rms_norm_backward")
    _check(Call(lambda w, x: F.layer_norm(x, (4,), w), 4), (x,), {}, "native_layer_norm")


@pytest.mark.parametrize("function", [F.dropout1d, F.dropout2d])
def test_channel_dropout(function: Callable[..., Tensor]) -> None:
    """With channel dropout, the gradient is 0 or 2 in a whole channel."""
    shape = (6, 5, 4) if function is F.dropout1d else (6, 5, 4, 2)
    model = Call(lambda w: function(w, 0.5, True), *shape)
    program = trace(model, ())
    gradient = run_program(program, model, ())[(OutputKind.GRADIENT, "weight")]
    assert count_operators(program)["autoshard::dropout"] >= 1
    per_channel = gradient.flatten(2)
    assert torch.equal(per_channel, per_channel[..., :1].expand_as(per_channel))
    assert set(gradient.unique().tolist()) == {0.0, 2.0}


def test_dropout_of_attention_takes_the_seed() -> None:
    """Attention with dropout takes the program's seed as an operand, and its site differs from that of another
    dropout."""
    keys = torch.randn(2, 4, 5, 8)
    model = Call(lambda q, k: F.dropout(_attend(q, k, k, dropout_p=0.1), 0.1), 2, 4, 5, 8)
    program = trace(model, (keys,))
    attention, dropout = (
        next(node for node in program.graph.nodes if name in str(node.target))
        for name in ("autoshard.attention", "autoshard.dropout")
    )
    assert attention.args[4].name == dropout.args[1].name == "seed"
    assert (attention.args[8], dropout.args[3]) == (0, 1)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_everything(p: float) -> None:
    """Dropout of p = 0 is the identity, dropout of p = 1 is zero, and neither is random."""
    model = Call(lambda w: F.dropout(w, p), 5)
    _check(model, (), {}, "autoshard::dropout", is_whole=False)


def test_operators_are_as_before_after_a_trace() -> None:
    """After a failed trace torch's dropout operator is as before."""
    before = dict(torch.ops.aten.dropout.default.py_kernels)
    with pytest.raises(TraceError, match="has no attribute"):
        trace(Call(lambda w: w.nothing, 3), ())
    assert torch.ops.aten.dropout.default.py_kernels == before


def _twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The squared gradient of the sum of squares of `function`, plus this sum."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value = function(x, *args, **kwargs).square().sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return gradient.square().sum() + value

    return call


def _by_transforms(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that sums squared gradients of `function` over rows, by `torch.func`'s transforms."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def one(row: Tensor) -> Tensor:
            return function(row[None].expand_as(x), *args, **kwargs).square().sum()

        return vmap(grad(one))(x).square().sum() + jacfwd(one)(x[0]).square().sum()

    return call


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, of jacfwd
@pytest.mark.parametrize("taken", [_twice, _by_transforms])
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: F.cross_entropy(x, torch.tensor([1, -100, 2]), label_smoothing=0.1), (3, 4)),
        (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 2]), reduction="none", weight=_WEIGHT), (3, 5)),
        (lambda x: F.cross_entropy(x, torch.full((3, 4), 0.25), label_smoothing=0.1), (3, 4)),
        (lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True), (2, 2, 3, 4)),
        (lambda x: F.rms_norm(x, (2, 4), eps=1e-3), (3, 2, 4)),
        (lambda x: F.layer_norm(x, (2, 4)), (3, 2, 4)),
        (lambda x: torch.ops.aten._fused_rms_norm(x, [4], torch.ones(4), 1e-3)[0], (3, 4)),
    ],
    ids=[
        "cross-entropy",
        "weighted cross-entropy",
        "soft targets",
        "attention",
        "RMS norm",
        "layer norm",
        "fused norm",
    ],
)
def test_derivatives_of_derivatives(
    taken: Callable[..., Any], function: Callable[..., Tensor], shape: tuple[int, ...]
) -> None:
    """Models with gradients of gradients, or with transforms, give eager's outputs and gradients."""
    with sdpa_kernel(SDPBackend.MATH):
        model = Call(taken(function), *shape)
        assert_equals_eager(trace(model), model, ())


def test_first_derivatives_stay_whole() -> None:
    """In a model with one gradient in its forward, both cross-entropies and their backwards stay semantic operators."""
    inner = _twice(lambda x: F.cross_entropy(x, torch.tensor([1, 0])))
    model = Call(lambda x: inner(x) + F.cross_entropy(x, torch.tensor([0, 1])), 2, 4)
    counts = count_operators(trace(model))
    assert (counts["autoshard::cross_entropy"], counts["autoshard::cross_entropy_backward"]) == (2, 2)


def test_a_missing_second_derivative_is_refused() -> None:
    """A second derivative of the CTC loss is refused, as in torch."""
    lengths = torch.tensor([5, 5]), torch.tensor([2, 2])
    model = Call(_twice(lambda x: F.ctc_loss(x.log_softmax(2), torch.tensor([[1, 2], [3, 1]]), *lengths)), 5, 2, 4)
    with pytest.raises(NotAvailableError, match="CTC loss has no second derivative"):
        trace(model)
