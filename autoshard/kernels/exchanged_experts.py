"""`autoshard::exchanged_experts` and its backward: experts of several ranks, to which tokens are sent and come back.

Lepikhin et al., "GShard" (2020), section 3.2, without capacities: each rank of the group holds other tokens and other
experts, the first ones on the first rank. It sends each token to the ranks of its experts, once for each expert, and
gets back what they make of it. How many rows go where is exchanged first, so that nothing is dropped or padded. The
host reads these numbers, as collectives want them there: on an accelerator it waits for them once in each call.

Operands and results are as of `autoshard::experts`, of a rank's own tokens and its own experts; `index` counts experts
over the whole group, of which there are `experts`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.exchange import Exchange, Steps, arrived, define_exchanging
from autoshard.kernels.experts import (
    CONSTANTS,
    GRADIENTS,
    OPERANDS,
    Experts,
    Groups,
    add_up,
    check_experts,
    fake_experts,
    fake_experts_backward,
    group_by_expert,
    spread,
)

Travelling = Generator[Exchange, list[Tensor], list[Tensor]]
"""Steps that return tensors which are on their way."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where rows go.

    Args:
        order: of the rows that this rank sends, in the order of experts, which assignment of T k each is.
        sent, received: rows to each rank, and from each.
        arrived: the experts of what comes, in the order of ranks and then of experts.
    """

    order: Tensor
    sent: Sequence[int]
    received: Sequence[int]
    arrived: Groups

    def there(self, *tensors: Tensor) -> Travelling:
        """Send rows of assignments to their experts; `take` gives what arrives."""
        return (yield Exchange(tensors, self.sent, self.received, is_awaited=False))

    def take(self, pending: list[Tensor]) -> Tensor:
        """The first tensor on its way, which leaves the list so that nothing else holds it; in the order of experts."""
        (rows,) = arrived([pending.pop(0)])
        return rows.index_select(0, self.arrived.order)

    def back(self, *tensors: Tensor) -> Travelling:
        """Send rows sorted by expert back to where they came from; in the order of `order`."""
        rows = [torch.empty_like(tensor).index_copy_(0, self.arrived.order, tensor) for tensor in tensors]
        del tensors
        return (yield Exchange(rows, self.received, self.sent, is_awaited=False))


def _route(index: Tensor, experts: int, held: int) -> Generator[Exchange, list[Tensor], Route]:
    """The route of assignments to `experts`, of which each rank holds so many."""
    ranks = experts // held
    groups = group_by_expert(index.flatten(), experts)
    counts = torch.diff(groups.ends.to(torch.int64), prepend=index.new_zeros(1, dtype=torch.int64)).view(ranks, held)
    ones = [1] * ranks
    (arriving,) = yield Exchange([counts], ones, ones)
    sent, received = torch.stack((counts.sum(1), arriving.sum(1))).tolist()
    ids = torch.arange(held, device=index.device).repeat(ranks)
    ids = ids.repeat_interleave(arriving.flatten(), output_size=sum(received))
    return Route(groups.order[: sum(sent)], sent, received, group_by_expert(ids, held))


def forward_steps(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, experts: int,
    *constants: Any,
) -> Steps:  # fmt: skip
    """The steps of `exchanged_experts`, on one rank."""
    check_experts(x, index, weights, gate_up, down)
    held = Experts(gate_up, gate_up_bias, down, *constants)
    route = yield from _route(index, experts, held.count)
    pending = yield from route.there(x.index_select(0, route.order // index.shape[1]))
    pending = yield from route.back(held.forward(route.take(pending), route.arrived))
    rows = arrived(pending)[0] * weights.flatten().index_select(0, route.order).unsqueeze(1)
    return add_up(rows, route.order, index).to(x.dtype)


def backward_steps(
    grad_out: Tensor, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None,
    down: Tensor, experts: int, *constants: Any,
) -> Steps:  # fmt: skip
    """The steps of `exchanged_experts_backward`, on one rank.

    The first product is computed while gradients of results are on their way, and gradients of matrices while those of
    rows are.
    """
    held = Experts(gate_up, gate_up_bias, down, *constants)
    route = yield from _route(index, experts, held.count)
    tokens, groups = route.order // index.shape[1], route.arrived
    pending = yield from route.there(
        x.index_select(0, tokens), grad_out.index_select(0, tokens), weights.flatten().index_select(0, route.order)
    )
    rows = route.take(pending)
    hidden, backward = held.hidden(rows, groups)
    grad, shares = route.take(pending), route.take(pending)
    d_rows, d_weights, d_u, grad = held.backward_of_rows(grad, shares, hidden, backward, groups)
    del backward
    pending = yield from route.back(d_rows, d_weights)
    del d_rows
    matrices = held.backward_of_matrices(grad, rows, hidden, d_u, groups)
    d_rows, d_weights = arrived(pending)
    return add_up(d_rows, route.order, index), spread(d_weights, route.order, index), *matrices


exchanged_experts = define_exchanging(
    "exchanged_experts", f"({OPERANDS}, {CONSTANTS}, str group) -> Tensor", forward_steps, fake_experts
)
exchanged_experts_backward = define_exchanging(
    "exchanged_experts_backward",
    f"(Tensor grad_out, {OPERANDS}, {CONSTANTS}, str group) -> {GRADIENTS}",
    backward_steps,
    fake_experts_backward,
)
