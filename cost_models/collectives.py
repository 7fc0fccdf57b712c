"""Time of collectives from latency and bandwidth (Thakur, Rabenseifner, Gropp 2005; Hockney's alpha-beta model).

One phase of a ring over n members is a reduce-scatter or an all-gather; an all-reduce is two phases. With `bytes` as
the full size, a phase takes

    start + (n - 1) * latency + (n - 1)/n * bytes / bandwidth

A group on several nodes pipelines its traffic through the fabric of each node, the network and the spine at once.
Latencies add up, and the slowest bandwidth decides. Every algorithm (ring, tree, in the switch) is priced with every
protocol of the library. The fastest pair counts, as in NCCL's tuner (src/graph/tuning.cc):

* The protocol Simple has long chunks and full bandwidth. Its bandwidth ramps up slowly with size, because chunks have
  to fill the pipeline. Let t be the bandwidth term, and r the time of `ramp_bytes` at full speed. Pipelining with the
  best chunk size adds `2 * sqrt(t * r)`, at most t itself.
* LL and LL128 (`topology.Protocol`) send flags with the data, so hops are short, and part of the bandwidth is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import sqrt

from cost_models.errors import CostArgumentError
from cost_models.topology import GroupLinks, Link


def all_gather_time(gathered_bytes: float, group: GroupLinks) -> float:
    """Seconds of an all-gather; `gathered_bytes` is the full result on each rank (n times each rank's shard)."""
    return _measured("all_gather", gathered_bytes, group) or _fastest(_ring_phase, gathered_bytes, group)


def reduce_scatter_time(input_bytes: float, group: GroupLinks) -> float:
    """Seconds of a reduce-scatter; `input_bytes` is the full operand on each rank (n times each rank's result)."""
    if measured := _measured("reduce_scatter", input_bytes, group):
        return measured
    phases = max((link.reduce_scatter_phases for link in group.links), default=1.0)
    return phases * _fastest(_ring_phase, input_bytes, group)


def all_reduce_time(operand_bytes: float, group: GroupLinks) -> float:
    """Seconds of an all-reduce by the fastest of `all_reduce_algorithms`; `operand_bytes` is each rank's tensor."""
    if group.size == 1:
        _check(operand_bytes)
        return 0.0
    measured = _measured("all_reduce", operand_bytes, group)
    return measured or min(all_reduce_algorithms(operand_bytes, group).values())


def all_reduce_algorithms(operand_bytes: float, group: GroupLinks) -> dict[str, float]:
    """Seconds of an all-reduce by algorithm.

    * ring: two phases, so it equals reduce-scatter plus all-gather (starts included).
    * tree: a ring reduces within each node, then a double binary tree reduces over the nodes, and each node spreads the
      result. The network carries 1 x bytes for two nodes, 2 x for more, in log2(nodes) steps each way.
    * switch: like tree, but the switch of each node reduces and spreads (NCCL's NVLS; NVLSTree on several nodes). Each
      of a node's n devices sends and receives (n + 1)/n * bytes, in two steps. It needs a fabric that can reduce.
    """
    _check(operand_bytes)
    variants = _variants(group) if group.size > 1 else ()
    found = {
        "ring": 2 * min((_ring_phase(operand_bytes, each) for each in variants), default=0.0),
        "tree": min((_tree(operand_bytes, each) for each in variants), default=0.0),
    }
    if group.intra is not None and group.intra.in_network_efficiency > 0:
        found["switch"] = _switch(operand_bytes, group)
    return found


def all_to_all_time(local_bytes: float, group: GroupLinks) -> float:
    """Seconds of an all-to-all; `local_bytes` is each rank's operand, of which 1/n goes to each rank.

    A rank sends (per_node - 1)/n of its bytes over the fabric. At the same time it sends (nodes - 1)/nodes over the
    network, and (pods - 1)/pods over the spine. Messages go straight to their readers, so bandwidth does not ramp up as
    along a ring.
    """
    return _measured("all_to_all", local_bytes, group) or _fastest(_all_to_all, local_bytes, group)


def shift_time(message_bytes: float, group: GroupLinks) -> float:
    """Seconds for every member to send `message_bytes` to the next member around a ring, all at the same time.

    The time is start, latency and bytes / bandwidth of the slowest link. Over the network and the spine, one message
    leaves each node and each pod. An all-gather around the ring is size - 1 shifts, so a measured all-gather is divided
    by size - 1.
    """
    if measured := _measured("all_gather", group.size * message_bytes, group):
        return measured / (group.size - 1)
    return _fastest(_shift, message_bytes, group)


def dispatch_time(local_bytes: float, copies: float, group: GroupLinks) -> float:
    """Seconds to send each token's row to the ranks of its experts, or to send the experts' sums back.

    A row is the values of one token, and `copies` is the number of experts for each token. `local_bytes` counts each
    row `copies` times. Each expert of a token is on any rank with equal probability. A row crosses the network once for
    each node that has some of its experts. The node then sends the row once to each rank with such an expert
    (DeepSeek-V3, Liu et al. 2024, section 3.2.2).
    """
    _check(local_bytes)

    def time(moved_bytes: float, variant: GroupLinks) -> float:
        ranks, nodes, pods = (_distinct(count, copies) for count in (variant.size, variant.nodes, variant.pods))
        inside = _direct((variant.per_node - 1) / variant.per_node * ranks * moved_bytes, variant.intra)
        outside = _direct((variant.nodes - 1) / variant.nodes * nodes * moved_bytes, variant.inter)
        beyond = _direct((variant.pods - 1) / variant.pods * pods * moved_bytes, variant.spine)
        return _starts(variant) + max(inside, outside, beyond)

    return _fastest(time, local_bytes, group)


def _distinct(places: int, draws: float) -> float:
    """Expected number of distinct places that `draws` independent draws hit, divided by `draws`.

    All `places` are equally likely, so the draws hit places * (1 - (1 - 1/places)^draws) distinct places.
    """
    return places * (1 - (1 - 1 / places) ** draws) / draws


def point_to_point_time(message_bytes: float, link: Link) -> float:
    """Seconds to send `message_bytes` over one link: start + latency + bytes / bandwidth. A single hop has no ramp."""
    _check(message_bytes)
    found = [each.intra for each in _variants(GroupLinks(2, 2, 1, link, None)) if each.intra is not None]
    return min(each.start_s + each.latency_s + message_bytes / each.reached_bytes_per_s for each in found)


def _measured(collective: str, full_bytes: float, group: GroupLinks) -> float:
    """Seconds of a collective by the measurements of the group's link.

    The result is 0 for one rank, and for a link without a measurement of the collective.
    """
    _check(full_bytes)
    found = group.measured(collective) if group.size > 1 else None
    return 0.0 if found is None else found.seconds(full_bytes, group.size)


def _fastest(time: Callable[[float, GroupLinks], float], moved_bytes: float, group: GroupLinks) -> float:
    """Seconds of `time(moved_bytes, group)` with the fastest protocol of the group; 0 for a group of one rank."""
    _check(moved_bytes)
    if group.size == 1:
        return 0.0
    return min(time(moved_bytes, variant) for variant in _variants(group))


@lru_cache(maxsize=4096)
def _variants(group: GroupLinks) -> tuple[GroupLinks, ...]:
    """The group itself, for the protocol Simple, and a copy for each other protocol that all its links have."""
    shared = [name for name in _names(group.links[0]) if all(name in _names(link) for link in group.links)]
    return (group, *(_with_protocol(group, name) for name in shared))


def _names(link: Link) -> list[str]:
    return [protocol.name for protocol in link.protocols]


def _with_protocol(group: GroupLinks, name: str) -> GroupLinks:
    def change(link: Link | None) -> Link | None:
        if link is None:
            return None
        protocol = next(each for each in link.protocols if each.name == name)
        return replace(
            link,
            efficiency=link.efficiency * protocol.bandwidth_share,
            latency_s=protocol.latency_s,
            start_s=protocol.start_s,
        )

    return replace(group, intra=change(group.intra), inter=change(group.inter), spine=change(group.spine))


def _ring_phase(full_bytes: float, group: GroupLinks) -> float:
    """Seconds of a ring's phase: start, latency, and (n - 1)/n * bytes at the slowest of fabric, network and spine."""
    carried = (group.size - 1) / group.size * full_bytes
    inside = _transfer(carried, group.intra)
    return _start(group) + _around(group) + max(inside, _outside(carried, group))


def _tree(operand_bytes: float, group: GroupLinks) -> float:
    """Seconds of an all-reduce by a ring within each node and a tree over the nodes.

    The operand is sent in chunks, so both run at the same time.
    """
    n = group.per_node
    return _over_nodes(operand_bytes, group, 2 * _transfer((n - 1) / n * operand_bytes, group.intra), 2 * (n - 1))


def _switch(operand_bytes: float, group: GroupLinks) -> float:
    """Seconds of an all-reduce by each node's switch and a tree over the nodes.

    The operand is sent in chunks, so both run at the same time.
    """
    link, n = group.intra, group.per_node
    assert link is not None
    carried = (n + 1) / n * operand_bytes
    inside = carried / (link.bandwidth_bytes_per_s * link.in_network_efficiency) + _ramp(carried, link)
    return _over_nodes(operand_bytes, group, inside, 2)


def _over_nodes(operand_bytes: float, group: GroupLinks, inside: float, steps: int) -> float:
    """Seconds of an all-reduce by a tree over nodes, given `inside` seconds and `steps` hops within each node."""
    if group.nodes == 1:
        return 2 * _start(group) + inside + _steps(steps, 0, group)
    crossings = 1 if group.nodes == 2 else 2
    outside = _outside(crossings * operand_bytes, group)
    return 2 * _start(group) + _steps(steps, 2 * ceil_log2(group.nodes), group) + max(inside, outside)


def _all_to_all(local_bytes: float, group: GroupLinks) -> float:
    inside = _direct((group.per_node - 1) / group.size * local_bytes, group.intra)
    outside = _direct((group.nodes - 1) / group.nodes * local_bytes, group.inter)
    beyond = _direct((group.pods - 1) / group.pods * local_bytes, group.spine)
    return _starts(group) + max(inside, outside, beyond)


def _shift(message_bytes: float, group: GroupLinks) -> float:
    moving = max(_direct(message_bytes, link) for link in group.links)
    return _start(group) + max(link.latency_s for link in group.links) + moving


def _starts(group: GroupLinks) -> float:
    """Seconds of start and latency of an exchange in which every rank has a message for every other rank.

    A message to another node first goes to the rank there that has the sender's local rank.
    """
    return _start(group) + _steps(group.per_node - 1, group.nodes - 1, group)


def _direct(carried_bytes: float, link: Link | None) -> float:
    """Seconds of bytes / bandwidth, without the ramp of the bandwidth; 0 for an absent link."""
    return 0.0 if link is None else carried_bytes / link.reached_bytes_per_s


def _outside(carried_bytes: float, group: GroupLinks) -> float:
    """Seconds to move bytes out of each node over all used network cards, and at the same time out of each pod."""
    network = _transfer(carried_bytes / group.used_cards, group.inter)
    return max(network, _transfer(carried_bytes / (group.size / group.pods), group.spine))


def ceil_log2(count: int) -> int:
    """Smallest whole e with 2**e >= count, such as the steps of a tree over `count` nodes."""
    return (count - 1).bit_length()


def _transfer(carried_bytes: float, link: Link | None) -> float:
    """Seconds of bytes / bandwidth, with the ramp of the bandwidth; 0 for an absent link."""
    if link is None:
        return 0.0
    return carried_bytes / link.reached_bytes_per_s + _ramp(carried_bytes, link)


def _ramp(carried_bytes: float, link: Link) -> float:
    """Seconds to fill the pipeline: 2 * sqrt(t * r), at most t = bytes / bandwidth; r is the time of `ramp_bytes`."""
    bulk = carried_bytes / link.reached_bytes_per_s
    return min(bulk, 2 * sqrt(bulk * link.ramp_bytes / link.reached_bytes_per_s))


def _around(group: GroupLinks) -> float:
    """Seconds of latency of a round along a ring: size - 1 hops, nodes - 1 of them over the network, as in NCCL."""
    return _steps(group.size - group.nodes, group.nodes - 1, group)


def _steps(inside: int, outside: int, group: GroupLinks) -> float:
    latency = inside * group.intra.latency_s if group.intra is not None else 0.0
    return latency + (outside * group.inter.latency_s if group.inter is not None else 0.0)


def _start(group: GroupLinks) -> float:
    return max(link.start_s for link in group.links)


def _check(moved_bytes: float) -> None:
    if moved_bytes < 0:
        raise CostArgumentError(f"bytes={moved_bytes!r} is negative.")
