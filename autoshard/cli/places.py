"""Clusters and meshes as words of a command line: `--cluster h100_sxm:8x8`, `--mesh data=8,model=8`."""

from __future__ import annotations

from autoshard.cli.recipes import is_whole, named_twice
from autoshard.cluster import Cluster
from autoshard.errors import MeshError
from autoshard.ir.cluster_mesh import ClusterMesh
from autoshard.ir.mesh import Mesh


def place_of(cluster: str, mesh: str | None) -> Cluster | ClusterMesh:
    """Return the cluster of `--cluster`, with the axes of `--mesh` if they are given."""
    found = parse_cluster(cluster)
    return found if mesh is None else found.mesh(parse_mesh(mesh))


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that a text describes.

    The text is `NODE_TYPE:NODESxDEVICES`, `NODE_TYPE` for one whole node, or the path of a .toml file.

    Raises:
        MeshError: the text is not of this form.

    Example:
        >>> parse_cluster("h100_sxm:2x4").size
        8
    """
    if text.endswith(".toml"):
        return Cluster.load(text)
    name, _, shape = text.partition(":")
    if not shape:
        return Cluster(name)
    sizes = shape.split("x")
    if len(sizes) != 2 or not all(map(is_whole, sizes)):
        raise MeshError(f"--cluster {text!r} must read NODE_TYPE:NODESxDEVICES, e.g. h100_sxm:8x8.")
    return Cluster(name, nodes=int(sizes[0]), devices_per_node=int(sizes[1]))


def parse_mesh(text: str) -> Mesh:
    """Return the mesh of a text such as `data=8,model=8`.

    Raises:
        MeshError: the text is not of this form.

    Example:
        >>> parse_mesh("data=2,model=4").size
        8
    """
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(separator and is_whole(size) for _, separator, size in pairs):
        raise MeshError(f"--mesh {text!r} must read AXIS=SIZE,AXIS=SIZE, e.g. data=8,model=8.")
    twice = named_twice(name for name, _, _ in pairs)
    if twice is not None:
        raise MeshError(f"--mesh {text!r} names axis {twice!r} twice; give each axis once.")
    return Mesh({name: int(size) for name, _, size in pairs})
