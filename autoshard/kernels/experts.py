"""`autoshard::experts` and its backward: a mixture-of-experts layer without its router.

The operator returns the weighted sum of the results of each token's experts, equation 1 of Shazeer et al.,
"Outrageously large neural networks" (2017). Tokens are sorted by expert for grouped products, so no token is dropped or
padded (Gale et al., "MegaBlocks", 2022).

Shapes: T tokens, k experts for each token, H hidden size, E experts, I intermediate size. With a gate, the first
product has g = 2 halves. Without a gate, g is 1. For token t, j in 1 .. k and e = index[t, j]:

    u = x_t A_e + a_e                    [g I]
    out_t = sum_j weights[t, j] gate(u) B_e

An index outside 0 .. E - 1 stands for no expert, and adds nothing. So a rank that holds some of the experts subtracts
the number of its first expert from the index, and the ranks' results sum up. The backward computes u a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoshard.kernels.gates import Gate
from autoshard.kernels.library import define, differentiate

FIRST_MATRIX = 3
"""Index of the first matrix, `gate_up`, among the operands of `experts`. Tokens, indices and weights come first."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """R rows sorted by expert. The rows of expert e have the indices ends[e - 1] to ends[e] - 1 after sorting.

    Args:
        order: [R], the index of each sorted row before sorting.
        ids: [R], the expert of each sorted row. Rows without an expert have the number E, and come last.
        ends: int32 [E], the index after the last row of each expert.
        is_cut: whether rows without an expert are left out. Otherwise their results are undefined until
            `without_unknown` writes zeros.
    """

    order: Tensor
    ids: Tensor
    ends: Tensor
    is_cut: bool

    def without_unknown(self, values: Tensor) -> Tensor:
        """Write zeros into `values` [R] or [R, N] for sorted rows without an expert, and return `values`."""
        if self.is_cut:
            return values
        is_unknown = self.ids == self.ends.shape[0]
        return values.masked_fill_(is_unknown if values.dim() == 1 else is_unknown.unsqueeze(1), 0)

    def of_each(self, vectors: Tensor) -> Tensor:
        """Return a tensor [R, N] with the vector of each sorted row's expert.

        `vectors` [E, N] has a vector for each expert.
        """
        return vectors.index_select(0, self.ids if self.is_cut else self.ids.clamp(max=vectors.shape[0] - 1))

    def products(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Multiply each sorted row of [R, M] by its expert's matrix of [E, M, N], and return the products [R, N]."""
        if _is_grouped(rows, matrices):
            return F.grouped_mm(rows, matrices, offs=self.ends)
        out = rows.new_empty((rows.shape[0], matrices.shape[2]))
        for expert, piece in self._pieces():
            torch.mm(rows[piece], matrices[expert], out=out[piece])
        return out

    def gradients(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left^T right for each expert's rows, as a tensor [E, M, N].

        `left` [R, M] and `right` [R, N] have sorted rows. If `left` has the rows given to `products`, and `right` the
        gradient of the products, the result is the gradient of the matrices.
        """
        if _is_grouped(left, right):
            return F.grouped_mm(left.mT, right, offs=self.ends)
        out = left.new_zeros((self.ends.shape[0], left.shape[1], right.shape[1]))
        for expert, piece in self._pieces():
            torch.mm(left[piece].mT, right[piece], out=out[expert])
        return out

    def sums(self, rows: Tensor) -> Tensor:
        """Return the sum of each expert's rows [E, N], from sorted rows [R, N]."""
        out = rows.new_zeros((self.ends.shape[0] + 1, rows.shape[1]))
        return out.index_add_(0, self.ids, rows).narrow(0, 0, self.ends.shape[0])

    def _pieces(self) -> list[tuple[int, slice]]:
        ends = self.ends.tolist()
        starts = [0, *ends[:-1]]
        return [(e, slice(*ends)) for e, ends in enumerate(zip(starts, ends, strict=True)) if ends[0] < ends[1]]


def _is_grouped(left: Tensor, right: Tensor) -> bool:
    is_known = left.dtype in (torch.bfloat16, torch.float16, torch.float32) and left.dtype == right.dtype
    return is_known and left.shape[0] > 0 and all(map(_is_aligned, (left, right)))


def _is_aligned(operand: Tensor) -> bool:
    first, second = sorted(operand.stride()[-2:])
    others = (second, *operand.stride()[:-2])
    return first == 1 and all(stride * operand.element_size() % 16 == 0 for stride in others)


def group_by_expert(ids: Tensor, experts: int) -> ExpertGroups:
    """Return rows sorted by expert, given the number of each row's expert, `ids` [R].

    A number outside 0 .. experts - 1 stands for no expert. On a CPU, rows without an expert are left out. On other
    devices they stay, because the host would have to wait for the device to count them.
    """
    known = torch.where((ids >= 0) & (ids < experts), ids, experts)
    ids, order = torch.sort(known, stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    if not _is_read_at_once(ids):
        return ExpertGroups(order, ids, ends.to(torch.int32), is_cut=False)
    rows = int(ends[-1])
    return ExpertGroups(order[:rows], ids[:rows], ends.to(torch.int32), is_cut=True)


def _is_read_at_once(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of experts in the layout of the model, and the activation or gate between the two products.

    Args:
        gate_up: the matrices A of the first product, [E, g, I, H]. If `interleaved`, [E, I, g, H]. If `transposed`, H
            is the second dim.
        gate_up_bias: the bias a of the first product, [E, g, I], or [E, I, g] if `interleaved`. None stands for zero.
        down: the matrices B of the second product, [E, H, I], or [E, I, H] if `transposed`.
        activation, alpha, limit: the fields `name`, `alpha` and `limit` of the `Gate` between the products.
        transposed: whether matrices are stored for `x @ matrix`, so that the dim of inputs precedes that of outputs.
        interleaved: whether the elements of gate and up alternate in the first product (`Gate.interleaved`).
    """

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    activation: str
    transposed: bool
    interleaved: bool
    alpha: float
    limit: float

    @property
    def count(self) -> int:
        """The number E of experts in `down`. If ranks hold different experts, these are the experts of this rank."""
        return self.down.shape[0]

    def first_products(self, x: Tensor, groups: ExpertGroups) -> Tensor:
        """Return u [R, g I], the products of the sorted rows x [R, H] with `gate_up`, plus the bias.

        The products of rows without an expert are undefined.
        """
        u = groups.products(x, self._gate_up)
        return u if self.gate_up_bias is None else u + groups.of_each(self.gate_up_bias.flatten(1))

    def results(self, u: Tensor, groups: ExpertGroups) -> Tensor:
        """Return the experts' results [R, H] before weighting. `u` [R, g I] is the result of `first_products`."""
        return groups.products(self._gate.forward(u), self._down)

    def results_of_all(self, x: Tensor, is_chosen: Tensor) -> Tensor:
        """Return a tensor [E, T, H] with the result of every expert for every token of `x` [T, H], before weighting.

        `is_chosen` [E, T, 1] says whether the token chose the expert. The results of experts that a token did not
        choose are finite but meaningless.
        """
        u = torch.matmul(x, self._gate_up)  # [E, T, g I]
        u = u if self.gate_up_bias is None else u + self.gate_up_bias.flatten(1).unsqueeze(1)
        hidden, _ = self.hidden(torch.where(is_chosen, u, 0.0).flatten(0, 1))  # finite where it is not used
        return torch.matmul(hidden.unflatten(0, u.shape[:2]), self._down)

    def backward(self, grad: Tensor, x: Tensor, weights: Tensor, groups: ExpertGroups) -> tuple[Any, ...]:
        """Return the gradients of x [R, H], weights [R], gate_up, gate_up_bias (None without a bias) and down.

        `grad` [R, H] is the gradient of the weighted results. Rows are sorted. The gradients of x and weights are
        undefined for rows without an expert.
        """
        hidden, backward = self.hidden(self.first_products(x, groups))
        d_x, d_weights, d_u, grad = self.backward_of_rows(grad, weights, hidden, backward, groups)
        del backward
        return d_x, d_weights, *self.backward_of_matrices(grad, x, hidden, d_u, groups)

    def hidden(self, u: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return h = gate(u) [R, I], and a function from the gradient of h to the gradient of u."""
        return self._gate.with_backward(u)

    def backward_of_rows(
        self, grad: Tensor, weights: Tensor, hidden: Tensor, backward: Callable[[Tensor], Tensor], groups: ExpertGroups
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of x, weights, u and the results before weighting, for sorted rows.

        `grad` [R, H] is the gradient of the weighted results. `hidden` and `backward` are results of the method
        `hidden`.
        """
        unweighed = groups.products(grad, self._down.mT)  # the gradient of hidden, [R, I]
        d_weights = (unweighed.to(weights.dtype) * hidden).sum(1)
        weights = weights.unsqueeze(1)
        d_u = backward(unweighed.mul_(weights))
        del unweighed
        return groups.products(d_u, self._gate_up.mT), d_weights, d_u, (grad * weights).to(grad.dtype)

    def backward_of_matrices(
        self, grad: Tensor, x: Tensor, hidden: Tensor, d_u: Tensor, groups: ExpertGroups
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the gradients of gate_up, gate_up_bias (None without a bias) and down.

        `x` [R, H] has the sorted rows, and `hidden` is gate(u) [R, I]. `d_u` and `grad` come from `backward_of_rows`.
        """
        d_down = groups.gradients(hidden, grad) if self.transposed else groups.gradients(grad, hidden)
        d_gate_up = groups.gradients(x, d_u) if self.transposed else groups.gradients(d_u, x)
        d_bias = None if self.gate_up_bias is None else groups.sums(d_u).view(self.gate_up_bias.shape)
        return d_gate_up.view(self.gate_up.shape), d_bias, d_down

    @property
    def _gate_up(self) -> Tensor:
        """`gate_up` as [E, H, g I]."""
        return self.gate_up.flatten(2) if self.transposed else self.gate_up.flatten(1, 2).mT

    @property
    def _down(self) -> Tensor:
        """`down` as [E, I, H]."""
        return self.down if self.transposed else self.down.mT

    @property
    def _gate(self) -> Gate:
        place = 1 + self.transposed + self.interleaved
        return Gate(self.activation, self.gate_up.shape[place], self.interleaved, self.alpha, self.limit)


def add_up(rows: Tensor, order: Tensor, index: Tensor) -> Tensor:
    """Return the sum of each token's rows, [T, H].

    An assignment is a token and one of its k experts, with number t k + j. Row r of `rows` [R, H] is the result of the
    assignment with number order[r]. `index` [T, k] is read for its shape only.
    """
    tokens, chosen = index.shape
    is_whole = rows.shape[0] == index.numel()
    apart = (rows.new_empty if is_whole else rows.new_zeros)((tokens * chosen, rows.shape[1]))
    apart.index_copy_(0, order, rows)
    return apart.view(tokens, chosen, rows.shape[1]).sum(1)


def spread(values: Tensor, order: Tensor, index: Tensor) -> Tensor:
    """Return a tensor of the shape of `index` [T, k] with values[r] at the assignment number order[r] = t k + j.

    The tensor is zero at assignments that are not in `order`.
    """
    return values.new_zeros(index.numel()).index_copy_(0, order, values).view(index.shape)


def experts_reference(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, experts: int,
    activation: str, transposed: bool, interleaved: bool, alpha: float, limit: float,
) -> Tensor:  # fmt: skip
    """Return, for each token, the weighted sum of the results of its experts. Raise `ValueError` if shapes do not fit.

    Args:
        x: the tokens [T, H].
        index: int64 [T, k], each token's experts. A number outside 0 .. E - 1 stands for no expert.
        weights: [T, k], the router's weights.
        gate_up, gate_up_bias, down, activation, transposed, interleaved, alpha, limit: fields of `ExpertWeights`.
        experts: the number of experts that tokens choose from: E, or more if the rank holds only E of them.

    Returns:
        out [T, H] in x's dtype. Matrix products have x's dtype. Sums over k have the promoted dtype of x and weights.
    """
    check_experts(x, index, weights, gate_up, down)
    held = ExpertWeights(gate_up, gate_up_bias, down, activation, transposed, interleaved, alpha, limit)
    groups = group_by_expert(index.flatten(), held.count)
    rows = held.results(held.first_products(x.index_select(0, groups.order // index.shape[1]), groups), groups)
    rows = groups.without_unknown(rows * weights.flatten().index_select(0, groups.order).unsqueeze(1))
    return add_up(rows, groups.order, index).to(x.dtype)


def experts_composite(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, experts: int,
    activation: str, transposed: bool, interleaved: bool, alpha: float, limit: float,
) -> tuple[Tensor]:  # fmt: skip
    """Compute `experts_reference` with operators that torch can differentiate.

    Every expert processes every token, chosen or not. The result is in a tuple.
    """
    held = ExpertWeights(gate_up, gate_up_bias, down, activation, transposed, interleaved, alpha, limit)
    is_chosen = index.unsqueeze(2) == torch.arange(held.count, device=index.device)  # [T, k, E]
    share = torch.where(is_chosen, weights.unsqueeze(2), 0.0).sum(1).mT.unsqueeze(2)  # [E, T, 1]
    return ((held.results_of_all(x, is_chosen.any(1).mT.unsqueeze(2)) * share).sum(0).to(x.dtype),)


def experts_backward_reference(
    grad_out: Tensor, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None,
    down: Tensor, experts: int, activation: str, transposed: bool, interleaved: bool, alpha: float, limit: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, weights, gate_up, gate_up_bias (None without a bias) and down, shaped as the operands.

    `grad_out` is [T, H]. The other arguments are those of `experts_reference`.
    """
    held = ExpertWeights(gate_up, gate_up_bias, down, activation, transposed, interleaved, alpha, limit)
    groups = group_by_expert(index.flatten(), held.count)
    tokens = groups.order // index.shape[1]
    rows = (grad_out.index_select(0, tokens), x.index_select(0, tokens))
    operands = (*rows, weights.flatten().index_select(0, groups.order))
    d_x, d_weights, *others = held.backward(*operands, groups)
    d_x, d_weights = groups.without_unknown(d_x), groups.without_unknown(d_weights)
    return add_up(d_x, groups.order, index), spread(d_weights, groups.order, index), *others


def check_experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """Raise `ValueError` if the shapes of the operands of `experts` do not fit each other."""
    fits = (
        (x.dim(), index.dim(), gate_up.dim(), down.dim()) == (2, 2, 4, 3)
        and index.shape == weights.shape
        and x.shape[0] == index.shape[0]
        and gate_up.shape[0] == down.shape[0]
    )
    if not fits:
        shapes = {"x": x, "index": index, "weights": weights, "gate_up": gate_up, "down": down}
        found = ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in shapes.items())
        raise ValueError(
            f"experts: pass x [T, H], index and weights [T, k], gate_up [E, g, I, H], down [E, H, I]. Found {found}."
        )


def fake_experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, *rest: Any) -> Tensor:
    """Return an empty result of `experts`, of x's shape and dtype."""
    check_experts(x, index, weights, gate_up, rest[1])
    return x.new_empty(x.shape)


def fake_experts_backward(
    grad_out: Tensor, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None,
    down: Tensor, *_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return empty gradients of x, weights, gate_up, gate_up_bias and down, like these operands in shape and dtype."""
    operands = (x, weights, gate_up, gate_up_bias, down)
    return tuple(None if operand is None else operand.new_empty(operand.shape) for operand in operands)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, weights, gate_up, gate_up_bias, down, *ctx.constants = inputs
    ctx.save_for_backward(x, index, weights, gate_up, gate_up_bias, down)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_weights, d_gate_up, d_bias, d_down = experts_backward(grad_out, *ctx.saved_tensors, *ctx.constants)
    d_bias = d_bias if ctx.needs_input_grad[4] else None
    return d_x, None, d_weights, d_gate_up, d_bias, d_down, *(None,) * len(ctx.constants)


OPERANDS = "Tensor x, Tensor index, Tensor weights, Tensor gate_up, Tensor? gate_up_bias, Tensor down"
CONSTANTS = "SymInt experts, str activation, bool transposed, bool interleaved, float alpha, float limit"
GRADIENTS = "(Tensor d_x, Tensor d_weights, Tensor d_gate_up, Tensor d_gate_up_bias, Tensor d_down)"

experts = define("experts", f"({OPERANDS}, {CONSTANTS}) -> Tensor", experts_reference, fake_experts)
experts_backward = define(
    "experts_backward",
    f"(Tensor grad_out, {OPERANDS}, {CONSTANTS}) -> {GRADIENTS}",
    experts_backward_reference,
    fake_experts_backward,
)
differentiate(experts, _setup_context, _backward, experts_composite)
