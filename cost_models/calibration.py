"""Measure this machine, and fit a `Cluster`: matrix products, memory, launch overhead, and the group's collectives.

Call `calibrate` on all ranks at once, after `init_process_group`; without a process group, one rank is measured. Each
number is a mean over sustained, back-to-back runs, averaged over the ranks, which slow each other down as in training.

Launch latency is the mean time of an add, mul, sub or div of eight numbers. The rate of matrix products is the median
over sizes. On a CPU, kernels that move bytes and composite kernels get curves: bytes per second by bytes
(`throughput`). The measured collectives are those of lowered programs (`_c10d_functional`), on the whole group and on
all groups of two at once. A collective runs right after matrix products, with cores busy and ranks late as in a step.
Its time is the time that it adds to the products.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import combinations
from math import exp, log
from pathlib import Path

import torch
from torch import distributed

from cost_models.collectives import all_gather_time, all_reduce_time, all_to_all_time, reduce_scatter_time
from cost_models.compute import matmul_time, work_time
from cost_models.hardware import Cluster, Device, MatmulCurve, NodeType
from cost_models.kernel_samples import KernelSample, aten_samples, cycled, memory_samples
from cost_models.throughput import Curve, curve_of
from cost_models.topology import GroupLinks, Link, MeasuredCollective
from cost_models.units import MIB

MATMUL_SIZES = ((128, 128, 128), (256, 256, 1024), (512, 512, 512), (1024, 512, 1024))
BETWEEN = (512, 768, 192)
"""Sizes m, n, k of the matrix products that run before each collective."""
PRODUCTS = (1, 4, 2, 6, 1, 3, 5, 2)
"""Numbers of products before each collective of a turn (`_turn_time`). They vary, so that ranks run out of step."""
COLLECTIVE_BYTES = (4096, MIB // 4, 2 * MIB, 8 * MIB)
COPY_BYTES = 32 * MIB
LAUNCHES = 100
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
COLLECTIVES = {
    "all_reduce": all_reduce_time,
    "all_gather": all_gather_time,
    "reduce_scatter": reduce_scatter_time,
    "all_to_all": all_to_all_time,
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured cluster, with the ISO date of the measurement.

    `measured_s` and `residuals` map the name of a measurement ("all_reduce.8.4096") to seconds, or to log(predicted /
    measured).
    """

    cluster: Cluster
    measured_s: Mapping[str, float]
    residuals: Mapping[str, float]
    date: str

    @property
    def ratios(self) -> dict[str, float]:
        """Name of a measurement to predicted time / measured time, for all measurements that the fit predicts."""
        return {name: exp(residual) for name, residual in self.residuals.items()}

    def save(self, path: str | Path) -> None:
        """Write the cluster as a TOML file; the source of each number states the median absolute error of the fit."""
        typical = statistics.median(abs(value) for value in self.residuals.values())
        source = f"calibrate() on this machine, {self.cluster.size} ranks at once; median |log residual| {typical:.3f}"
        self.cluster.save(path, source=source, date=self.date)


CollectiveCalls = Callable[[torch.Tensor, torch.Tensor, distributed.ProcessGroup], Mapping[str, Callable[[], object]]]
"""A function that takes a whole tensor [n], a rank's part of it [n / ranks], and a group.

It returns a mapping from each name in `COLLECTIVES` to a function that runs this collective once and waits for it.
"""

OnProgress = Callable[[str, int, int], None]
"""A function that takes the next measurement's name, the number of finished measurements, and the total number."""


def calibrate(
    *,
    name: str = "this_machine",
    memory_bytes: int | None = None,
    budget_s: float = 20.0,
    kernels: Sequence[KernelSample] = (),
    collectives: CollectiveCalls | None = None,
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Measure this machine within its present process group (all ranks must call), or alone without a process group.

    Args:
        name: name of the measured cluster.
        memory_bytes: usable bytes per rank; default: the device's own (GPU), or this machine's split over its ranks.
        budget_s: seconds, a rough limit of all timed runs. Each measurement gets a share, and runs at least twice.
        kernels: further operator calls to measure on a CPU, perhaps of several sizes of an operator. Ignored on a GPU.
        collectives: functions that run collectives; default: PyTorch's functional collectives.
        on_progress: called before each measurement, e.g. to draw a progress bar.

    Returns:
        The same calibration on every rank.
    """
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    samples = _kernel_samples(kernels)
    actions = _device_actions() | {sample.key: sample.prepare for sample in samples}
    groups = [(size, message) for size in _group_sizes(ranks) for message in COLLECTIVE_BYTES]
    note = _Note(on_progress, len(actions) + len(groups))
    share = 1.0 if ranks == 1 else 0.3
    measured = _measure_device(actions, share * budget_s / len(actions), note)
    calls = functional_collectives if collectives is None else collectives
    measured |= _measure_collectives(groups, ranks, calls, (1 - share) * budget_s, note)
    measured = _agree(measured, ranks)
    return _calibration(name, measured, samples, ranks, memory_bytes or _memory_bytes(ranks))


def pooled(passes: Sequence[Calibration], *, kernels: Sequence[KernelSample] = ()) -> Calibration:
    """Return one calibration, fitted to the mean measurements of several `passes`, all made with the same `kernels`.

    A shared machine changes its speed by the minute. So calibrate several times between the steps of a run.
    """
    first = passes[0].cluster
    measured = {name: statistics.mean(each.measured_s[name] for each in passes) for name in passes[0].measured_s}
    return _calibration(first.node.name, measured, _kernel_samples(kernels), first.size, first.device.memory_bytes)


def _kernel_samples(kernels: Sequence[KernelSample]) -> tuple[KernelSample, ...]:
    return (*memory_samples(), *aten_samples(), *kernels) if _place().type == "cpu" else ()


def _calibration(
    name: str, measured: Mapping[str, float], samples: Sequence[KernelSample], ranks: int, memory_bytes: int
) -> Calibration:
    cluster = _with_curves(_fit(name, measured, ranks, memory_bytes), samples, measured)
    residuals = _residuals(cluster, measured) | _kernel_residuals(cluster.device, samples, measured)
    return Calibration(cluster, measured, residuals, datetime.now(UTC).date().isoformat())


@dataclass(slots=True)
class _Note:
    on_progress: OnProgress | None
    total: int
    done: int = 0

    def next(self, what: str) -> None:
        if self.on_progress is not None:
            self.on_progress(what, self.done, self.total)
        self.done += 1


def _place() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _mean_time(action: Callable[[], object], share_s: float) -> float:
    """Return the mean seconds of a run of `action`, after one untimed run to warm up.

    Runs follow each other without a pause, at least twice, until `share_s` seconds have passed.
    """
    action()
    _synchronize()
    if distributed.is_initialized():
        distributed.barrier()
    runs, start = 0, time.perf_counter()
    while runs < 2 or time.perf_counter() - start < share_s:
        action()
        runs += 1
    _synchronize()
    return (time.perf_counter() - start) / runs


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device_actions() -> dict[str, Callable[[], Callable[[], object]]]:
    """Return, by name, functions that prepare a measurement of one rank and return a function that runs it once."""
    place = _place()
    actions: dict[str, Callable[[], Callable[[], object]]] = {}
    for dtype, kind in DTYPES.items():
        for m, n, k in _matmul_sizes(dtype, place):
            left = torch.randn(m, k, device=place, dtype=kind)
            right = torch.randn(k, n, device=place, dtype=kind)
            actions[f"matmul.{dtype}.{m}x{n}x{k}"] = partial(cycled, torch.mm, left, right)
    source = torch.randn(COPY_BYTES // 4, device=place)
    target = torch.empty_like(source)
    actions["copy"] = lambda: lambda: target.copy_(source)
    small = torch.randn(8, device=place)
    aten = torch.ops.aten
    launched = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor)  # as programs call operators
    actions["launch"] = lambda: lambda: [launched[i % len(launched)](small, small) for i in range(LAUNCHES)]
    query = torch.randn(1, 4, 256, 64, device=place)
    attention = torch.nn.functional.scaled_dot_product_attention
    actions["attention"] = lambda: lambda: attention(query, query, query)
    return actions


def _matmul_sizes(dtype: str, place: torch.device) -> Sequence[tuple[int, int, int]]:
    """Return the sizes (m, n, k) to measure: all `MATMUL_SIZES` for f32, the first for f16 on a CPU, else the third.

    A product of f16 of the third size takes 1.6 s on an AMD EPYC, which has no instructions for f16 (2026-11-28).
    """
    if dtype == "f32":
        return MATMUL_SIZES
    return MATMUL_SIZES[:1] if dtype == "f16" and place.type == "cpu" else MATMUL_SIZES[2:3]


def _measure_device(
    actions: Mapping[str, Callable[[], Callable[[], object]]], share_s: float, note: _Note
) -> dict[str, float]:
    """Return the mean seconds of a run of each action, by name; the seconds of "launch" are divided by `LAUNCHES`."""
    measured: dict[str, float] = {}
    for name, action in actions.items():
        note.next(name)
        measured[name] = _mean_time(action(), share_s)
    measured["launch"] /= LAUNCHES
    return measured


def _group_sizes(ranks: int) -> list[int]:
    """Return group sizes: all ranks, and two if `ranks` is even; no group for one rank."""
    if ranks == 1:
        return []
    return sorted({2, ranks}) if ranks % 2 == 0 else [ranks]


def _measure_collectives(
    groups: Sequence[tuple[int, int]], ranks: int, calls: CollectiveCalls, budget_s: float, note: _Note
) -> dict[str, float]:
    """Return the seconds of each collective, by its name, group size and bytes ("all_reduce.8.4096").

    `groups` has the pairs (group size, bytes) to measure. Groups of the same size run at the same time.
    """
    measured: dict[str, float] = {}
    for size in dict.fromkeys(size for size, _ in groups):
        group = _group_of(size, ranks)
        for message in (message for other, message in groups if other == size):
            note.next(f"collectives of {message} bytes over {size} ranks")
            measured |= _measure_group(group, message, calls, budget_s / (len(COLLECTIVES) * len(groups)))
        if size != ranks:
            distributed.destroy_process_group(group)
    return measured


def _group_of(size: int, ranks: int) -> distributed.ProcessGroup:
    """Cut all ranks into groups of `size` neighbours; return the process group that this rank belongs to."""
    blocks = [list(range(first, first + size)) for first in range(0, ranks, size)]
    group = distributed.group.WORLD if size == ranks else distributed.new_subgroups_by_enumeration(blocks)[0]
    assert isinstance(group, distributed.ProcessGroup)
    return group


def functional_collectives(
    full: torch.Tensor, part: torch.Tensor, group: distributed.ProcessGroup
) -> Mapping[str, Callable[[], object]]:
    """Return, by name, functions that each run one of PyTorch's functional collectives once, and wait for it."""
    ops, size, name = torch.ops._c10d_functional, group.size(), group.group_name
    pieces = [part.numel()] * size
    return {
        "all_reduce": lambda: ops.wait_tensor(ops.all_reduce(full, "sum", name)),
        "all_gather": lambda: ops.wait_tensor(ops.all_gather_into_tensor(part, size, name)),
        "reduce_scatter": lambda: ops.wait_tensor(ops.reduce_scatter_tensor(full, "sum", size, name)),
        "all_to_all": lambda: ops.wait_tensor(ops.all_to_all_single(full, pieces, pieces, name)),
    }


def _measure_group(
    group: distributed.ProcessGroup, message: int, calls: CollectiveCalls, share_s: float
) -> dict[str, float]:
    """Return the seconds of each collective of about `message` bytes, a multiple of the group's size."""
    size = group.size()
    part = torch.zeros(message // 4 // size, device=_place())
    full, (m, n, k) = part.repeat(size), BETWEEN
    left, right = torch.randn(m, k, device=_place()), torch.randn(k, n, device=_place())
    return {
        f"{collective}.{size}.{part.numel() * size * 4}": _added_time(call, lambda: torch.mm(left, right), share_s)
        for collective, call in calls(full, part, group).items()
    }


def _added_time(collective: Callable[[], object], product: Callable[[], object], share_s: float) -> float:
    """Return the mean seconds that a collective adds to the products before it; at least the mean's standard error.

    One run is two turns of `PRODUCTS`, one without and one with the collective, in alternating order. So a drifting
    machine speed affects both turns alike. The first run determines how many runs fit into `share_s` on the slowest
    rank, because all ranks need the same count.
    """
    turns = (partial(_turn_time, product, _nothing), partial(_turn_time, product, collective))
    for warm_up in (product, collective):
        warm_up()
    without, with_it = (turn() for turn in turns)
    first = torch.tensor(without + with_it, dtype=torch.float64, device=_place())
    distributed.all_reduce(first, distributed.ReduceOp.MAX)
    differences = torch.zeros(max(2, min(50, int(share_s / first.item()))), dtype=torch.float64, device=_place())
    differences[0] = with_it - without
    for run in range(1, len(differences)):
        order = (0, 1) if run % 2 == 0 else (1, 0)
        seconds = {which: turns[which]() for which in order}
        differences[run] = seconds[1] - seconds[0]
    distributed.all_reduce(differences)
    differences /= distributed.get_world_size() * len(PRODUCTS)
    error = differences.std() / len(differences) ** 0.5
    return max(differences.mean().item(), error.item(), 1e-9)


def _turn_time(product: Callable[[], object], then: Callable[[], object]) -> float:
    """Return the seconds of one turn: for each n in `PRODUCTS`, `product` runs n times, then `then` runs once.

    All ranks begin the turn together.
    """
    _synchronize()
    distributed.barrier()
    start = time.perf_counter()
    for count in PRODUCTS:
        for _ in range(count):
            product()
        then()
    _synchronize()
    return time.perf_counter() - start


def _nothing() -> None:
    """Do nothing: a turn without a collective calls this function in place of the collective."""


def _agree(measured: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Average each measurement over all ranks, so that it is equal on all of them."""
    if ranks == 1:
        return dict(measured)
    values = torch.tensor(list(measured.values()), dtype=torch.float64, device=_place())
    distributed.all_reduce(values)
    return dict(zip(measured, (values / ranks).tolist(), strict=True))


def _fit(name: str, measured: Mapping[str, float], ranks: int, memory_bytes: int) -> Cluster:
    launch = measured["launch"]
    rates = {dtype: _matmul_rate(measured, dtype, launch) for dtype in DTYPES}
    flops = 4 * 4 * 256 * 256 * 64
    attention = min(1.0, flops / max(measured["attention"] - launch, 1e-9) / rates["f32"])
    device = Device(
        name=name,
        peak_flops=rates,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=2 * COPY_BYTES / max(measured["copy"] - launch, 1e-9),
        memory_efficiency=1.0,
        launch_latency_s=launch,
        matmul=MatmulCurve(1, 1, 1, 0.0, 0.0, dict.fromkeys(rates, 1.0)),
        attention_efficiency=attention,
    )
    return Cluster(NodeType(name, device, ranks, _fit_link(measured, ranks), None))


def _with_curves(cluster: Cluster, samples: Sequence[KernelSample], measured: Mapping[str, float]) -> Cluster:
    if not samples:
        return cluster
    times: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        moved, seconds = sample.point(measured[sample.key], cluster.device)
        times.setdefault(sample.name, []).append((moved, seconds))
    curves: dict[str, Curve] = {name: curve_of(points) for name, points in times.items()}
    unit = replace(cluster.device, throughput=curves)
    return Cluster(replace(cluster.node, device=unit), cluster.nodes, cluster.devices_per_node)


def _kernel_residuals(unit: Device, samples: Sequence[KernelSample], measured: Mapping[str, float]) -> dict[str, float]:
    """Return log(predicted / measured) by a sample's key: mostly 0, because each curve goes through its samples."""
    return {
        sample.key: log(work_time(sample.work, unit, sample.name) / measured[sample.key])
        for sample in samples
        if sample.name in unit.throughput
    }


def _matmul_rate(measured: Mapping[str, float], dtype: str, launch_s: float) -> float:
    """Return FLOP/s of matrix products without the launch: the median over the measured sizes."""
    rates = []
    for key, seconds in measured.items():
        if key.startswith(f"matmul.{dtype}."):
            m, n, k = (int(size) for size in key.rsplit(".", 1)[1].split("x"))
            rates.append(2 * m * n * k / max(seconds - launch_s, 1e-9))
    return statistics.median(rates)


def _fit_link(measured: Mapping[str, float], ranks: int) -> Link:
    """Fit a link. A phase takes start + (n - 1) * latency + (n - 1)/n * bytes / bandwidth; an all-reduce is two phases.

    1. The smallest collectives of two group sizes give start and latency. With one group size, the latency is zero.
    2. The large collectives give the bandwidth: bytes / (time - start - latency). The divisor is at least time / 10.
    3. The number of phases of a reduce-scatter is the median of measured time / fitted time of a phase, at least 1.
    """
    if ranks == 1:
        return Link(1e12, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    phases = [sample for sample in _samples(measured) if sample.collective != "reduce_scatter"]
    small = {
        n: statistics.mean(s.phase_s for s in phases if s.group == n and s.size_bytes < MIB)
        for n in {s.group for s in phases}
    }
    least, most = min(small), max(small)
    latency = max(0.0, (small[most] - small[least]) / (most - least)) if most > least else 0.0
    start = max(0.0, small[most] - (most - 1) * latency)
    large = [s for s in phases if s.size_bytes >= MIB]
    carried = sum((s.group - 1) / s.group * s.size_bytes for s in large)
    excess = sum(s.phase_s - start - (s.group - 1) * latency for s in large)
    bandwidth = carried / max(excess, 0.1 * sum(s.phase_s for s in large))
    ring = Link(bandwidth, 1.0, 0.0, latency, start, 0.0, 1.0)
    ratios = [
        s.seconds / reduce_scatter_time(s.size_bytes, GroupLinks(s.group, s.group, 1, ring, None))
        for s in _samples(measured)
        if s.collective == "reduce_scatter"
    ]
    return replace(ring, reduce_scatter_phases=max(1.0, statistics.median(ratios)), measured=_collectives(measured))


def _collectives(measured: Mapping[str, float]) -> tuple[MeasuredCollective, ...]:
    """Fit a nonnegative start, latency and bandwidth of each collective, by least squares of relative errors."""
    samples = _samples(measured)
    found = []
    for name in dict.fromkeys(sample.collective for sample in samples):
        own = [sample for sample in samples if sample.collective == name]
        columns = [(1.0, s.group - 1.0, (s.group - 1) / s.group * s.size_bytes) for s in own]
        rows = [[value / s.seconds for value in row] for s, row in zip(own, columns, strict=True)]
        used = (0, 1, 2) if len({s.group for s in own}) > 1 else (0, 2)
        start, latency, per_byte = _non_negative(rows, used)
        found.append(MeasuredCollective(name, start, latency, 1 / max(per_byte, 1e-12)))
    return tuple(found)


def _non_negative(rows: Sequence[Sequence[float]], used: Sequence[int]) -> list[float]:
    """Minimise |rows @ x - 1|^2 over x >= 0. Entries of x outside the columns `used` are 0.

    Least squares are solved for each subset of `used`, with scaled columns for good conditioning. The best solution
    without a negative entry counts.
    """
    matrix = torch.tensor(rows, dtype=torch.float64)
    scale = matrix.abs().amax(0).clamp_min(1e-300)
    best, least = [0.0] * len(rows[0]), float("inf")
    for count in range(1, len(used) + 1):
        for subset in combinations(used, count):
            part = matrix[:, subset] / scale[list(subset)]
            solution = torch.linalg.lstsq(part, torch.ones(len(rows), 1, dtype=torch.float64)).solution[:, 0]
            error = float((part @ solution - 1).square().sum())
            if bool((solution >= 0).all()) and error < least:
                least, best = error, [0.0] * len(rows[0])
                for place, value in zip(subset, (solution / scale[list(subset)]).tolist(), strict=True):
                    best[place] = value
    return best


@dataclass(frozen=True, slots=True)
class _Sample:
    collective: str
    group: int
    size_bytes: int
    seconds: float

    @property
    def phase_s(self) -> float:
        return self.seconds / (2 if self.collective == "all_reduce" else 1)


def _samples(measured: Mapping[str, float]) -> list[_Sample]:
    keys = [key.split(".") for key in measured]
    return [
        _Sample(key[0], int(key[1]), int(key[2]), seconds)
        for key, seconds in zip(keys, measured.values(), strict=True)
        if key[0] in COLLECTIVES
    ]


def _residuals(cluster: Cluster, measured: Mapping[str, float]) -> dict[str, float]:
    residuals: dict[str, float] = {}
    for sample in _samples(measured):
        group = GroupLinks(sample.group, sample.group, 1, cluster.node.intra, None)
        predicted = COLLECTIVES[sample.collective](sample.size_bytes, group)
        residuals[f"{sample.collective}.{sample.group}.{sample.size_bytes}"] = log(predicted / sample.seconds)
    for key, seconds in measured.items():
        if key.startswith("matmul."):
            _, dtype, sizes = key.split(".")
            m, n, k = (int(size) for size in sizes.split("x"))
            residuals[key] = log(matmul_time(m, n, k, 1, dtype, cluster.device) / seconds)
    return residuals


def _memory_bytes(ranks: int) -> int:
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return _host_memory_bytes() // ranks


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
