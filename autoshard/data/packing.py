"""Sequence packing: several documents share a row, and attention, positions and losses keep to each document.

`pack` follows best-fit decreasing, as in "Worst-case performance bounds for simple one-dimensional packing algorithms"
(Johnson, Demers, Ullman, Garey, Graham, 1974). Its rows are at most 11/9 of the fewest possible rows, and 4 more. Ding
et al. (2024), "Fewer truncations improve language modeling", pack documents by best fit. The steps are:

1. Take the documents by length, the longest first; equal lengths by index.
2. Put the document into the row with the least space that fits it, or into a new row.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch

from autoshard.errors import NotAvailableError

KEYS = ("input_ids", "position_ids", "labels", "document_ids", "attention_mask")
IGNORED = -100
"""The label that cross-entropy leaves out."""
_PADDING_DOCUMENT = -1


def pack(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Return which documents share a row: for each row the indices of its documents, in their order.

    Args:
        lengths: the number of tokens of each document.
        length: the number of tokens of a row.

    Raises:
        NotAvailableError: a document is longer than a row, or empty.

    Example:
        >>> pack([3, 5, 8, 6, 2], 8)
        [[2], [3, 4], [0, 1]]
    """
    sizes, length = list(map(index, lengths)), index(length)  # shifts of NumPy's integers end at 64 bits
    rows: list[list[int]] = []
    with_space: defaultdict[int, deque[int]] = defaultdict(deque)
    spaces = 0  # bit s is set if a row has space s
    for document in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        needed = sizes[document]
        _check_length(document, needed, length)
        fitting = spaces >> needed
        if fitting:
            space = needed + (fitting & -fitting).bit_length() - 1
            row = with_space[space].popleft()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, row = length, len(rows)
            rows.append([])
        rows[row].append(document)
        with_space[space - needed].append(row)
        spaces |= 1 << (space - needed)
    return [sorted(row) for row in rows]


def _check_length(document: int, found: int, length: int) -> None:
    if found > length:
        raise NotAvailableError(
            f"pack(...): document {document} has {found} tokens, and a row has {length}. Cut the document into pieces, "
            "or pack longer rows."
        )
    if found < 1:
        raise NotAvailableError(f"pack(...): document {document} has {found} tokens. Leave empty documents out.")


class PackedRows:
    """A dataset of rows of `length` tokens, each with several documents, for `autoshard.data.loader`.

    A row is a dict of tensors:

    * `input_ids`, [length];
    * `position_ids`, [length], which begin at 0 in each document;
    * `labels`, [length], unshifted, as transformers' models take them. The first token of a document has the label
      -100, because no token of its document predicts it;
    * `document_ids`, [length], the number of the document within its row; -1 for padding;
    * `attention_mask`, [1, length, length], true where a token may attend.

    transformers' models with `attn_implementation="sdpa"` or "eager" attend within documents if they get `position_ids`
    and no `attention_mask`.

    Args:
        documents: the token ids of each document; or mappings with `input_ids` and `labels` of equal length.
        length: the number of tokens of a row. Shorter rows are filled with padding, which is a document of its own.
        keys: the tensors of a row. Default: the first three.
        padding: the token id of padding.
        lengths: the number of tokens of each document. Default: the documents are read once.

    Raises:
        NotAvailableError: see `pack`; or a key is unknown, or there are fewer or more `lengths` than documents. When a
            row is read: a document has another length than `lengths` says, or another number of labels than tokens.

    Example:
        >>> rows = PackedRows([[5, 6, 7], [8, 9]], 6, keys=("input_ids", "position_ids", "labels"))
        >>> {name: tensor.tolist() for name, tensor in rows[0].items()}
        {'input_ids': [5, 6, 7, 8, 9, 0], 'position_ids': [0, 1, 2, 0, 1, 0], 'labels': [-100, 6, 7, -100, 9, -100]}
    """

    def __init__(
        self,
        documents: Sequence[Any],
        length: int,
        *,
        keys: Sequence[str] = KEYS[:3],
        padding: int = 0,
        lengths: Sequence[int] | None = None,
    ) -> None:
        unknown = [key for key in keys if key not in KEYS]
        if unknown:
            raise NotAvailableError(f"PackedRows(keys=...): {unknown[0]!r} is none of {', '.join(KEYS)}.")
        if lengths is not None and len(lengths) != len(documents):
            raise NotAvailableError(
                f"PackedRows(lengths=...): there are {len(lengths)} lengths of {len(documents)} documents."
            )
        self._documents, self._length, self._keys, self._padding = documents, length, tuple(keys), padding
        counted = (len(_tokens_of(documents[number])) for number in range(len(documents)))
        self._lengths = list(counted if lengths is None else lengths)
        self.rows = pack(self._lengths, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, labels = zip(*map(self._tokens_and_labels, self.rows[index]), strict=True)
        sizes = [*map(len, tokens)]
        sizes.append(self._length - sum(sizes))
        return {key: self._tensor(key, tokens, labels, sizes) for key in self._keys}

    def _tokens_and_labels(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a document's tokens and labels. Its first label is `IGNORED`."""
        document = self._documents[number]
        tokens = torch.as_tensor(_tokens_of(document), dtype=torch.int64)
        given = document.get("labels", tokens) if isinstance(document, Mapping) else tokens
        labels = torch.as_tensor(given, dtype=torch.int64).clone()
        if not len(tokens) == len(labels) == self._lengths[number]:
            raise NotAvailableError(
                f"PackedRows(...): document {number} has {len(tokens)} tokens and {len(labels)} labels, and was packed "
                f"as {self._lengths[number]} tokens. Give each token one label, and each document its length."
            )
        labels[0] = IGNORED
        return tokens, labels

    def _tensor(
        self, key: str, tokens: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> torch.Tensor:
        """Return the tensor `key` of a row. `sizes` has the lengths of its documents, and that of the padding."""
        if key == "input_ids":
            return torch.cat([*tokens, torch.full((sizes[-1],), self._padding)])
        if key == "labels":
            return torch.cat([*labels, torch.full((sizes[-1],), IGNORED)])
        if key == "position_ids":
            return torch.cat([*map(torch.arange, sizes)])
        numbers = torch.tensor([*range(len(tokens)), _PADDING_DOCUMENT])
        documents = numbers.repeat_interleave(torch.tensor(sizes))
        return documents if key == "document_ids" else document_mask(documents[None])[0]


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Return where a token may attend: to itself and earlier tokens of its document; for a model's own attention.

    Args:
        document_ids: the number of each token's document, [B, T].

    Returns:
        True where the query (dim 2) may attend to the key (dim 3), [B, 1, T, T], as `scaled_dot_product_attention`
        takes it.

    Example:
        >>> document_mask(torch.tensor([[0, 0, 1]])).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    is_same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return is_same & (places[:, None] >= places[None, :])


def _tokens_of(document: Any) -> Any:
    return document["input_ids"] if isinstance(document, Mapping) else document
