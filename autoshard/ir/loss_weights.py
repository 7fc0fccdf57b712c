"""How much each micro-batch's loss counts in that of its batch, as data: found from the program, read by the step.

The loss of a batch is the sum of its parts' losses, each times a weight: 1 where it is a sum over the batch, one over
their number where it is a mean, and the part's share of a count where it is divided by one (of targets that are not
ignored, weights of classes, a mask). Counts are made of inputs alone, so a step knows weights before its first forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.errors import NotAvailableError
from autoshard.ir.spec import Reduction

ReadInput = Callable[[int, str, str], torch.Tensor]
"""The value of an input of one micro-batch, by the kind and the name of its slot."""


@dataclass(frozen=True, slots=True, eq=False)
class Count:
    """What a loss is divided by.

    Args:
        of_part: from the inputs of a micro-batch to the count of that part, and the sums that it is made of.
        of_whole: from the sums of the whole batch, and inputs, to the count of the whole batch.
        exponents: for each sum, e: that of the batch is the sum over m parts, divided by m ** e.
        inputs: kind and name of each input.
    """

    of_part: fx.GraphModule
    of_whole: fx.GraphModule
    exponents: tuple[int, ...]
    inputs: tuple[tuple[str, str], ...]

    def shares(self, parts: int, read: ReadInput) -> list[float]:
        """The count of each part over that of the batch."""
        given = [[read(part, kind, name) for kind, name in self.inputs] for part in range(parts)]
        counted = [self.of_part(*values) for values in given]
        sums = zip(*(sums for _, *sums in counted), strict=True)
        totals = [
            torch.stack(tuple(addends)).sum(0) / parts**e for e, addends in zip(self.exponents, sums, strict=True)
        ]
        totals = [total.to(counted[0][1 + i].dtype) for i, total in enumerate(totals)]
        whole = float(self.of_whole(*totals, *given[0]))
        return [float(count) / whole if whole else math.nan for count, *_ in counted]


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a loss: a sum over the batch times m ** exponent, over a count or not."""

    exponent: int
    count: Count | None = None
    where: str = ""

    def weights(self, parts: int, read: ReadInput) -> list[float]:
        """Counts of each micro-batch."""
        shares = [1.0] * parts if self.count is None else self.count.shares(parts, read)
        return [share / parts**self.exponent for share in shares]

    def __str__(self) -> str:
        if self.count is not None:
            return f"a sum over the batch, divided by a count that its inputs give ({self.where})"
        return {0: "a sum over the batch", 1: "a mean over the batch"}.get(self.exponent, "a scaled sum over the batch")


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """How the values that the trace of a part branched on follow, for the batch, from its parts.

    Args:
        of_part: from inputs of a micro-batch to results of reductions over its samples.
        reductions: of those results over the parts.
        of_whole: from the reduced results, and the number of parts, to the values of the whole batch.
        expected: the values that the trace of the part relied on.
        inputs: kind and name of each input.
    """

    of_part: fx.GraphModule
    reductions: tuple[Reduction, ...]
    of_whole: fx.GraphModule
    expected: tuple[bool | int | float, ...]
    inputs: tuple[tuple[str, str], ...]

    def are_of_batch(self, parts: int, read: ReadInput) -> bool:
        """Whether the whole batch branches as the trace did."""
        found = [self.of_part(*(read(part, kind, name) for kind, name in self.inputs)) for part in range(parts)]
        pairs = zip(self.reductions, zip(*found, strict=True), strict=True)
        totals = [_REDUCE[reduction](torch.stack(values)) for reduction, values in pairs]
        values = self.of_whole(*totals, torch.tensor(parts, dtype=torch.float64))
        return all(value.item() == expected for value, expected in zip(values, self.expected, strict=True))


_REDUCE: Mapping[Reduction, Callable[[torch.Tensor], torch.Tensor]] = {
    Reduction.SUM: lambda values: values.sum(0, dtype=values.dtype),
    Reduction.MIN: lambda values: values.amin(0),
    Reduction.MAX: lambda values: values.amax(0),
}


@dataclass(frozen=True, slots=True)
class LossWeights:
    """How the loss of a batch is made of those of its parts.

    Args:
        terms: it is their sum; all must weigh a part alike.
        has_constant: whether what does not depend on the batch is added, which is to count once.
        refusal: why the loss is not made of those of parts; None where it is.
        branches: of the batch; None where the program relies on no values, or where they do not follow from the parts.
    """

    terms: tuple[Term, ...]
    has_constant: bool = False
    refusal: str | None = None
    branches: Branches | None = None

    def of_parts(self, parts: int, read: ReadInput) -> list[float]:
        """The weight of each of so many micro-batches.

        Raises:
            NotAvailableError: the loss is not made of those of parts, or not for these inputs.
        """
        if self.refusal is not None:
            raise NotAvailableError(self.refusal)
        weighed = [term.weights(parts, read) for term in self.terms]
        for term, weights in zip(self.terms, weighed, strict=True):
            if not _are_close(weights, weighed[0]):
                raise NotAvailableError(
                    f"micro_batches={parts}: the loss has terms that weigh the parts of this batch differently:"
                    f" {self.terms[0]} by {_shown(weighed[0])}, {term} by {_shown(weights)}. Give parts equal counts, "
                    "or leave micro_batches out."
                )
        total = sum(weighed[0])
        if self.has_constant and not math.isnan(total) and not math.isclose(total, 1, rel_tol=1e-6):
            raise NotAvailableError(
                f"micro_batches={parts}: the loss adds what does not depend on the batch to {self.terms[0]}, whose "
                f"parts weigh {_shown(weighed[0])} here, so it would count {total:.4g} times. Leave micro_batches out."
            )
        return weighed[0]

    def __str__(self) -> str:
        return " plus ".join(dict.fromkeys(map(str, self.terms)))


def _are_close(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def _shown(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:.4g}" for weight in weights)
