"""One rank of `tests.benchmarks.expert_time`, which races our expert layer with a layer by hand.

Both are Mixtral's expert layer with equal weights, and each rank has its tokens and its experts. The layer by hand is
the best code of a user of `torch.distributed`. Rows are sorted by expert, and counts and rows travel by all-to-all. One
product serves all experts of a rank if torch has `grouped_mm`. Common gradients are reduced, and AdamW is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.benchmarks.pipeline_worker import BATCHES, OURS
from tests.benchmarks.races import mesh_along, serve, take_turns

SEQUENCES, TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 16, 128, 256, 512, 8, 2
BY_HAND = "by hand"


def _run(order: dict[str, Any]) -> dict[str, Any]:
    """Run `order` on this rank: see `take_turns`."""
    import torch

    mesh = mesh_along("expert", is_delayed=order["is_delayed"])
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(SEQUENCES, TOKENS, HIDDEN, generator=generator) for _ in range(BATCHES)]
    steps = {OURS: _ours(mesh, batches[0]), BY_HAND: _by_hand(mesh)}
    return take_turns(steps, batches, order["rounds"], lambda loss: loss.item())


def _layer() -> Any:
    from tests.benchmarks.expert_layer import Layer

    return Layer(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN
    ).train()


def _ours(mesh: Any, x: Any) -> Callable[[Any], Any]:
    """The compiled step, whose tokens go to the ranks of their experts."""
    import torch

    import autoshard
    from autoshard import Mesh, Recipe

    layer = _layer()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    plan = autoshard.plan(
        *(layer, Mesh({"expert": mesh.size()})),
        example_inputs=(x,),
        optimizer=optimizer,
        recipe=Recipe(data=mesh.size(), expert=mesh.size(), zero=0, micro_batch=SEQUENCES // mesh.size()),
        global_batch=SEQUENCES,
        precision=None,
    )
    calls = [node.inputs for name, node in plan.nodes.items() if name == "experts"]
    assert calls, "the layer is one operator"
    assert all((tokens.axes_of(0), down.axes_of(0)) == (("expert",), ("expert",)) for tokens, *_, down in calls)
    step = autoshard.compile(layer, mesh, optimizer=optimizer, plan=plan, example_inputs=(x,))
    return lambda batch: step(batch)


def _by_hand(mesh: Any) -> Callable[[Any], Any]:
    """The same step by torch's collectives."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.nn import functional

    group, rank, ranks = mesh.get_group(), dist.get_rank(), dist.get_world_size()
    whole, held = _layer(), EXPERTS // ranks
    before, layer = whole.before, whole.block
    mine = slice(rank * held, (rank + 1) * held)
    router = nn.Parameter(layer.gate.weight.detach().clone())
    wide = nn.Parameter(layer.experts.gate_up_proj.detach()[mine].clone())
    narrow = nn.Parameter(layer.experts.down_proj.detach()[mine].clone())
    optimizer = torch.optim.AdamW([before.weight, router, wide, narrow], lr=1e-3, fused=True)

    class Exchange(torch.autograd.Function):
        """Send rows to their ranks; gradients return the same way."""

        @staticmethod
        def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
            ctx.sizes = sent, received
            found = rows.new_empty(sum(received), rows.shape[1])
            dist.all_to_all_single(found, rows, received, sent, group=group)
            return found

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            sent, received = ctx.sizes
            found = gradient.new_empty(sum(sent), gradient.shape[1])
            dist.all_to_all_single(found, gradient.contiguous(), sent, received, group=group)
            return found, None, None

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        """Return each rank's rows, grouped by expert."""
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = functional.grouped_mm(rows, wide.transpose(1, 2), offs=ends).chunk(2, -1)
        return functional.grouped_mm(functional.silu(gate) * up, narrow.transpose(1, 2), offs=ends)

    def forward(x: Tensor) -> Tensor:
        tokens = before(x.reshape(-1, HIDDEN))
        weights, chosen = functional.softmax(tokens @ router.t(), -1).topk(CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent = counts.view(ranks, held).sum(1).tolist()
        received = theirs.view(ranks, held).sum(1).tolist()
        rows = Exchange.apply(tokens[order // CHOSEN], sent, received)
        by_expert = torch.arange(held).repeat(ranks).repeat_interleave(theirs).argsort(stable=True)
        done = torch.empty_like(rows).index_copy(
            0, by_expert, experts(rows[by_expert], theirs.view(ranks, held).sum(0))
        )
        back = Exchange.apply(done, received, sent) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, back).square().mean() / ranks

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        share = len(batch) // ranks
        loss = forward(batch[rank * share : (rank + 1) * share])
        loss.backward()
        for parameter in (before.weight, router):
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    return step


if __name__ == "__main__":
    serve(_run)
