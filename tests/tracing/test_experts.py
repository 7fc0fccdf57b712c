"""Expert layers of transformers become one operator each, for any implementation in the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import autoshard.kernels as kernels
from autoshard.ir.program import Program
from autoshard.tracing import trace
from tests.zoo.table import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's models


def traced(name: str, implementation: str = "grouped_mm", **config: Any) -> tuple[nn.Module, Program]:
    """A small model of an architecture, and its program."""
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.build()
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    for module in model.modules():
        for key, value in config.items():
            if hasattr(module, key):
                setattr(module, key, value)
    return model, trace(model, (), inputs)


def calls(program: Program, target: Any) -> int:
    """How often a program calls an operator."""
    return sum(node.target is target for node in program.graph.nodes)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss", "granitemoe", "phimoe", "ernie4_5_moe"]
)
def test_experts_are_one_operator(name: str) -> None:
    """Each layer has one operator in the forward and one in the backward, without sorting outside."""
    model, program = traced(name)
    layers = sum(hasattr(module, "_apply_gate") for module in model.modules())
    assert layers
    assert calls(program, kernels.experts) == calls(program, kernels.experts_backward) == layers
    assert not {str(node.target) for node in program.graph.nodes} & {"aten.sort.default", "aten.nonzero.default"}


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations_are_too(implementation: str) -> None:
    """A loop over experts, and a product for each token, also become one operator for each layer."""
    _, program = traced("mixtral", implementation)
    assert calls(program, kernels.experts) == 2


def test_a_layer_by_itself_is_too() -> None:
    """A layer of experts of transformers inside another model becomes the operator too."""
    config = MixtralConfig(hidden_size=16, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    program = trace(nn.Sequential(MixtralSparseMoeBlock(config)), (torch.zeros(2, 8, 16),), {})
    assert calls(program, kernels.experts) == 1


def test_an_unknown_gate_is_left_as_it_is() -> None:
    """With an activation that the operator lacks, the program has the model's own grouped products instead."""
    _, program = traced("mixtral", act_fn=nn.Softsign())
    assert calls(program, kernels.experts) == 0
    assert any("grouped_mm" in str(node.target) for node in program.graph.nodes)


def test_experts_are_taken_apart_where_that_is_asked_for() -> None:
    """With `whole_experts=False` the program has grouped products in place of the operator."""
    model, inputs = ARCHITECTURES["mixtral"].build()
    program = trace(model, (), inputs, whole_experts=False)
    assert calls(program, kernels.experts) == 0
    assert any("grouped_mm" in str(node.target) for node in program.graph.nodes)
