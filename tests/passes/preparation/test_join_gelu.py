"""A GELU that is written in small operators becomes one operator with equal results.

It stays if an inner value has other users.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from autoshard.errors import VerificationError
from autoshard.ir.program import Program
from autoshard.tracing import trace
from passes.lowering.lower_program import prepare
from passes.preparation.canonicalize import Canonicalize
from passes.preparation.join_gelu import JoinGelu
from passes.preparation.rewriting import copy_program
from passes.verification.verify_preparation import verify_preparation

_aten = torch.ops.aten


class WrittenOut(nn.Module):
    """A linear layer, the tanh form of GELU in small operators, and a loss."""

    def __init__(self, cubic: float = 0.044715, returns_tanh: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.cubic, self.returns_tanh = cubic, returns_tanh

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, and tanh on request."""
        z = self.linear(x)
        half = 0.5 * z
        tanh = torch.tanh(math.sqrt(2.0 / math.pi) * (z + self.cubic * torch.pow(z, 3.0)))
        loss = (half * (1.0 + tanh)).square().mean()
        return (loss, tanh) if self.returns_tanh else loss


def traced(model: nn.Module, dtype: torch.dtype = torch.float32) -> Program:
    """The canonical program of a model."""
    torch.manual_seed(0)
    return Canonicalize()(trace(model.to(dtype), (torch.randn(3, 4, 6, dtype=dtype),), {}))


def called(program: Program) -> Counter[object]:
    """How often each operator is called."""
    return Counter(node.target for node in program.graph.nodes)


def run(program: Program) -> list[Tensor]:
    """The results of a program on drawn values."""
    numbers = torch.Generator().manual_seed(1)
    values = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    return list(program.graph_module(*(torch.randn(x.shape, generator=numbers, dtype=x.dtype) for x in values)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_written_out_gelu_is_one_operator(dtype: torch.dtype) -> None:
    """Forward and gradient of a written-out gelu become one call each, which is proven."""
    program = traced(WrittenOut(), dtype)
    joined = JoinGelu()(program)
    counts = called(joined)
    assert counts[_aten.gelu.default] == counts[_aten.gelu_backward.default] == 1
    assert counts[_aten.tanh.default] == counts[_aten.tanh_backward.default] == 0
    for before, after in zip(run(program), run(joined), strict=True):
        torch.testing.assert_close(after, before)
    verify_preparation(program, joined)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(WrittenOut(cubic=0.0447), torch.float32), (WrittenOut(), torch.bfloat16)],
    ids=["another constant", "a narrow type"],
)
def test_what_computes_otherwise_stays(model: nn.Module, dtype: torch.dtype) -> None:
    """Another constant in the formula, or bfloat16, in which small operators round, keeps the small operators."""
    counts = called(JoinGelu()(traced(model, dtype)))
    assert counts[_aten.gelu.default] == counts[_aten.gelu_backward.default] == 0
    assert counts[_aten.tanh.default] == counts[_aten.tanh_backward.default] == 1


def test_a_value_within_that_is_read_keeps_the_forward_written_out() -> None:
    """If the model also returns the inner tanh, the forward keeps its small operators, so that tanh runs once."""
    program = traced(WrittenOut(returns_tanh=True))
    joined = JoinGelu()(program)
    assert called(joined)[_aten.tanh.default] == 1
    assert not called(joined)[_aten.gelu.default]
    for before, after in zip(run(program), run(joined), strict=True):
        torch.testing.assert_close(after, before)
    verify_preparation(program, joined)


@pytest.mark.parametrize("target", [_aten.gelu.default, _aten.gelu_backward.default])
def test_another_gelu_is_refused(target: object) -> None:
    """The proof refuses the exact form of GELU in place of the tanh form."""
    program = traced(WrittenOut())
    wrong = copy_program(JoinGelu()(program))
    (node,) = (node for node in wrong.graph.nodes if node.target is target)
    node.kwargs = {"approximate": "none"}
    with pytest.raises(VerificationError, match="another value"):
        verify_preparation(program, wrong)


def test_models_of_transformers_call_it() -> None:
    """GPT-2's activation, written in small operators, becomes one operator in each of two layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, resid_pdrop=0.0, use_cache=False))
    words = torch.zeros(2, 5, dtype=torch.int64)
    counts = called(prepare(trace(model, (), {"input_ids": words, "labels": words})))
    assert counts[_aten.gelu.default] == counts[_aten.gelu_backward.default] == 2
    assert not counts[_aten.tanh.default]
