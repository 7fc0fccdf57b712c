"""Time of collectives: latency-bandwidth terms (Thakur, Rabenseifner, Gropp 2005; Hockney's alpha-beta).

One phase of a ring over n members (reduce-scatter or all-gather; `bytes` is the full size) takes

    (n - 1) * latency + (n - 1)/n * bytes / bandwidth            all-reduce = two phases

A group of per_node x nodes pipelines its traffic through the fabric of each node and the network at once: latencies
add, the slower of the two bandwidths decides. Each algorithm that the library offers is priced, and the fastest counts.
`ramp`: bandwidth saturates slowly with size, as chunks fill the pipeline; with t the bandwidth term and r the time of
`ramp_bytes` at full speed, pipelining with the best chunk size costs 2 * sqrt(t * r) more, and at most t itself.
"""

from __future__ import annotations

from math import sqrt

from cost_models.errors import CostArgumentError
from cost_models.topology import GroupLinks, Link


def all_gather_time(gathered_bytes: float, group: GroupLinks) -> float:
    """Seconds of an all-gather; `gathered_bytes` is the full result on each rank (n times each rank's shard)."""
    return _started(group, _ring_phase(gathered_bytes, group), phases=1)


def reduce_scatter_time(input_bytes: float, group: GroupLinks) -> float:
    """Seconds of a reduce-scatter; `input_bytes` is the full operand on each rank (n times each rank's result)."""
    links = [link for link in (group.intra, group.inter) if link is not None]
    phases = max((link.reduce_scatter_phases for link in links), default=1.0)
    return _started(group, phases * _ring_phase(input_bytes, group), phases=phases)


def all_reduce_time(operand_bytes: float, group: GroupLinks) -> float:
    """Seconds of an all-reduce; `operand_bytes` is the tensor on each rank. The fastest of ring, tree and in-network.

    * ring: two phases, so it equals reduce-scatter plus all-gather (starts included).
    * tree across nodes, reduced in each node first (NCCL's tree and NVLSTree): the network carries 1 x bytes for two
      nodes, 2 x for more, in log2(nodes) steps each way.
    * in the switch (NVLS): each device sends and receives (n + 1)/n * bytes, no steps.
    """
    fastest = min(2 * _ring_phase(operand_bytes, group), _tree(operand_bytes, group))
    return _started(group, fastest, phases=2)


def all_to_all_time(local_bytes: float, group: GroupLinks) -> float:
    """Seconds of an all-to-all; `local_bytes` is each rank's operand, of which 1/n goes to each rank.

    Per rank (per_node - 1)/n of it crosses the node's fabric and (nodes - 1)/nodes the network, at the same time.
    """
    _check(local_bytes)
    if group.size == 1:
        return 0.0
    inside = _transfer((group.per_node - 1) / group.size * local_bytes, group.intra)
    outside = _transfer((group.nodes - 1) / group.nodes * local_bytes, group.inter)
    steps = _steps(group.per_node - 1, group.nodes - 1, group)
    return _started(group, steps + max(inside, outside), phases=1)


def broadcast_time(message_bytes: float, group: GroupLinks) -> float:
    """Seconds of a broadcast of `message_bytes`: a pipelined chain, each link carries the message once."""
    _check(message_bytes)
    if group.size == 1:
        return 0.0
    inside = _transfer(message_bytes, group.intra) if group.per_node > 1 else 0.0
    outside = _transfer(message_bytes / group.per_node, group.inter) if group.nodes > 1 else 0.0
    steps = _steps(group.per_node - 1, group.nodes - 1, group)
    return _started(group, steps + max(inside, outside), phases=1)


def point_to_point_time(message_bytes: float, link: Link) -> float:
    """Seconds to send `message_bytes` over one link: start + latency + bytes / bandwidth."""
    _check(message_bytes)
    return link.start_s + link.latency_s + _transfer(message_bytes, link)


def _ring_phase(full_bytes: float, group: GroupLinks) -> float:
    """(n - 1)/n * bytes over the slower of the fabric and the node's share of the network."""
    _check(full_bytes)
    if group.size == 1:
        return 0.0
    carried = (group.size - 1) / group.size * full_bytes
    inside = _transfer(carried, group.intra)
    outside = _transfer(carried / group.per_node, group.inter)
    return _steps(group.per_node - 1, group.nodes - 1, group) + max(inside, outside)


def _tree(operand_bytes: float, group: GroupLinks) -> float:
    """Reduce in the node, tree over nodes, spread in the node, pipelined."""
    inside, steps = _node_all_reduce(operand_bytes, group)
    if group.nodes == 1:
        return inside + _steps(steps, 0, group)
    crossings = 1 if group.nodes == 2 else 2
    outside = _transfer(crossings * operand_bytes / group.per_node, group.inter)
    return _steps(steps, 2 * ceil_log2(group.nodes), group) + max(inside, outside)


def _node_all_reduce(operand_bytes: float, group: GroupLinks) -> tuple[float, int]:
    """(bandwidth term, steps) of the all-reduce inside one node: ring, or in the switch where it can."""
    n = group.per_node
    if group.intra is None or n == 1:
        return 0.0, 0
    ring = 2 * _transfer((n - 1) / n * operand_bytes, group.intra)
    if group.intra.in_network_efficiency == 0:
        return ring, 2 * (n - 1)
    switch = group.intra
    in_switch = (n + 1) / n * operand_bytes / (switch.bandwidth_bytes_per_s * switch.in_network_efficiency)
    in_switch += _ramp((n + 1) / n * operand_bytes, switch)
    return (in_switch, 2) if in_switch < ring else (ring, 2 * (n - 1))


def ceil_log2(count: int) -> int:
    """Smallest e with 2**e >= count."""
    return (count - 1).bit_length()


def _transfer(carried_bytes: float, link: Link | None) -> float:
    """bytes / bandwidth with the ramp; nothing over an absent link."""
    if link is None:
        return 0.0
    return carried_bytes / link.reached_bytes_per_s + _ramp(carried_bytes, link)


def _ramp(carried_bytes: float, link: Link) -> float:
    """2 * sqrt(t * r), at most t: what filling the pipeline adds."""
    bulk = carried_bytes / link.reached_bytes_per_s
    return min(bulk, 2 * sqrt(bulk * link.ramp_bytes / link.reached_bytes_per_s))


def _steps(inside: int, outside: int, group: GroupLinks) -> float:
    latency = inside * group.intra.latency_s if group.intra is not None else 0.0
    return latency + (outside * group.inter.latency_s if group.inter is not None else 0.0)


def _started(group: GroupLinks, time_s: float, phases: float) -> float:
    """Add the start of the slowest link used, once per phase; nothing at all for a group of one."""
    starts = [link.start_s for link in (group.intra, group.inter) if link is not None]
    return time_s + phases * max(starts) if starts else 0.0


def _check(moved_bytes: float) -> None:
    if moved_bytes < 0:
        raise CostArgumentError(f"bytes={moved_bytes!r} is negative.")
