"""Higher-order operators are traced as plain calls of their functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as mapped
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import autoshard
from autoshard.errors import TraceError
from autoshard.tracing import trace
from tests.tracing.running import run_program

pytestmark = [  # torch's own, of Dynamo on one device
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Call(nn.Module):
    """A model of two matrices, a vector, and a given function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = function
        self.first, self.second = (nn.Parameter(torch.randn(8, 8, generator=generator) / 3) for _ in range(2))
        self.bias = nn.Parameter(torch.tensor([0.5, -0.25]))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def _inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _both(model: nn.Module, *inputs: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Loss and gradients on one device, and those of the compiled model."""
    found = []
    compiled: Any
    for compiled in (copy.deepcopy(model), autoshard.compile(model, autoshard.Mesh({"data": 2}))):
        loss = compiled(*inputs)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in compiled.parameters())])
    return found[0], found[1]


def _branches(model: Call, x: Tensor, flag: Tensor) -> Tensor:
    return torch.cond(flag.sum() > 0, lambda h: h @ model.first, lambda h: (h * 2 - 9).sqrt(), (x,)).sum()


def _nested(model: Call, x: Tensor, flag: Tensor) -> Tensor:
    def inner(h: Tensor, limit: Tensor) -> Tensor:
        return torch.cond(limit > 1, lambda g: g @ model.second, lambda g: g.sin(), (h,))

    return torch.cond(flag.sum() > 0, inner, lambda h, limit: h.cos(), (x @ model.first, flag.max())).square().sum()


def _of_parameters(model: Call, x: Tensor, flag: Tensor) -> Tensor:
    return torch.cond(model.first.sum() * flag.sum() > 0, lambda h: h @ model.second, torch.sin, (x,)).sum()


def _of_rows(model: Call, x: Tensor, flag: Tensor) -> Tensor:
    def of_row(row: Tensor) -> Tensor:
        return torch.cond(row.sum() > flag.sum(), lambda h: h @ model.first, lambda h: h * 2.0, (row,))

    return torch.vmap(of_row)(x).square().sum()


def _scanned(model: Call, x: Tensor, flag: Tensor) -> Tensor:
    def step(carry: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(carry @ model.first + item), carry * 2

    last, steps = scan(step, torch.zeros_like(x), torch.stack([x, x + flag[0], x - 1]))
    return last.square().sum() + steps.sum()


def _mapped(model: Call, x: Tensor, flag: Tensor) -> Tensor:
    run: Any = mapped
    return run(lambda row, matrix: (row @ matrix).relu(), x, model.first).square().sum() * flag[0]


def _prefixes(model: Call, x: Tensor, flag: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b + b, x @ model.first * flag[0], 0, combine_mode="generic").sum()


@pytest.mark.sample(7)
@pytest.mark.parametrize("flag", [1.0, -1.0])
@pytest.mark.parametrize("function", [_branches, _nested, _of_parameters, _of_rows, _scanned, _mapped, _prefixes])
def test_control_flow(function: Callable[..., Tensor], flag: float) -> None:
    """Losses and gradients of control flow equal one device's, for either value of the predicate."""
    expected, found = _both(Call(function), _inputs(4, 8).abs() + 5, torch.full((3,), flag))
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_predicate_that_changes() -> None:
    """A compiled model whose predicate changes from call to call equals the eager model in each call."""
    model = Call(_nested)
    compiled = autoshard.compile(copy.deepcopy(model), autoshard.Mesh({"data": 2}))
    for flag in (1.0, -1.0, 2.0, 1.0):
        inputs = _inputs(4, 8), torch.full((3,), flag)
        torch.testing.assert_close(compiled(*inputs), model(*inputs))


def test_a_loop_without_gradients() -> None:
    """A while loop without gradients runs 3, 0 and 1 times in one compiled model, as its input says."""

    def loop(model: Call, x: Tensor, last: Tensor) -> Tensor:
        with torch.no_grad():
            return while_loop(lambda i, h: i < last, lambda i, h: (i + 1, h * 2), (torch.tensor(0), x))[1]

    compiled = autoshard.compile(Call(loop), autoshard.Mesh({"data": 2}))
    for times in (3, 0, 1):
        assert compiled(torch.ones(4), torch.tensor(times)).tolist() == [2.0**times] * 4


def test_the_derivative_of_a_loop_is_refused() -> None:
    """A while loop on values that require gradients is refused, because torch's derivative differs from that of the
    steps."""

    def loop(model: Call, x: Tensor) -> Tensor:
        return while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, h @ model.first), (torch.tensor(0), x))[1]

    with pytest.raises(TraceError, match=r"while_loop on values that require grad.*Write the loop in Python"):
        trace(Call(loop), (torch.ones(4, 8),))


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _strict(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i > j


def _tanh(model: Call) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: 5 * torch.tanh(score / 5)


def _slopes(model: Call) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score + model.bias[h] * (i - j)


def _table(model: Call) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score * model.second[i, j - 8] + model.first[h, 1] + model.first[j].sum(-1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor] | None, mask_mod: Callable[..., Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of attention, from its definition."""
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / q.size(-1) ** 0.5
    places = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    scores = scores if score_mod is None else score_mod(scores, *places)
    scores = scores if mask_mod is None else torch.where(mask_mod(*places), scores, -1e30)
    weights = torch.softmax(scores, -1) * (scores > -1e29).any(-1, keepdim=True)
    return weights @ v.repeat_interleave(2, 1), scores.logsumexp(-1)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("make_score", "mask_mod"),
    [(None, None), (None, _causal), (None, _strict), (_tanh, None), (_slopes, _strict), (_table, _causal)],
)
def test_flex_attention(
    make_score: Callable[[Call], Callable[..., Tensor]] | None, mask_mod: Callable[..., Tensor] | None
) -> None:
    """Flex attention with functions of scores and masks, and grouped heads, equals its definition,
    gradients included."""

    def run(model: Call, x: Tensor, *, ours: bool) -> Tensor:
        q, k, v = (x @ model.first).unflatten(1, (8, 2)).transpose(1, 2), x[:, None] @ model.first, x[:, None, :8].sin()
        k = k[:, :, :8]
        score = None if make_score is None else make_score(model)
        if not ours:
            out, lse = _attention(q, k, v, score, mask_mod)
        else:
            mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, 8, 8, device="cpu")
            wanted = AuxRequest(lse=True)
            out, aux = flex_attention(q, k, v, score, mask, enable_gqa=True, return_aux=wanted)
            lse = aux.lse
            assert lse is not None
            assert out.stride() == q.stride()
        return out.square().sum() + lse[:, :, 1:].sum()

    x = _inputs(2, 16, 8)
    model = Call(lambda model, x: run(model, x, ours=True))
    expected = run(model, x, ours=False)
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    compiled: Any = autoshard.compile(model, autoshard.Mesh({"data": 2}))
    loss = compiled(x)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([p.grad for p in compiled.parameters()], list(gradients))


def test_flex_attention_is_attention() -> None:
    """Flex attention without a function of scores becomes the attention operator, with causal attention's result."""
    mask = create_block_mask(_causal, None, None, 8, 8, device="cpu")
    model = Call(lambda model, x: flex_attention(x @ model.first, x, x, block_mask=mask))
    x = _inputs(2, 2, 8, 8)
    program = trace(model, (x,))
    assert sum(node.target is torch.ops.autoshard.attention.default for node in program.graph.nodes) == 1
    assert not any(node.target is torch.ops.aten.exp.default for node in program.graph.nodes)
    (result, *_) = run_program(program, model, (x,)).values()
    expected = F.scaled_dot_product_attention(x @ model.first, x, x, is_causal=True)
    torch.testing.assert_close(result, expected)
