"""Clusters of unlike islands, each with devices of one kind, joined by a network (Barham et al. 2022, "Pathways").

Ranks are those of the first island, then those of the second, and so on. Inside an island everything is as in its own
`Cluster`; between two, each device has its share of the network that joins them: the one that is given, or, of the two
islands' own, the slower. Like islands on a network of their own are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import networkx

from cost_models import constants
from cost_models.constants import Constant
from cost_models.errors import HardwareFileError, TopologyError, UnknownHardwareError
from cost_models.hardware import Cluster, link_numbers, read_link
from cost_models.topology import Link

_TABLE = "islands"


@dataclass(frozen=True, slots=True, init=False)
class JoinedCluster:
    """Islands of different devices or links, joined by a network.

    Args:
        islands: clusters, each of one kind of nodes.
        network: that joins them: one of the data files ("infiniband_ndr400"), or a `Link`, as one device sees it; None:
            between two islands the slower of their own.

    Raises:
        UnknownHardwareError: no such network, or none given and an island without one.
        TopologyError: no island, or something else than clusters.

    Example:
        >>> joined = JoinedCluster([Cluster("h100_sxm", 2, 8), Cluster("a100_sxm_80gb", 4, 8)])
        >>> joined.size, joined.name
        (48, 'h100_sxm:2x8+a100_sxm_80gb:4x8')
    """

    islands: tuple[Cluster, ...]
    network: Link | None

    def __init__(self, islands: Sequence[Cluster], *, network: str | Link | None = None) -> None:
        if not islands or not all(isinstance(each, Cluster) for each in islands):
            raise TopologyError(f"JoinedCluster({islands!r}): its islands are Clusters, one or more.")
        link = (
            network if network is None or isinstance(network, Link) else read_link(constants.load("networks", network))
        )
        alone = [each.name for each in islands if link is None and each.node.inter is None]
        if alone and len(islands) > 1:
            raise UnknownHardwareError(
                f"{alone[0]} has no network of its own, so what joins it to the others is unknown; name one: "
                f"network= one of {', '.join(constants.names('networks'))}, or a Link."
            )
        object.__setattr__(self, "islands", _merged(islands, link))
        object.__setattr__(self, "network", link)

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(island.size for island in self.islands)

    @property
    def name(self) -> str:
        """Its islands, as the command line reads them."""
        return "+".join(island.name for island in self.islands)

    @property
    def uniform(self) -> Cluster | None:
        """The same as a cluster of one kind, if it is one."""
        return self.islands[0] if len(self.islands) == 1 else None

    def link(self, first: int, second: int) -> Link:
        """What a device of one island has towards another island, when all of its island's send at once."""
        return min((self._outward(self.islands[each]) for each in (first, second)), key=_speed)

    def _outward(self, island: Cluster) -> Link:
        """A device's share of its node's way out of the island."""
        if self.network is not None:
            return self.network
        own, wiring = island.node.inter, island.node.wiring
        assert own is not None, "islands without a network are refused"
        link = own.scaled(wiring.devices_per_nic / min(island.devices_per_node, wiring.devices_per_nic))
        return link.scaled(1 / wiring.oversubscription) if wiring.nodes_per_pod else link

    def topology(self) -> networkx.Graph:
        """The graphs of the islands (`Cluster.topology`) and the ("core",) that joins them.

        Devices have their rank of the whole; all else begins with its island's place, (1, "switch", 0). Every device
        has an edge of its own to the core: its share of the network between islands.
        """
        graph, first = networkx.Graph(), 0
        for place, island in enumerate(self.islands):
            own = island.topology()
            names = {node: ("device", first + node[1]) if node[0] == "device" else (place, *node) for node in own.nodes}
            graph.update(networkx.relabel_nodes(own, names))
            if len(self.islands) > 1:
                bytes_per_s = self._outward(island).reached_bytes_per_s
                ranks = range(first, first + island.size)
                graph.add_edges_from(((("device", rank), ("core",)) for rank in ranks), bytes_per_s=bytes_per_s)
            first += island.size
        return graph

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of islands: by hand, or written by `save`.

        Each [[islands]] has `node`, a node type's name, and may have `nodes` and `devices_per_node`; or `file`, a
        cluster file beside this one (as `autoshard calibrate` writes); or all that such a file has. `network`, a name
        at the top, joins them.

        Raises:
            HardwareFileError: it is no such file; names what is missing.
        """
        origin = constants.check_file(path)
        document = constants.read_document(origin)
        tables = document.get(_TABLE)
        if not isinstance(tables, list) or not tables:
            raise HardwareFileError(
                f"{path}: no islands; a joined cluster has a table [[islands]] for each, with node or file. A cluster "
                "of one kind is read by Cluster.load."
            )
        islands = [_island(table, f"{path}: [[islands]] number {place}", origin) for place, table in enumerate(tables)]
        network = document.get("network")
        if isinstance(network, dict):
            network = read_link(constants.parse({"network": network}, str(path)), "network.")
        return cls(islands, network=network)

    def save(self, path: str | Path, *, source: str, date: str) -> None:
        """Write this cluster as TOML; `source` and `date` (ISO) say where its numbers come from."""
        parts = []
        if self.network is not None:
            numbers = link_numbers("network.", self.network)
            items = {key: Constant(value, unit, source, date) for key, (value, unit) in numbers.items()}
            parts.append(constants.dump({}, items))
        for island in self.islands:
            file = island.to_file(source, date)
            items = {f"{_TABLE}.{key}": item for key, item in file.constants.items()}
            parts.append(f"[[{_TABLE}]]\n{constants.dump(file.texts, items)}")
        Path(path).write_text("\n".join(parts), encoding="utf-8")


def _speed(link: Link) -> float:
    return link.reached_bytes_per_s


def _merged(islands: Sequence[Cluster], network: Link | None) -> tuple[Cluster, ...]:
    """The islands, those that are alike and joined by a network of their own taken together."""
    nodes: dict[object, int] = {}
    kinds: dict[object, Cluster] = {}
    for place, island in enumerate(islands):
        own = island.node.inter is not None and network in (None, island.node.inter)
        key = (island.node, island.devices_per_node) if own else place
        nodes[key] = nodes.get(key, 0) + island.nodes
        kinds.setdefault(key, island)
    return tuple(Cluster(kind.node, nodes[key], kind.devices_per_node) for key, kind in kinds.items())


_SHORT = ("node", "nodes", "devices_per_node")


def _island(table: object, origin: str, path: Path) -> Cluster:
    """The island of one table of a file."""
    if not isinstance(table, dict):
        raise HardwareFileError(f"{origin}: {table!r} is no table.")
    if isinstance(table.get("file"), str):
        return Cluster.load(path.parent / table["file"])
    if "node" not in table:
        return Cluster.of_file(constants.parse(table, origin))
    unknown = [key for key in table if key not in _SHORT]
    counts = [table.get("nodes", 1), table.get("devices_per_node", 1)]
    if unknown or not all(isinstance(count, int) for count in counts):
        raise HardwareFileError(f"{origin}: {table!r}; an island has {', '.join(_SHORT)}, the last two whole numbers.")
    return Cluster(str(table["node"]), table.get("nodes", 1), table.get("devices_per_node"))
