"""PyTorch's random operators in a trace become autoshard's operators, which take a seed, or are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.errors import TraceError
from autoshard.ir.program import InputKind, Program
from autoshard.tracing import trace
from autoshard.tracing.random_numbers import RANDOM_OPERATORS
from tests.end_to_end.random_models import FAMILIES, Drawing

_OURS = ("autoshard.random", "autoshard.dropout", "autoshard.poisson", "autoshard.binomial", "autoshard.gamma")


class _Does(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def _traced(function: Callable[[Tensor], Tensor]) -> Program:
    return trace(_Does(function), (torch.randn(4, 6),))


def _draws(program: Program) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if str(node.target).startswith(_OURS)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_draw_has_a_number_of_its_own(family: str) -> None:
    """A program has one seed as input, each draw has another site, and no operator draws from a generator."""
    program = trace(Drawing(FAMILIES[family], 6), (torch.randn(4, 6),))
    calls = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not [call for call in calls if torch.Tag.nondeterministic_seeded in call.tags]
    assert len(program.inputs_of(InputKind.SEED)) == 1
    forward = [node for node in _draws(program) if node.meta["phase"] == "forward"]
    sites = [node.args[3 if "autoshard.random" in str(node.target) else -3] for node in forward]
    assert len(forward) >= len(FAMILIES[family]) - 1  # evaluation draws nothing
    assert len(set(sites)) == len(sites)


_DECOMPOSED = re.compile(r"(feature_)?(alpha_)?dropout|rrelu.*|gru|lstm|rnn_(tanh|relu)|scaled_dot_product_attention")
"""Operators that PyTorch decomposes before a trace, or that `tracing.semantic` keeps whole."""


def _random_operators() -> set[str]:
    """Return the names of PyTorch's random operators, without the underscore of in-place operators."""
    found = set()
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        name, _, overload = name.partition(".")
        if namespace in ("aten", "prims", "rngprims"):
            operator = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
            if torch.Tag.nondeterministic_seeded in operator.tags:
                found.add(name.rstrip("_") if namespace == "aten" else f"{namespace}.{name}")
    return found


def test_every_random_operator_is_drawn_or_named() -> None:
    """Each random operator of PyTorch is traced, decomposed, or listed on the page of randomness as refused."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "randomness.md").read_text().partition("## Refused")[2]
    patterns = [
        re.compile(re.escape(name.rstrip("_")).replace(r"\*", ".*")) for name in re.findall(r"`([\w.*]+)`", page)
    ]
    missing = {
        name
        for name in _random_operators() - RANDOM_OPERATORS
        if not _DECOMPOSED.fullmatch(name) and not any(pattern.fullmatch(name) for pattern in patterns)
    }
    assert not missing
    assert len(RANDOM_OPERATORS) > 20


def test_a_draw_knows_its_line_and_module() -> None:
    """A draw's node has the line of the model and the shape of the numbers."""
    (node,) = _draws(_traced(lambda h: h + torch.randn_like(h)))
    assert node.meta["source"].startswith("test_random_numbers.py:")
    assert node.meta["val"].shape == (4, 6)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda h, generator: h + torch.rand(6, generator=generator), "rand.generator"),
        (lambda h, generator: h + torch.empty(6).normal_(generator=generator), "normal_.default"),
        (lambda h, generator: h * torch.bernoulli(h.detach().sigmoid(), generator=generator), "bernoulli.default"),
        (lambda h, generator: h * torch.randperm(6, generator=generator), "randperm.generator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_generators_are_refused(draw: Callable[[Tensor, torch.Generator], Tensor], name: str) -> None:
    """A generator as an argument is refused with the operator, the line and the way out. The default generator is
    allowed."""
    message = rf"calls aten\.{name} at test_random_numbers\.py:\d+ in <lambda> with generator=.*Leave generator= out"
    with pytest.raises(TraceError, match=message):
        _traced(lambda h: draw(h, torch.Generator()))
    assert _draws(_traced(lambda h: draw(h, torch.default_generator)))


def test_seeds_are_set_outside_the_model() -> None:
    """Setting a seed inside forward is refused with the line, because each call would then draw equal numbers on one
    device."""

    def draw(h: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return h + torch.randn_like(h)

    with pytest.raises(
        TraceError, match=r"seeds PyTorch's generator in forward at test_random_numbers\.py:\d+ in draw"
    ):
        _traced(draw)
    torch.manual_seed(0)  # as ever


def test_other_random_operators_are_refused() -> None:
    """A random operator without a form is refused, with the page that lists the refused operators."""
    with pytest.raises(TraceError, match=r"operator aten\._fused_dropout\.default at .*reference/randomness\.md"):
        _traced(lambda h: torch.ops.aten._fused_dropout(h, 0.5)[0])


class _NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + torch.rand_like(grad)


def test_draws_of_a_backward_are_refused() -> None:
    """A random operator in a custom backward is refused by name."""
    with pytest.raises(TraceError, match=r"random operator aten\.rand_like\.default"):
        _traced(_NoisyBackward.apply)


def test_attention_that_drops_nothing_is_not_random() -> None:
    """PyTorch's flash attention, called by name, is traced without dropout and refused with dropout."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    assert not _draws(_traced(lambda h: attend(h[None, None], h[None, None], h[None, None])[0]))
    with pytest.raises(TraceError, match=r"random operator aten\._scaled_dot_product_flash_attention_for_cpu"):
        _traced(lambda h: attend(h[None, None], h[None, None], h[None, None], dropout_p=0.5)[0])


def test_parameters_out_of_range_are_refused() -> None:
    """A negative standard deviation is refused in the trace, with the given parameters."""
    with pytest.raises(TraceError, match=r"normal numbers need std >= 0; got 0\.0, -1\.0"):
        _traced(lambda h: h + torch.empty(6).normal_(0.0, -1.0))


def test_numbers_lie_in_memory_as_those_of_pytorch() -> None:
    """`rand_like` of a transposed tensor is traced as transposed, so that a view of it works as in PyTorch."""
    program = _traced(lambda h: h.t() + torch.rand_like(h.t()).t().reshape(-1).view(4, 6).t())
    assert len(_draws(program)) == 1


def test_native_dropout_trains_unless_told_otherwise() -> None:
    """`torch.native_dropout` draws with `train` True or None, and does not draw with False."""
    for train, draws in ((None, 1), (True, 1), (False, 0)):
        assert len(_draws(_traced(lambda x, train=train: torch.native_dropout(x, 0.5, train)[0]))) == draws
