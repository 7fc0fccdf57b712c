"""A mesh together with the cluster whose devices are its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.errors import MeshError
from autoshard.ir.mesh import Mesh
from cost_models.hardware import Cluster


@dataclass(frozen=True, slots=True)
class ClusterMesh:
    """A mesh over all devices of a cluster, made by `autoshard.Cluster.mesh`, as a target of `autoshard.plan`.

    Raises:
        MeshError: ranks of the mesh and devices of the cluster differ in number.
    """

    cluster: Cluster
    mesh: Mesh

    def __post_init__(self) -> None:
        if self.mesh.size != self.cluster.size:
            raise MeshError(
                f"{self.mesh} has {self.mesh.size} ranks, and the cluster {self.cluster.name} has {self.cluster.size} "
                f"devices. Give axes whose sizes multiply to {self.cluster.size}, or a cluster of {self.mesh.size} "
                "devices."
            )

    def __str__(self) -> str:
        return f"{self.mesh} on {self.cluster.name}"
