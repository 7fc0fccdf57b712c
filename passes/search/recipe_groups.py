"""The process groups of a recipe's axes, with the links between their ranks, and the times of collectives in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from autoshard.errors import RecipeError
from autoshard.ir.execution import Execution
from cost_models.collectives import (
    all_gather_time,
    all_reduce_time,
    all_to_all_time,
    dispatch_time,
    reduce_scatter_time,
)
from cost_models.compute import memory_time
from cost_models.hardware import Cluster
from cost_models.topology import GroupLinks
from passes.search.layers.price_layers import EXPERT, AxisTraffic
from passes.search.layers.propagate_axis import MoveKind

Exchange = Callable[[float, GroupLinks], float]
"""Takes bytes and a group, and returns the seconds of a collective."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The links between the ranks of each process group of a recipe.

    Args:
        tensor, context, expert: the groups of the axes with these names.
        replicas: the ranks of data x context, which hold the same parameters before ZeRO.
        zero: the ranks over which ZeRO shards.
        outer: the ranks that hold the same ZeRO shard; gradients are all-reduced among them.
        expert_replicas: the ranks that hold the same experts.
        neighbours: two ranks of consecutive pipeline stages.
    """

    tensor: GroupLinks
    context: GroupLinks
    expert: GroupLinks
    replicas: GroupLinks
    zero: GroupLinks
    outer: GroupLinks
    expert_replicas: GroupLinks
    neighbours: GroupLinks

    def of(self, axis: str) -> GroupLinks:
        """Return the links of the ranks along the axis "tensor", "context" or "expert"."""
        return {"tensor": self.tensor, "context": self.context, "expert": self.expert}[axis]


def recipe_groups(recipe: Execution, cluster: Cluster) -> Groups:
    """Return the process groups of a recipe on a cluster.

    Raises:
        RecipeError: the recipe needs another number of devices than the cluster has.
    """
    if recipe.devices != cluster.size:
        raise RecipeError(
            f"The recipe needs pipeline={recipe.pipeline} x data={recipe.data} x context={recipe.context} x "
            f"tensor={recipe.tensor} = {recipe.devices} devices; the cluster has {cluster.size}. "
            f"Take sizes that multiply to {cluster.size}, or a cluster of {recipe.devices} devices."
        )
    replicas, shards = recipe.replicas, recipe.zero_group or recipe.replicas

    def along(inner: int, size: int, inside: int = 1) -> GroupLinks:
        """Return the links of a group of `size` members, each with `inside` consecutive ranks.

        Neighbouring members begin `inner` ranks apart.
        """
        outer, between = cluster.size // (inner * size), inner // inside
        shape = {"outer": outer, "group": size, "between": between, "inside": inside}
        return cluster.group_links(shape, ("group", "inside") if inside > 1 else ("group",))

    tensor, expert_tensor = recipe.tensor, recipe.expert_tensor
    inner, inside = expert_tensor, 1
    if not recipe.runtime.folded_experts:
        inner, inside = tensor * recipe.context, tensor * recipe.context // expert_tensor
    return Groups(
        tensor=along(1, tensor),
        context=along(tensor, recipe.context),
        expert=along(inner, recipe.expert),
        replicas=along(tensor, replicas),
        zero=along(tensor, shards),
        outer=along(tensor * shards, replicas // shards),
        expert_replicas=along(inner * recipe.expert, recipe.expert_ranks // (recipe.expert * inside), inside),
        neighbours=along(tensor * replicas, min(2, recipe.pipeline)) if recipe.pipeline > 1 else along(1, 1),
    )


def traffic_time(item: AxisTraffic, recipe: Execution, groups: Groups) -> float:
    """Return the seconds of one collective of a layer for one micro-batch.

    The collective is assumed to run alone.
    """
    group = groups.of(item.axis)
    if recipe.runtime.merged_dispatch and (item.axis, item.kind) == (EXPERT, MoveKind.EXCHANGE):
        return _merged_s(item.bytes, item.copies, group)
    return _alone_s(_MOVES[item.kind], item.bytes, group)


_MOVES = {
    MoveKind.GATHER: all_gather_time, MoveKind.SCATTER: reduce_scatter_time, MoveKind.REDUCE: all_reduce_time,
    MoveKind.EXCHANGE: all_to_all_time,
}  # fmt: skip


@lru_cache(maxsize=2**16)
def _alone_s(exchange: Exchange, moved_bytes: float, group: GroupLinks) -> float:
    """Return the seconds of one collective, such as `all_reduce_time(moved_bytes, group)`.

    The result is cached, because a search prices the same collectives many times.
    """
    return exchange(moved_bytes, group)


_merged_s = lru_cache(maxsize=2**16)(dispatch_time)
"""Seconds of an all-to-all that sends each token once to each rank with some of its experts, without other traffic."""


def sorting_time(item: AxisTraffic, recipe: Execution, cluster: Cluster) -> float:
    """Return the seconds in which a rank sorts exchanged tokens by expert, or restores the order of the tokens.

    The result is 0 for other axes than the expert axis. It is also 0 for a merged dispatch, which sorts the tokens
    itself.
    """
    if item.axis != EXPERT or recipe.runtime.merged_dispatch:
        return 0.0
    return memory_time(2 * item.bytes, cluster.device)


_LISTED_S = 2e-5
"""Seconds of the host for each rank of a collective that takes a list of tensors: C++ makes a view and a copy.

Source: jiahuanglin.xyz, all_lessons/gpu_kernel_serving/18_pytorch_to_kernel, 5 to 25 us.
"""


def in_pieces(
    exchange: Exchange, total_bytes: float, group: GroupLinks, recipe: Execution, *, count: int | None = None
) -> float:
    """Return the seconds of exchanging `total_bytes` in `count` equal pieces; None: pieces of `Runtime.bucket_bytes`.

    With `Runtime.listed_collectives`, each piece also takes host time for each rank of the group.
    """
    count = max(1, round(total_bytes / recipe.runtime.bucket_bytes)) if count is None else count
    listing_s = group.size * _LISTED_S if recipe.runtime.listed_collectives and group.size > 1 else 0.0
    return count * (_alone_s(exchange, total_bytes / count, group) + listing_s)
