"""Measure this machine as a cluster to plan for, or learn from a profile of a training step.

`cost_models.calibration` times the kernels and collectives of compiled programs: autoshard's own operators on PyTorch's
fused kernels, and Gloo reductions in the order of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import log

import torch
import torch.distributed as dist
from torch import Tensor, fx

import autoshard.kernels  # noqa: F401  (registers the operators)
from autoshard.cluster import Cluster
from autoshard.errors import NotAvailableError
from autoshard.ir.mesh import Mesh
from autoshard.ir.profile import Profile, RangeCost
from autoshard.kernels.native import NATIVE
from autoshard.runtime.rank_order import reduce_in_rank_order
from autoshard.runtime.train_step import TrainStep
from cost_models import calibration
from cost_models.calibration import Calibration, OnProgress
from cost_models.kernel_samples import KernelSample
from cost_models.refit import refitted

ATTENTIONS = ((1, 2, 64, 64), (4, 4, 128, 64), (16, 4, 128, 64), (2, 4, 512, 64))
ROWS, CLASSES, COLUMNS = (32, 512, 4096), 1024, 768
TOKENS, EXPERTS, CHOSEN = (64, 1024), (8, 256, 512), 2
"""Sizes of the sampled experts layers. `TOKENS` has the numbers of tokens, one sample for each.

`EXPERTS` is number of experts, hidden size and intermediate size. Each token chooses `CHOSEN` experts.
"""


def calibrate(
    step: TrainStep | Profile | None = None,
    *,
    name: str = "this_machine",
    memory_bytes: int | None = None,
    budget_s: float = 20.0,
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Measure this machine as a `Cluster` for `autoshard.plan`, or correct a planned cluster by a measured step.

    Without `step`, operators and collectives are timed; under `torchrun` all ranks must call this together. With
    `step`, nothing runs. The step's last profile gives a correction factor for each constant of the hardware, such as
    "matmul.bf16". The factor is measured seconds / predicted seconds, over all calls that the constant prices.

    Args:
        step: a `TrainStep` that was profiled, or a `Profile`. None: measure operators and collectives one by one.
        name: name of the measured cluster.
        memory_bytes: usable bytes per rank. None: the GPU's memory, or a CPU machine's memory divided by its ranks.
            With `step`, None keeps the memory of the planned cluster.
        budget_s: rough limit for all timed runs together, in seconds; not used with `step`.
        on_progress: called as `on_progress(name, finished, total)` before each measurement, with the measurement's name
            and numbers of measurements; not used with `step`.

    Returns:
        The calibration, the same on every rank. `calibration.cluster` is the measured cluster, and
        `calibration.save(path)` writes it as a TOML file.

    Raises:
        NotAvailableError: the step has no profile, or one process simulated all its ranks. Profile a step under
            `torchrun` with `step.profile(steps=3)`.
    """
    if step is not None:
        return learned_from(_profile_of(step), name, memory_bytes)
    found = calibration.calibrate(
        name=name,
        memory_bytes=memory_bytes,
        budget_s=budget_s,
        kernels=tuple(semantic_samples()),
        collectives=collectives_that_run,
        on_progress=on_progress,
    )
    measured = found.cluster
    return replace(found, cluster=Cluster(measured.node, measured.nodes, measured.devices_per_node))


def learned_from(profile: Profile, name: str, memory_bytes: int | None = None) -> Calibration:
    """Return the cluster for which the profile's steps were predicted, corrected by the measured times.

    1. The launch latency becomes the result of `_launch_latency`.
    2. The seconds that a constant of the hardware predicts are multiplied by a factor, between 1/`_MOST` and `_MOST`.
       The factor is the measured seconds of the constant's calls, divided by their predicted seconds. Both are without
       launches.

    `name` and `memory_bytes` are the arguments of `calibrate`. Raises `NotAvailableError` for simulated ranks.
    """
    if profile.is_simulated:
        raise NotAvailableError(
            "calibrate(step): one process simulated all ranks, so the measured times say nothing about hardware. "
            "Profile a step under torchrun."
        )
    old = profile.predicted.cluster
    known = [(cost, seconds) for cost, seconds in profile.costs() if cost.constant and min(cost.seconds, seconds) > 0]
    launch_s = _launch_latency(known, old.device.launch_latency_s)
    measured, work = defaultdict[str, float](float), defaultdict[str, float](float)
    launches = defaultdict[str, int](int)
    for cost, seconds in known:
        measured[cost.constant] += seconds
        launches[cost.constant] += cost.launches
        work[cost.constant] += max(0.0, cost.seconds - cost.launches * old.device.launch_latency_s)
    factors = {
        constant: min(_MOST, max(1 / _MOST, (seconds - launches[constant] * launch_s) / work[constant]))
        for constant, seconds in measured.items()
        if work[constant] > 0
    }
    residuals = {
        constant: log((factor * work[constant] + launches[constant] * launch_s) / measured[constant])
        for constant, factor in factors.items()
    }
    node = replace(refitted(old.node, factors, launch_s), name=name)
    if memory_bytes is not None:
        node = replace(node, device=replace(node.device, memory_bytes=memory_bytes))
    cluster = Cluster(node, old.nodes, old.devices_per_node)
    return Calibration(cluster, dict(measured), residuals, datetime.now(UTC).date().isoformat())


_MOST = 100.0
"""The largest factor by which a profile changes a constant."""


def _profile_of(step: TrainStep | Profile) -> Profile:
    found = step.last_profile if isinstance(step, TrainStep) else step
    if isinstance(found, Profile):
        return found
    has_none = "the step has no profile" if isinstance(step, TrainStep) else f"{step!r} is no training step"
    raise NotAvailableError(f"calibrate(step): {has_none}. Measure steps within `with step.profile(steps=3):` first.")


def _launch_latency(known: Sequence[tuple[RangeCost, float]], old_s: float) -> float:
    """Return the seconds of a launch: the least measured time of a call, per launch, beyond its predicted work.

    If some call takes less time than its predicted work, the result is `old_s`. In any case, the result is at most the
    time of the shortest call, per launch. `known` has predicted costs with their measured seconds.
    """
    calls = [(cost, seconds) for cost, seconds in known if cost.launches]
    shortest_s = min((seconds / cost.launches for cost, seconds in calls), default=old_s)
    beyond_s = min((old_s + (seconds - cost.seconds) / cost.launches for cost, seconds in calls), default=old_s)
    return min(beyond_s if beyond_s > 0 else old_s, shortest_s)


def semantic_samples() -> Iterator[KernelSample]:
    """Yield calls to time: attention, experts, cross-entropy and RMS norm, forward and backward, at several sizes."""
    ours, aten = torch.ops.autoshard, torch.ops.aten
    for shape in ATTENTIONS:
        b, h, s, d = shape
        q, k, v, grad = (torch.randn(shape) for _ in range(4))
        constants = (0.0, True, d**-0.5, 0, [0, 0, 0, 0], [b, h, s, s])
        out, lse = ours.attention(q, k, v, None, None, *constants)
        yield _native(ours.attention.default, q, k, v, None, None, *constants)
        yield _native(ours.attention_backward.default, grad, q, k, v, None, out, lse, None, *constants)
    experts, hidden, intermediate = EXPERTS
    matrices = (torch.randn(experts, 2, intermediate, hidden), None, torch.randn(experts, hidden, intermediate))
    for tokens in TOKENS:
        index, shares = torch.randint(experts, (tokens, CHOSEN)), torch.rand(tokens, CHOSEN)
        x, grad = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
        gate = (experts, "silu", False, False, 1.0, 0.0)
        yield KernelSample.of(ours.experts.default, x, index, shares, *matrices, *gate)
        yield KernelSample.of(ours.experts_backward.default, grad, x, index, shares, *matrices, *gate)
    weight = torch.ones(COLUMNS)
    for count in ROWS:
        logits, target, grad = torch.randn(count, CLASSES), torch.randint(0, CLASSES, (count,)), torch.randn(count)
        _, lse = ours.cross_entropy(logits, target, -100, 0.0)
        yield _native(ours.cross_entropy.default, logits, target, -100, 0.0)
        yield _native(ours.cross_entropy_backward.default, grad, logits, target, lse, -100, 0.0)
        x, wide = torch.randn(count, COLUMNS), torch.randn(count, COLUMNS)
        _, rstd = aten._fused_rms_norm.default(x, [COLUMNS], weight, 1e-6)
        yield KernelSample.of(aten._fused_rms_norm.default, x, [COLUMNS], weight, 1e-6)
        backward = aten._fused_rms_norm_backward.default
        yield KernelSample.of(backward, wide, x, [COLUMNS], rstd, weight, [True, True])


def _native(operator: torch._ops.OpOverload, *arguments: object) -> KernelSample:
    return KernelSample.of(operator, *arguments, runs=NATIVE[operator])


def collectives_that_run(full: Tensor, part: Tensor, group: dist.ProcessGroup) -> Mapping[str, Callable[[], object]]:
    """Return, by name of a collective, a function that runs it once, as compiled programs do, and waits.

    Args:
        full: a whole tensor, [n].
        part: a rank's part of `full`, [n / ranks].
        group: the ranks, all of which must run the functions together.
    """
    ops, size = torch.ops._c10d_functional, group.size()
    return {
        **calibration.functional_collectives(full, part, group),
        "all_reduce": _as_programs_do(ops.all_reduce.default, full, ("sum",), group),
        "reduce_scatter": _as_programs_do(ops.reduce_scatter_tensor.default, full, ("sum", size), group),
    }


def _as_programs_do(
    reduction: torch._ops.OpOverload, operand: Tensor, arguments: tuple[str | int, ...], group: dist.ProcessGroup
) -> Callable[[], object]:
    """Return a function that runs the collective `reduction` on `operand` as compiled programs do.

    On Gloo, compiled programs add in the order of ranks.
    """
    graph = fx.Graph()
    placeholder = graph.placeholder("operand")
    placeholder.meta["val"] = operand
    started = graph.call_function(reduction, (placeholder, *arguments, _AXIS))
    graph.output(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (started,)))
    mesh, of_gloo = Mesh({_AXIS: group.size()}), dist.get_backend(group) == "gloo"
    program = reduce_in_rank_order(fx.GraphModule({}, graph), mesh, of_gloo=of_gloo)
    for node in program.graph.nodes:
        node.args = tuple(group.group_name if argument == _AXIS else argument for argument in node.args)
    program.recompile()
    return lambda: program(operand)


_AXIS = "ranks"
