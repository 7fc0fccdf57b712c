"""Weights with which the losses of micro-batches add up to the loss of the batch.

The loss of a batch is the weighted sum of its micro-batches' losses. The weight is 1 for a sum over the batch, and 1/n
for a mean over n micro-batches. If the loss divides by a count (targets not ignored, class weights, a mask), the weight
is the micro-batch's share of the count. Counts depend on inputs alone, so a step knows the weights before its first
forward.

A micro-batch may hold copies of its samples. If each sample of a micro-batch occurs c times, the sums of that
micro-batch are divided by c. So all micro-batches can have one size, although a batch has fewer samples.
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
"""Function that returns an input of a micro-batch: takes the micro-batch's number, and kind and name of the slot."""


@dataclass(frozen=True, slots=True, eq=False)
class Count:
    """The count by which a loss is divided, such as the number of targets that are not ignored.

    Two graphs compute the count: `of_part` for a micro-batch, and `of_whole` for the batch, from sums over its parts.

    Args:
        of_part: takes the inputs of a micro-batch; returns its count, then the sums from which the count is computed.
        of_whole: takes the sums of the whole batch, then the inputs of the first micro-batch; returns the count of the
            whole batch.
        exponents: an exponent e for each sum of `of_part`. The whole batch's sum is the total over m micro-batches,
            divided by m ** e. For example, e is 0 for a sum over rows, and 1 for a mean.
        inputs: kind and name of each input that both graphs take.
    """

    of_part: fx.GraphModule
    of_whole: fx.GraphModule
    exponents: tuple[int, ...]
    inputs: tuple[tuple[str, str], ...]

    def shares(self, copies: Sequence[int], read: ReadInput) -> list[float]:
        """Return for each micro-batch its count divided by the batch's count.

        The arguments are those of `LossWeights.of_parts`.
        """
        given = [[read(part, kind, name) for kind, name in self.inputs] for part in range(len(copies))]
        counted = [self.of_part(*values) for values in given]
        sums, full = zip(*(sums for _, *sums in counted), strict=True), full_parts(copies)
        totals = [added(addends, copies) / full**e for e, addends in zip(self.exponents, sums, strict=True)]
        totals = [total.to(counted[0][1 + i].dtype) for i, total in enumerate(totals)]
        whole = float(self.of_whole(*totals, *given[0]))
        shares = [float(count) / whole if whole else math.nan for count, *_ in counted]
        return [_once(share, each) for share, each in zip(shares, copies, strict=True)]


@dataclass(frozen=True, slots=True)
class Term:
    """A term of the batch's loss: a weighted sum of this term's values in the losses of the m micro-batches.

    Args:
        exponent: 0 for a sum over the batch, 1 for a mean; each weight is divided by m ** exponent.
        count: divisor of the term, or None. With a divisor, each weight is multiplied by the micro-batch's share of the
            count.
        where: the user's line that divides by the count, for messages.
    """

    exponent: int
    count: Count | None = None
    where: str = ""

    def weights(self, copies: Sequence[int], read: ReadInput) -> list[float]:
        """Return the weight of each micro-batch's term in the batch's term.

        The arguments are those of `LossWeights.of_parts`.
        """
        shares = [_once(1.0, each) for each in copies] if self.count is None else self.count.shares(copies, read)
        return [share / full_parts(copies) ** self.exponent for share in shares]

    def __str__(self) -> str:
        if self.count is not None:
            return f"a sum over the batch, divided by a count that its inputs give ({self.where})"
        return {0: "a sum over the batch", 1: "a mean over the batch"}.get(self.exponent, "a scaled sum over the batch")


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """Values on which a micro-batch's trace branched in Python, and graphs that compute them for the whole batch.

    With these graphs a step checks that the whole batch would take the same branches.

    Args:
        of_part: takes the inputs of a micro-batch; returns the results of reductions over its samples.
        reductions: for each result, its reduction over the micro-batches.
        of_whole: takes the reduced results and the number of micro-batches; returns the values of the whole batch.
        expected: the values that the trace of the micro-batch relied on.
        inputs: kind and name of each input of `of_part`.
    """

    of_part: fx.GraphModule
    reductions: tuple[Reduction, ...]
    of_whole: fx.GraphModule
    expected: tuple[bool | int | float, ...]
    inputs: tuple[tuple[str, str], ...]

    def are_of_batch(self, copies: Sequence[int], read: ReadInput) -> bool:
        """Whether the batch has the values on which the micro-batch's trace branched.

        The arguments are those of `LossWeights.of_parts`.
        """
        found = [self.of_part(*(read(part, kind, name) for kind, name in self.inputs)) for part in range(len(copies))]
        pairs = zip(self.reductions, zip(*found, strict=True), strict=True)
        totals = [_REDUCE[reduction](values, copies) for reduction, values in pairs]
        values = self.of_whole(*totals, torch.tensor(full_parts(copies), dtype=torch.float64))
        return all(value.item() == expected for value, expected in zip(values, self.expected, strict=True))


def full_parts(copies: Sequence[int]) -> float:
    """Return the number of samples in the batch, without copies, divided by the number of rows in a micro-batch.

    Example:
        >>> full_parts((1, 1, 1, 1)), full_parts((1, 4)), full_parts((1, 2, 0))
        (4.0, 1.25, 1.5)
    """
    return sum(_once(1.0, each) for each in copies)


def added(addends: Sequence[torch.Tensor], copies: Sequence[int]) -> torch.Tensor:
    """Return the sum over micro-batches of `addends`, in which each sample of the batch counts once.

    The addend of a micro-batch is divided by the micro-batch's number of copies. It is left out if this number is 0.
    """
    # Copies add equal addends, so an integer is divided without a rest.
    once = [_divided(addend, each) for addend, each in zip(addends, copies, strict=True) if each]
    return torch.stack(once).sum(0, dtype=addends[0].dtype)


def _divided(total: torch.Tensor, copies: int) -> torch.Tensor:
    return total if copies == 1 else total // copies if not total.is_floating_point() else total / copies


def _once(value: float, copies: int) -> float:
    return value / copies if copies else 0.0


_REDUCE: Mapping[Reduction, Callable[[Sequence[torch.Tensor], Sequence[int]], torch.Tensor]] = {
    Reduction.SUM: added,
    Reduction.MIN: lambda values, _: torch.stack(tuple(values)).amin(0),
    Reduction.MAX: lambda values, _: torch.stack(tuple(values)).amax(0),
}


@dataclass(frozen=True, slots=True)
class LossWeights:
    """The loss of a batch as a weighted sum of the losses of its micro-batches.

    Args:
        terms: terms of the loss, all of which must give a micro-batch the same weight.
        has_constant: whether the loss adds a term that does not depend on the batch. The weights must then sum to 1.
        refusal: reason why the loss is no sum over micro-batches; None if it is.
        branches: the check that the whole batch takes the same branches in Python as each micro-batch. None if the
            trace did not branch on values, or if micro-batches do not determine the batch's values.
    """

    terms: tuple[Term, ...]
    has_constant: bool = False
    refusal: str | None = None
    branches: Branches | None = None

    def of_parts(self, copies: Sequence[int], read: ReadInput) -> list[float]:
        """Return the weight of each micro-batch in the batch's loss.

        Args:
            copies: for each micro-batch, how many times each of its samples occurs in it; 0 if the micro-batch does not
                count.
            read: reads inputs.

        Raises `NotAvailableError` if the loss is no sum over micro-batches, or if two terms give a micro-batch
        different weights. It also raises if a constant term would count more than once.
        """
        if self.refusal is not None:
            raise NotAvailableError(self.refusal)
        parts = len(copies)
        weighed = [term.weights(copies, read) for term in self.terms]
        for term, weights in zip(self.terms, weighed, strict=True):
            if not _are_close(weights, weighed[0]):
                raise NotAvailableError(
                    f"micro_batches={parts}: the loss has terms that weigh the parts of this batch differently."
                    f" {self.terms[0]} weighs them {_shown(weighed[0])}, {term} weighs them {_shown(weights)}. Give "
                    "parts equal counts, or leave micro_batches out."
                )
        total = sum(weighed[0])
        if self.has_constant and not math.isnan(total) and not math.isclose(total, 1, rel_tol=1e-6):
            raise NotAvailableError(
                f"micro_batches={parts}: the loss adds a term independent of the batch to {self.terms[0]}. The "
                f"parts weigh {_shown(weighed[0])} here, so this term would count {total:.4g} times. Leave out "
                "micro_batches."
            )
        return weighed[0]

    def __str__(self) -> str:
        return " plus ".join(dict.fromkeys(map(str, self.terms)))


def _are_close(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def _shown(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:.4g}" for weight in weights)
