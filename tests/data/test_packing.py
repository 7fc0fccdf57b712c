"""Documents that share a row train like separate documents, however batch, heads and sequence are split."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import default_collate

import autoshard
from autoshard import AutoshardError, Mesh, P
from autoshard.data import PackedRows, document_mask, pack
from autoshard.testing import check_plan, plans
from autoshard.tracing import trace
from tests.models import build

WORDS, LENGTH, WIDTH, HEADS = 32, 8, 16, 4


@given(lengths=st.lists(st.integers(1, 30), max_size=60), more=st.integers(0, 20))
def test_each_document_is_in_one_row(lengths: list[int], more: int) -> None:
    """Each document is in one row, no row is longer than the length, and no two rows would fit into one."""
    length = max(lengths, default=1) + more
    rows = pack(lengths, length)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[document] for document in row) for row in rows)
    assert all(0 < size <= length for size in sizes)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > length


def test_the_best_fit_is_taken() -> None:
    """A document goes into the row with the least space, not into the first row with space."""
    assert pack([6, 5, 3, 3, 2], 9) == [[0, 2], [1, 3], [4]]
    assert pack([7, 5, 3, 2], 9) == [[0, 3], [1, 2]]
    assert pack([], 9) == []
    assert len(pack([1] * 10_000, 4096)) == 3


@pytest.mark.parametrize("of", [np.asarray, partial(np.asarray, dtype=np.uint16), torch.tensor])
def test_lengths_may_be_an_array(of: Any) -> None:
    """Lengths in a NumPy array or a tensor are packed like a list."""
    lengths = [30, 50, 80, 60, 20]
    assert pack(of(lengths), of(80)) == pack(lengths, 80) == [[2], [3, 4], [0, 1]]


@pytest.mark.parametrize(
    ("lengths", "words"),
    [([3, 10], "document 1 has 10 tokens, and a row has 9. Cut"), ([3, 0], "document 1 has 0 tokens. Leave empty")],
)
def test_documents_that_fit_no_row_are_refused(lengths: list[int], words: str) -> None:
    """A document that is empty or longer than a row is refused by its number."""
    with pytest.raises(AutoshardError, match=words):
        pack(lengths, 9)


def test_rows_have_the_asked_tensors() -> None:
    """Rows have labels, document numbers and masks for the asked names, and an unknown name is refused."""
    documents = [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": torch.tensor([8, 9])}]
    rows = PackedRows(documents, 6, padding=3, keys=("input_ids", "labels", "document_ids", "attention_mask"))
    (row,) = [rows[index] for index in range(len(rows))]
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 3]
    assert row["labels"].tolist() == [-100, -100, 7, -100, 9, -100]
    assert row["document_ids"].tolist() == [0, 0, 0, 1, 1, -1]
    assert row["attention_mask"].shape == (1, 6, 6)
    assert row["attention_mask"].sum() == 6 + 3 + 1
    assert PackedRows([[1, 2], [3]], 2, lengths=[2, 1]).rows == [[0], [1]]
    with pytest.raises(AutoshardError, match="'mask' is none of input_ids"):
        PackedRows(documents, 6, keys=("mask",))


@pytest.mark.parametrize(
    ("document", "lengths", "words"),
    [
        (
            {"input_ids": [5, 6], "labels": [5]},
            None,
            "document 0 has 2 tokens and 1 labels, and was packed as 2 tokens",
        ),
        ([5, 6], [1], "document 0 has 2 tokens and 2 labels, and was packed as 1 tokens"),
    ],
)
def test_documents_of_other_lengths_are_refused(document: Any, lengths: list[int] | None, words: str) -> None:
    """A document with another number of labels than tokens, or of another length than given, is refused."""
    with pytest.raises(AutoshardError, match=words):
        PackedRows([document], 4, lengths=lengths)[0]
    with pytest.raises(AutoshardError, match="there are 2 lengths of 1 documents"):
        PackedRows([document], 4, lengths=[2, 2])


class Attends(nn.Module):
    """A decoder of one block, in whose attention a token sees only its own document."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, document_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(position_ids)
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(document_ids))
        logits = self.head(torch.tanh(x + self.out(mixed.transpose(1, 2).flatten(2))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Loss(nn.Module):
    """A model of transformers whose output is the loss."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = build("llama", layers=2, width=WIDTH, inner=32, heads=HEADS, words=WORDS)
        self.model.set_attn_implementation(attention)  # type: ignore[operator]

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).loss


KINDS = {
    "mask of documents": (Attends, ("input_ids", "position_ids", "labels", "document_ids")),
    "transformers": (lambda: Loss("sdpa"), ("input_ids", "position_ids", "labels")),
    "transformers, eager": (lambda: Loss("eager"), ("input_ids", "position_ids", "labels")),
    "transformers, mask": (lambda: Loss("sdpa"), ("input_ids", "position_ids", "labels", "attention_mask")),
}
SPLITS: dict[str, tuple[dict[str, int], P, int]] = {
    "data": ({"data": 4}, P("data"), 1),
    "tensor": ({"model": 4}, P(), 1),
    "sequence": ({"sequence": 4}, P(None, "sequence"), 1),
    "data and sequence": ({"data": 2, "sequence": 2}, P("data", "sequence"), 1),
    "sequence in micro-batches": ({"sequence": 2}, P(None, "sequence"), 2),
    "data in micro-batches": ({"data": 2}, P("data"), 2),
}


def documents() -> list[Tensor]:
    """Seven documents, which fill three rows and most of a fourth."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, WORDS, (size,), generator=generator) for size in (3, 5, 8, 6, 2, 4, 2)]


@cache
def apart(kind: str) -> tuple[float, dict[str, Tensor]]:
    """The loss and gradients of separate documents on one device, as a mean over all predicted tokens."""
    make, keys = KINDS[kind]
    model, total, count = make(), torch.zeros(()), sum(len(each) - 1 for each in documents())
    for document in documents():
        (row,) = PackedRows([document], len(document), keys=keys)
        total = total + model(**default_collate([row])) * (len(document) - 1) / count
    total.backward()
    return total.item(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.sample(4)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_train_as_documents_apart(kind: str, split: str) -> None:
    """Loss and gradients of packed rows under each split equal those of the separate documents."""
    axes, spec, parts = SPLITS[split]
    make, keys = KINDS[kind]
    expected, gradients = apart(kind)
    model, before = make(), copy.deepcopy(make())
    flat = [number for number, key in enumerate(sorted(keys)) if key != "attention_mask"]  # as calls flatten them
    constraints = {} if spec == P() else {f"input:{number}": spec for number in flat}
    if "model" in axes:
        constraints = {"*q.weight": P("model"), "*q_proj.weight": P("model")}
        constraints = {name: each for name, each in constraints.items() if ("proj" in name) == (kind[0] == "t")}
    step = autoshard.compile(
        model,
        Mesh(axes),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        micro_batches=parts,
        constraints=constraints,
        time_budget_s=3,
    )
    rows = PackedRows(documents(), LENGTH, keys=keys)
    assert len(rows) == 4
    (batch,) = autoshard.data.loader(rows, step, batch_size=4)
    torch.testing.assert_close(float(step(**batch)), expected, rtol=1e-5, atol=1e-6)
    after = dict(step.sharded.named_parameters())
    for name, value in before.named_parameters():
        torch.testing.assert_close((value - after[name]).detach(), gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=3)
def test_any_plan_of_packed_rows_equals_one_device(data: st.DataObject) -> None:
    """Under any plan, packed rows give the results of one device."""
    mesh = data.draw(st.sampled_from([Mesh({"data": 2}), Mesh({"data": 2, "sequence": 2})]))
    model, rows = Attends(), PackedRows(documents(), LENGTH, keys=KINDS["mask of documents"][1])
    inputs: dict[str, Any] = dict(sorted(default_collate([rows[index] for index in range(len(rows))]).items()))
    plan = data.draw(plans(trace(model, (), inputs), mesh))
    check_plan(model, mesh, inputs, plan=plan, precise=torch.float64).raise_if_different()
