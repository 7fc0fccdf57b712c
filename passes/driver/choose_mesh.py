"""Choose the mesh when the user compiles for a cluster, and not for a mesh."""

from __future__ import annotations

from dataclasses import replace

from autoshard.call import Call
from autoshard.errors import MeshError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.update import Update
from autoshard.runtime.launch import share_among_processes, world_size
from cost_models.hardware import Cluster
from passes.driver.plan_step import outer_search, plan_step
from passes.driver.planner import Planner


def choose_mesh(call: Call, cluster: Cluster, planner: Planner, update: Update | None) -> tuple[Planner, Mesh]:
    """Return `planner` with `made`, the fastest plan of a call on a cluster, and return the plan's mesh.

    The first rank plans for all ranks. A given plan (`planner.fixed`) decides the mesh without a search.

    Raises:
        MeshError: the call has no example inputs, or the run has another number of processes than the cluster has
            devices.
    """
    if planner.fixed is not None:
        return planner, planner.fixed.mesh
    if call.example_inputs is None:
        raise MeshError(
            "compile(model, Cluster(...)) must plan to pick the axes of the mesh: pass example_inputs=, or a mesh."
        )
    processes = world_size()
    if 1 < processes != cluster.size:
        raise MeshError(f"{cluster} has {cluster.size} devices, but this run has {processes} processes.")

    def chosen() -> Plan:
        planned = plan_step(call, planner, update, outer_search(call))
        assert not isinstance(planned, Plan), "without global_batch a step has a plan"
        return planned.plan

    made = share_among_processes(chosen, call.options.timeout_s)
    return replace(planner, made=made), made.mesh
