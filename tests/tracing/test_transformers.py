"""Models of transformers trace whole, and the traced graphs give their eager results."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from autoshard.ir.program import InputKind, OutputKind
from autoshard.tracing import check_guards, trace
from tests.models import build, words
from tests.tracing.running import assert_equals_eager, count_operators

pytestmark = pytest.mark.filterwarnings("ignore")


SIZES = {"layers": 2, "width": 16, "heads": 2, "inner": 24, "words": 32, "length": 32}
_gpt2, _llama, _bert = (partial(build, name, **SIZES) for name in ("gpt2", "llama", "bert"))
MODELS = pytest.mark.parametrize("make", [_gpt2, _llama, _bert], ids=["gpt2", "llama", "bert"])


def _batch(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**words(2, 8, 32), **more}


@pytest.mark.sample(2)
@MODELS
def test_loss_and_gradients_equal_eager(make: type) -> None:
    """Loss, logits and all gradients of the program equal the eager model's."""
    model, batch = make().eval(), _batch()
    assert_equals_eager(trace(model, (), batch), model, (), batch)


@MODELS
def test_attention_and_loss_stay_whole(make: type) -> None:
    """The program has one attention operator and one backward per layer, and one cross-entropy."""
    counts = count_operators(trace(make().train(), (), _batch()))
    assert counts["autoshard::attention"] == counts["autoshard::attention_backward"] == 2
    assert counts["autoshard::cross_entropy"] == counts["autoshard::cross_entropy_backward"] == 1
    assert not any("native_dropout" in name or "bernoulli" in name or "softmax" in name for name in counts)


def test_dropout_in_training_takes_the_seed() -> None:
    """GPT-2 in training has one seed and dropouts with distinct sites, and in evaluation no seed."""
    training = trace(_gpt2().train(), (), _batch())
    assert count_operators(training)["autoshard::dropout"] == 2 * (1 + 2 * 2)
    assert len(training.inputs_of(InputKind.SEED)) == 1
    sites = [
        node.args[3] for node in training.graph.nodes
        if "autoshard.dropout" in str(node.target) and node.meta["phase"] == "forward"
    ]  # fmt: skip
    assert sites == sorted(set(sites))
    assert not trace(_gpt2().eval(), (), _batch()).inputs_of(InputKind.SEED)


def test_tied_weights_are_one_parameter() -> None:
    """GPT-2's output layer is its embedding: one slot with an alias, one gradient."""
    program = trace(_gpt2(), (), _batch())
    names = {slot.name: slot.aliases for slot in program.inputs_of(InputKind.PARAMETER)}
    assert names["transformer.wte.weight"] == ("lm_head.weight",)
    assert "lm_head.weight" not in names
    assert [s.name for s in program.outputs_of(OutputKind.GRADIENT)].count("transformer.wte.weight") == 1


@pytest.mark.sample(1)
@MODELS
def test_a_model_on_meta_traces_to_the_same_text(make: type) -> None:
    """A model and inputs on the meta device give the text of the program of real ones."""
    with torch.device("meta"):
        meta = make().train()
    batch = {name: tensor.to("meta") for name, tensor in _batch().items()}
    assert trace(meta, (), batch).text() == trace(make().train(), (), _batch()).text()


def test_padding_is_guarded() -> None:
    """A mask of ones is not in the program but guarded, and a padded mask fails the guard and has eager's results when
    traced."""
    model = _llama().eval()
    full = _batch(attention_mask=torch.ones(2, 8, dtype=torch.long))
    padded = _batch(attention_mask=torch.ones(2, 8, dtype=torch.long).index_fill(1, torch.tensor([6, 7]), 0))
    program = trace(model, (), full)
    assert_equals_eager(program, model, (), full)
    assert check_guards(program, list(full.values()))
    assert not check_guards(program, list(padded.values()))
    assert_equals_eager(trace(model, (), padded), model, (), padded)


def test_nodes_know_their_module_and_line() -> None:
    """Attention nodes name their module and line in both phases, and every call names a line."""
    program = trace(_llama(), (), _batch())
    attentions = [node for node in program.graph.nodes if "autoshard.attention" in str(node.target)]
    assert [node.meta["module"] for node in attentions] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
        "model.layers.1.self_attn",
        "model.layers.0.self_attn",
    ]
    assert [node.meta["phase"] for node in attentions] == ["forward"] * 2 + ["backward"] * 2
    assert all(node.meta["source"].startswith("sdpa_attention.py:") for node in attentions)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert all(node.meta["source"] for node in calls)
