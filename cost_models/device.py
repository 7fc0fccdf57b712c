"""A device: its peaks, its memory, and its efficiency in kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cost_models.constants import HardwareFile, load
from cost_models.errors import UnknownHardwareError
from cost_models.throughput import Curve, curves_of, numbers_of


@dataclass(frozen=True, slots=True)
class MatmulCurve:
    """How matrix products use a device.

    Args:
        units: number of processors (SMs), each of which computes one tile at a time.
        tile_m, tile_n: rows and columns of the largest tile of the result.
        tile_overhead_bytes: cost of a tile's fill and drain. The tile takes as long as if each row of its operands, of
            k * itemsize bytes, were longer by this number of bytes.
        tile_load_share: share of a smaller tile's additional loads that prolongs the product. The rest is hidden behind
            arithmetic.
        efficiency: dtype name to the fraction of peak reached in the limit of large sizes (power and issue limits).
        misaligned_slowdown: factor on the time of a 16 or 8 bit product if its rows do not start at multiples of 16
            bytes.
    """

    units: int
    tile_m: int
    tile_n: int
    tile_overhead_bytes: float
    tile_load_share: float
    efficiency: Mapping[str, float] = field(hash=False)
    misaligned_slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionCurve:
    """Efficiency of one direction (forward or backward) of a fused attention kernel on a device.

        time = flops / (peak * efficiency) * (1 + softmax_depth / depth) * (1 + idle_keys / keys)
        idle_keys = overhead_keys, in causal attention overhead_keys + diagonal_keys

    Args:
        efficiency: fraction of peak in the limit of deep heads and long sequences.
        softmax_depth: head depth at which the exponentials of a block take as long as its products.
        overhead_keys: time of each query block's prologue and epilogue, as a number of keys that take as long.
        diagonal_keys: time of the masked part of the blocks on the diagonal, as a number of keys that take as long.
        block_queries: number of queries that one processor works on at a time.
    """

    efficiency: float
    softmax_depth: float
    overhead_keys: float
    diagonal_keys: float
    block_queries: float


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """The curves of both directions of a fused attention kernel, e.g. of "flash2"."""

    forward: AttentionCurve
    backward: AttentionCurve

    def slowed(self, factor: float) -> AttentionKernel:
        """Return the kernel with all times multiplied by `factor`."""
        both = (replace(each, efficiency=each.efficiency / factor) for each in (self.forward, self.backward))
        return AttentionKernel(*both)


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link between a device's memory and pinned memory of its host, used in one direction at a time."""

    to_host_bytes_per_s: float
    from_host_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or a rank's share of a machine.

    Args:
        name: name in the data files.
        peak_flops: dense FLOP/s by dtype name: "f64", "f32" (true float32), "tf32" (float32 on tensor cores, only if
            torch.backends.cuda.matmul.allow_tf32), "bf16", "f16", "f8". `peak` of an absent dtype raises
            UnknownHardwareError.
        memory_bytes: bytes that a program can use.
        memory_bandwidth_bytes_per_s: nominal bandwidth of the device's memory.
        memory_efficiency: fraction of the bandwidth that a copy reaches.
        launch_latency_s: time of the smallest operator, added to each operator.
        matmul: efficiency of matrix products.
        attention_efficiency: fraction of peak for attention without a known kernel curve (a CPU).
        attention: fused attention kernels of the device, by name; the first is in use.
        dispatch_s: seconds of host time to issue one operator, by runtime. "eager" is PyTorch's dispatcher, "graph" a
            captured CUDA graph; with "blocking" the host waits for each kernel. Empty if operators are not issued ahead
            (a CPU).
        throughput: measured curves of kernels by the operator's name, and of all other kernels as "memory", in the form
            of `cost_models.throughput`. Empty if bandwidth and the curves above suffice (a GPU).
        host_link: link to the host's memory; None if both share their memory (a CPU), or if the link is unknown.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    memory_efficiency: float
    launch_latency_s: float
    matmul: MatmulCurve
    attention_efficiency: float
    attention: Mapping[str, AttentionKernel] = field(default_factory=dict, hash=False)
    dispatch_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    throughput: Mapping[str, Curve] = field(default_factory=dict, hash=False)
    host_link: HostLink | None = None

    def to_host_time(self, size_bytes: float) -> float:
        """Seconds of one copy to the host: launch + bytes / bandwidth. Raises UnknownHardwareError without a link."""
        return self.launch_latency_s + size_bytes / self._linked().to_host_bytes_per_s

    def from_host_time(self, size_bytes: float) -> float:
        """Seconds of one copy from the host: launch + bytes / bandwidth. Raises UnknownHardwareError without a link."""
        return self.launch_latency_s + size_bytes / self._linked().from_host_bytes_per_s

    def _linked(self) -> HostLink:
        if self.host_link is None:
            raise UnknownHardwareError(
                f"Device {self.name!r} has no host_link, so nothing can be offloaded to its host's memory. If it has "
                "memory of its own, add [host_link.to_host] and [host_link.from_host] with value, unit 'B/s', source "
                "and date to its file."
            )
        return self.host_link

    def peak(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s for a dtype name. Raises UnknownHardwareError if the file lacks it."""
        if dtype not in self.peak_flops:
            raise UnknownHardwareError(
                f"Device {self.name!r} has no peak_flops.{dtype}. Known: {', '.join(self.peak_flops)}. "
                f"Add [peak_flops.{dtype}] with value, unit, source and date to its file."
            )
        return self.peak_flops[dtype]

    def matmul_rate(self, dtype: str) -> float:
        """Return the FLOP/s of large matrix products: peak * efficiency.

        Raises UnknownHardwareError if the device's file lacks the peak or the efficiency of the dtype.
        """
        peak = self.peak(dtype)
        if dtype not in self.matmul.efficiency:
            raise UnknownHardwareError(
                f"Device {self.name!r} has no matmul.efficiency.{dtype}. Known: {', '.join(self.matmul.efficiency)}. "
                f"Add [matmul.efficiency.{dtype}] with value, unit, source and date to its file."
            )
        return peak * self.matmul.efficiency[dtype]

    def with_attention(self, kernel: str) -> Device:
        """Return the device with another fused attention kernel in use, such as "flash3".

        Raises UnknownHardwareError if the device has no kernel of this name.
        """
        if kernel not in self.attention:
            raise UnknownHardwareError(
                f"Device {self.name!r} has no attention kernel {kernel!r}. Known: {', '.join(self.attention)}. "
                f"Add [attention.{kernel}.forward.*] and [attention.{kernel}.backward.*] to its architecture's file."
            )
        return replace(self, attention={kernel: self.attention[kernel]} | dict(self.attention))

    def slowed(self, factor: float) -> Device:
        """Return the device with the times of its kernels multiplied by `factor`.

        Peaks, launch latency and measured curves (`throughput`) stay as they are.
        """
        if factor == 1:
            return self
        products = {name: share / factor for name, share in self.matmul.efficiency.items()}
        return replace(
            self,
            memory_efficiency=self.memory_efficiency / factor,
            matmul=replace(self.matmul, efficiency=products),
            attention_efficiency=self.attention_efficiency / factor,
            attention={name: kernel.slowed(factor) for name, kernel in self.attention.items()},
        )

    def dispatch(self, how: str) -> float:
        """Return the seconds of host time to issue one operator under `how`, a key of `dispatch_s` such as "eager".

        The time is 0 if the device is its own host. Raises UnknownHardwareError if the device's file lacks `how`.
        """
        if not self.dispatch_s:
            return 0.0
        if how not in self.dispatch_s:
            raise UnknownHardwareError(
                f"Device {self.name!r} has no dispatch.{how}. Known: {', '.join(self.dispatch_s)}."
            )
        return self.dispatch_s[how]


def device(name: str) -> Device:
    """Load a device of the data files. Raises UnknownHardwareError, with the known names, for an unknown name."""
    return read_device(load("devices", name), name)


def read_device(file: HardwareFile, name: str) -> Device:
    """Read a device from its file, and constants that the file lacks from its architecture's file."""
    if "architecture" in file.texts:
        file = file.overlay(load("architectures", file.text("architecture")))
    return Device(
        name=name,
        peak_flops=file.family("peak_flops", "FLOP/s"),
        memory_bytes=int(file.number("memory_bytes", "B")),
        memory_bandwidth_bytes_per_s=file.number("memory_bandwidth", "B/s"),
        memory_efficiency=file.number("memory_efficiency", "1"),
        launch_latency_s=file.number("launch_latency", "s"),
        matmul=MatmulCurve(
            units=file.count("matmul.units", "1"),
            tile_m=file.count("matmul.tile_m", "1"),
            tile_n=file.count("matmul.tile_n", "1"),
            tile_overhead_bytes=file.number("matmul.tile_overhead", "B"),
            tile_load_share=file.number("matmul.tile_load_share", "1"),
            efficiency=file.family("matmul.efficiency", "1"),
            misaligned_slowdown=file.number("matmul.misaligned_slowdown", "1"),
        ),
        attention_efficiency=_plain_attention_efficiency(file),
        attention={name: _kernel(file, name) for name in _kernel_names(file)},
        dispatch_s=file.family("dispatch", "s"),
        throughput=curves_of(file.family("throughput", "B/s"), file.origin),
        host_link=_host_link(file),
    )


def _host_link(file: HardwareFile) -> HostLink | None:
    if not file.family("host_link", "B/s"):
        return None
    return HostLink(file.number("host_link.to_host", "B/s"), file.number("host_link.from_host", "B/s"))


def _plain_attention_efficiency(file: HardwareFile) -> float:
    """Return `attention_efficiency` of a device's file; by default, the forward efficiency of the kernel in use."""
    names = _kernel_names(file)
    if names and "attention_efficiency" not in file.constants:
        return _kernel(file, names[0]).forward.efficiency
    return file.number("attention_efficiency", "1")


_CURVE_FIELDS = ("efficiency", "softmax_depth", "overhead_keys", "diagonal_keys", "block_queries")


def _kernel_names(file: HardwareFile) -> list[str]:
    """Return the names of a file's attention kernels. The kernel of the file's key `attention_kernel` comes first."""
    names = dict.fromkeys(path.split(".")[1] for path in file.constants if path.startswith("attention."))
    used = file.texts.get("attention_kernel")
    return sorted(names, key=lambda name: name != used)


def _kernel(file: HardwareFile, name: str) -> AttentionKernel:
    forward, backward = (
        AttentionCurve(*(file.number(f"attention.{name}.{direction}.{key}", "1") for key in _CURVE_FIELDS))
        for direction in ("forward", "backward")
    )
    return AttentionKernel(forward, backward)


def device_numbers(unit: Device) -> dict[str, tuple[float, str]]:
    """Return the constants of a device's file: dotted path to (value, unit)."""
    curves = {
        f"attention.{name}.{direction}.{key}": (getattr(getattr(kernel, direction), key), "1")
        for name, kernel in unit.attention.items()
        for direction in ("forward", "backward")
        for key in _CURVE_FIELDS
    }
    return {
        **{f"peak_flops.{dtype}": (value, "FLOP/s") for dtype, value in unit.peak_flops.items()},
        "memory_bytes": (unit.memory_bytes, "B"),
        "memory_bandwidth": (unit.memory_bandwidth_bytes_per_s, "B/s"),
        "memory_efficiency": (unit.memory_efficiency, "1"),
        "launch_latency": (unit.launch_latency_s, "s"),
        "matmul.units": (unit.matmul.units, "1"),
        "matmul.tile_m": (unit.matmul.tile_m, "1"),
        "matmul.tile_n": (unit.matmul.tile_n, "1"),
        "matmul.tile_overhead": (unit.matmul.tile_overhead_bytes, "B"),
        "matmul.tile_load_share": (unit.matmul.tile_load_share, "1"),
        "matmul.misaligned_slowdown": (unit.matmul.misaligned_slowdown, "1"),
        **{f"matmul.efficiency.{dtype}": (value, "1") for dtype, value in unit.matmul.efficiency.items()},
        "attention_efficiency": (unit.attention_efficiency, "1"),
        **curves,
        **{f"dispatch.{how}": (value, "s") for how, value in unit.dispatch_s.items()},
        **numbers_of(unit.throughput),
        **_host_numbers(unit.host_link),
    }


def _host_numbers(link: HostLink | None) -> dict[str, tuple[float, str]]:
    if link is None:
        return {}
    return {
        "host_link.to_host": (link.to_host_bytes_per_s, "B/s"),
        "host_link.from_host": (link.from_host_bytes_per_s, "B/s"),
    }
