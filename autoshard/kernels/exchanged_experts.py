"""`autoshard::exchanged_experts` and its backward: expert parallelism, in which ranks exchange tokens by all-to-alls.

Lepikhin et al., "GShard" (2020), section 3.2, without capacities. A rank sends each token to the ranks of its experts,
once for each expert, and receives the experts' results. The first experts are on the first rank. Ranks first exchange
the numbers of rows, so no row is dropped or padded. The host waits for these numbers once in each call.

Operands and results are those of `autoshard::experts`, for a rank's own tokens and its own experts. Letters of shapes
are those of `autoshard.kernels.experts`. The operand `index` counts experts over the whole group of ranks. The operand
`experts` is the number of experts of the whole group.

`exchanged_experts_keeping` also returns three values for the backward. With them, `exchanged_experts_kept_backward`
needs one exchange and one product less:

* the R rows that arrived, sorted by expert: [R, H];
* the product of these rows with `gate_up`: [R, g I];
* the numbers of sent and arrived rows, in the host's memory: [2, ranks, experts of a rank].

R depends on the routers' choices. In fake tensors, R is its value if all experts are chosen equally often.
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
    ExpertGroups,
    ExpertWeights,
    add_up,
    check_experts,
    fake_experts,
    fake_experts_backward,
    group_by_expert,
    spread,
)

Travelling = Generator[Exchange, list[Tensor], list[Tensor]]
"""A generator that yields exchanges as `Steps` does, and returns tensors in transit, for which `arrived` waits."""


@dataclass(frozen=True, slots=True)
class Route:
    """The rows that this rank sends to the experts of all ranks, and the rows that it receives for its own experts.

    An assignment is a token and one of its k experts. T tokens have T k assignments, and each becomes one row.

    Args:
        order: the numbers of this rank's assignments, sorted by expert. Rows are sent in this order.
        sent, received: for each rank, the number of rows sent to it, and received from it.
        arrived: the received rows by expert. Rows arrive sorted by sending rank, then by expert.
    """

    order: Tensor
    sent: Sequence[int]
    received: Sequence[int]
    arrived: ExpertGroups

    @classmethod
    def of(cls, order: Tensor, counts: Tensor) -> Route:
        """Return the route of the rows that this rank sends and receives.

        `order` has the numbers of this rank's assignments, sorted by expert. `counts` is the result of `_counted`.
        """
        _, ranks, held = counts.shape
        sent, received = counts.sum(2).tolist()
        ids = torch.arange(held, device=order.device).repeat(ranks)
        ids = ids.repeat_interleave(counts[1].flatten().to(order.device), output_size=sum(received))
        return cls(order[: sum(sent)], sent, received, group_by_expert(ids, held))

    def send_to_experts(self, *tensors: Tensor) -> Travelling:
        """Start to send rows of this rank's assignments to the ranks of their experts.

        Each of `tensors` has a row for each assignment, in the order `order`. The generator returns tensors in transit.
        `take` returns their rows once they have arrived.
        """
        return (yield Exchange(tensors, self.sent, self.received, is_awaited=False))

    def take(self, pending: list[Tensor]) -> Tensor:
        """Wait for the first tensor of the list `pending`, remove it, and return its rows sorted by expert."""
        (rows,) = arrived([pending.pop(0)])
        return rows.index_select(0, self.arrived.order)

    def send_back(self, *tensors: Tensor) -> Travelling:
        """Start to send rows back to the ranks of their tokens.

        Each of `tensors` has a row for each row that this rank received, sorted by expert. The generator returns
        tensors in transit. A rank gets back the rows of its own tokens, in the order `order` of its route.
        """
        rows = [torch.empty_like(tensor).index_copy_(0, self.arrived.order, tensor) for tensor in tensors]
        del tensors
        return (yield Exchange(rows, self.received, self.sent, is_awaited=False))


def _counted(groups: ExpertGroups, held: int) -> Generator[Exchange, list[Tensor], Tensor]:
    """Exchange the numbers of rows that ranks send to each expert, and return them in host memory as [2, ranks, held].

    `groups` has this rank's assignments, and each rank holds `held` experts. The first entry [0, r, e] counts rows from
    this rank to expert e of rank r. The second entry [1, r, e] counts rows from rank r to expert e of this rank.
    """
    counts = torch.diff(groups.ends.to(torch.int64), prepend=groups.ends.new_zeros(1, dtype=torch.int64)).view(-1, held)
    ones = [1] * counts.shape[0]
    (arriving,) = yield Exchange([counts], ones, ones)
    return torch.stack((counts, arriving)).cpu()


def _forward(
    keeps: bool,
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, experts: int,
    *constants: Any,
) -> Generator[Exchange, list[Tensor], tuple[Tensor, ...]]:  # fmt: skip
    """Run the forward on one rank: yield its exchanges, and return a tuple of results.

    The tuple has the weighted sums [T, H]. With `keeps`, it also has the other results of `exchanged_experts_keeping`.
    `constants` are the fields of `ExpertWeights` from `activation` on.
    """
    check_experts(x, index, weights, gate_up, down)
    held = ExpertWeights(gate_up, gate_up_bias, down, *constants)
    groups = group_by_expert(index.flatten(), experts)
    counts = yield from _counted(groups, held.count)
    route = Route.of(groups.order, counts)
    pending = yield from route.send_to_experts(x.index_select(0, route.order // index.shape[1]))
    rows = route.take(pending)
    u = held.first_products(rows, route.arrived)
    kept = (rows, u, counts) if keeps else ()
    del rows
    done = held.results(u, route.arrived)
    del u
    pending = yield from route.send_back(done)
    del done
    rows = arrived(pending)[0] * weights.flatten().index_select(0, route.order).unsqueeze(1)
    return add_up(rows, route.order, index).to(x.dtype), *kept


def forward_steps(*arguments: Any) -> Steps:
    """Yield one rank's exchanges of `exchanged_experts`, and return the weighted sums [T, H].

    `arguments` are the operator's arguments without the group.
    """
    (out,) = yield from _forward(False, *arguments)
    return out


def keeping_steps(*arguments: Any) -> Steps:
    """Yield one rank's exchanges of `exchanged_experts_keeping`, and return its results.

    `arguments` are the operator's arguments without the group.
    """
    return (yield from _forward(True, *arguments))


def backward_steps(
    grad_out: Tensor, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None,
    down: Tensor, experts: int, *constants: Any,
) -> Steps:  # fmt: skip
    """Run `exchanged_experts_backward` on one rank: yield its exchanges, and return its gradients.

    The gradients are those of x, weights, gate_up, gate_up_bias and down. The rank computes u again while rows of
    `grad_out` are in transit. `constants` are the fields of `ExpertWeights` from `activation` on.
    """
    held = ExpertWeights(gate_up, gate_up_bias, down, *constants)
    groups = group_by_expert(index.flatten(), experts)
    route = Route.of(groups.order, (yield from _counted(groups, held.count)))
    tokens = route.order // index.shape[1]
    pending = yield from route.send_to_experts(
        x.index_select(0, tokens), grad_out.index_select(0, tokens), weights.flatten().index_select(0, route.order)
    )
    rows = route.take(pending)
    return (yield from _gradients(held, route, pending, rows, held.first_products(rows, route.arrived), index))


def kept_backward_steps(
    grad_out: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
    rows: Tensor, u: Tensor, counts: Tensor, experts: int, *constants: Any,
) -> Steps:  # fmt: skip
    """Run `exchanged_experts_kept_backward` on one rank: yield its exchanges, and return its gradients.

    The gradients are those of x, weights, gate_up, gate_up_bias and down. The rank computes gate(u) while rows of
    `grad_out` are in transit. `constants` are the fields of `ExpertWeights` from `activation` on.
    """
    held = ExpertWeights(gate_up, gate_up_bias, down, *constants)
    route = Route.of(group_by_expert(index.flatten(), experts).order, counts)
    pending = yield from route.send_to_experts(
        grad_out.index_select(0, route.order // index.shape[1]), weights.flatten().index_select(0, route.order)
    )
    return (yield from _gradients(held, route, pending, rows, u, index))


def _gradients(
    held: ExpertWeights, route: Route, pending: list[Tensor], rows: Tensor, u: Tensor, index: Tensor
) -> Steps:
    """Yield the last exchange of a backward on one rank, and return the backward's gradients.

    They are the gradients of x, weights, gate_up, gate_up_bias and down. The gradients of the matrices are computed
    while the gradients of rows travel back to their ranks.

    Args:
        pending: tensors in transit to this rank: the gradient of each row's result, then each row's weight.
        rows, u: the rows that arrived in the forward, and their products with `gate_up`.
        index: [T, k], read for its shape only.
    """
    groups = route.arrived
    hidden, backward = held.hidden(u)
    del u
    grad, shares = route.take(pending), route.take(pending)
    d_rows, d_weights, d_u, grad = held.backward_of_rows(grad, shares, hidden, backward, groups)
    del backward
    pending = yield from route.send_back(d_rows, d_weights)
    del d_rows
    matrices = held.backward_of_matrices(grad, rows, hidden, d_u, groups)
    d_rows, d_weights = arrived(pending)
    return add_up(d_rows, route.order, index), spread(d_weights, route.order, index), *matrices


def _fake_keeping(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, experts: int,
    *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_experts(x, index, weights, gate_up, down)
    rows, held = index.numel(), down.shape[0]
    u = x.new_empty((rows, gate_up[0].numel() // x.shape[1]))
    counts = index.new_empty((2, experts // held, held), dtype=torch.int64, device="cpu")
    return x.new_empty(x.shape), x.new_empty((rows, x.shape[1])), u, counts


def _fake_kept_backward(
    grad_out: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
    *_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return fake_experts_backward(grad_out, grad_out, index, weights, gate_up, gate_up_bias, down)


KEPT = "Tensor rows, Tensor u, Tensor counts"

exchanged_experts = define_exchanging(
    "exchanged_experts", f"({OPERANDS}, {CONSTANTS}, str group) -> Tensor", forward_steps, fake_experts
)
exchanged_experts_backward = define_exchanging(
    "exchanged_experts_backward",
    f"(Tensor grad_out, {OPERANDS}, {CONSTANTS}, str group) -> {GRADIENTS}",
    backward_steps,
    fake_experts_backward,
)
exchanged_experts_keeping = define_exchanging(
    "exchanged_experts_keeping",
    f"({OPERANDS}, {CONSTANTS}, str group) -> (Tensor out, {KEPT})",
    keeping_steps,
    _fake_keeping,
)
exchanged_experts_kept_backward = define_exchanging(
    "exchanged_experts_kept_backward",
    f"(Tensor grad_out, {OPERANDS.removeprefix('Tensor x, ')}, {KEPT}, {CONSTANTS}, str group) -> {GRADIENTS}",
    kept_backward_steps,
    _fake_kept_backward,
)
