"""A mesh of Gloo processes whose collectives and messages take as long as on a given network.

Only a network slower than one machine's loopback shows whether a program hides its communication. A call of `wait`
returns no sooner than a link of the given latency and bandwidth would allow.

The model of time is that of Hockney 1994: a message of b bytes takes latency + b / bandwidth. Each rank has one link
for each axis. A collective begins when it is issued, or when the link of its axis is free. It occupies the link for
bytes / bandwidth, and ends one latency later. All groups along an axis share its link. The bytes are those that a rank
sends with ring algorithms (Thakur, Rabenseifner, Gropp 2005, section 4). A collective along several axes occupies all
their links, with the least bandwidth and the longest latency. Barriers are not delayed.

A message to one rank occupies its sender's link. The sender may write to the tensor when the link has sent it. The
receiver gets the message one latency later. A second message tells the receiver this time, by the sender's clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.errors import MeshError
from autoshard.ir.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Link:
    """The network along one mesh axis, as each rank sees it. By default it adds no time.

    Args:
        latency_s: seconds from the end of sending to the end of receiving; default 0.
        bandwidth_bytes_per_s: bytes per second that a rank sends; infinite by default.

    Raises:
        MeshError: the latency is negative or infinite, or the bandwidth is not positive.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and self.bandwidth_bytes_per_s > 0):
            raise MeshError(
                f"{self!r}: a latency is at least 0 seconds, a bandwidth more than 0 bytes per second; "
                "write Link(latency_s=1e-3, bandwidth_bytes_per_s=125e6) for 1 Gbit/s."
            )


class Clock(Protocol):
    """A clock, in seconds, by which links are delayed.

    Processes that exchange messages must start their clocks together.
    """

    def now_s(self) -> float:
        """Return the present time in seconds, counted from a fixed start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait until this clock has advanced by `seconds`."""
        ...


class _MachineClock:
    def now_s(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


_MACHINE = _MachineClock()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective or message that this rank waited for, as `record_transfers` records it.

    Times are seconds of the mesh's clock (`delayed_mesh(clock=)`). The default clock is `time.perf_counter`, whose zero
    is arbitrary, so only differences of times have a meaning.

    Args:
        operation: the operation of the process group, such as "allreduce", "send" or "recv".
        axes: the mesh axes whose links the transfer occupied; ("box",) inside a box.
        sent_bytes: the bytes that this rank sent; for a received message, the bytes that its sender sent.
        issued_s: the time when the operation was issued; for a received message, by its sender.
        done_s: the time when the links had finished the transfer.
        duration_s: the seconds that the transfer takes on idle links.
        waited_s: the seconds that this rank waited for the transfer, which computation did not hide.
    """

    operation: str
    axes: tuple[str, ...]
    sent_bytes: int
    issued_s: float
    done_s: float
    duration_s: float
    waited_s: float


class _Links:
    """This rank's link of each axis, and the time when each link is free.

    `listeners` are the lists to which finished transfers are added.
    """

    def __init__(self, links: Mapping[str, Link], clock: Clock, box: tuple[int, Link] | None) -> None:
        self._links = {**links, **({} if box is None else {_BOX: box[1]})}
        self.clock = clock
        self._free_at_s = dict.fromkeys(self._links, 0.0)
        self.listeners: list[list[Transfer]] = []

    def occupy(self, axes: Sequence[str], sent_bytes: int, now_s: float) -> float:
        """Send `sent_bytes` over the links of `axes`, from `now_s` or from when these links are free.

        Return the time at which the links have sent the bytes, in seconds of the clock. Until then they are occupied.
        """
        end_s = max([now_s, *(self._free_at_s[axis] for axis in axes)]) + self.occupied_s(axes, sent_bytes)
        self._free_at_s.update(dict.fromkeys(axes, end_s))
        return end_s

    def occupied_s(self, axes: Sequence[str], sent_bytes: int) -> float:
        return max((sent_bytes / self._links[axis].bandwidth_bytes_per_s for axis in axes), default=0.0)

    def latency_s(self, axes: Sequence[str]) -> float:
        """Return the longest latency of the links of `axes`, in seconds."""
        return max((self._links[axis].latency_s for axis in axes), default=0.0)


class _DelayedWork(dist.Work):
    """A `Work` handle of torch: `wait` returns when Gloo has finished, and not before the delayed links have."""

    def __init__(self, works: Sequence[Any], links: _Links, transfer: Callable[[], Transfer]) -> None:
        super().__init__()
        self._works = works
        self._links = links
        self._transfer = transfer
        self._has_waited = False

    def wait(self, timeout: Any = None) -> bool:
        clock = self._links.clock
        start_s = clock.now_s()
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        transfer = self._transfer()
        while (left_s := transfer.done_s - clock.now_s()) > 0:
            clock.sleep(left_s)
        if not self._has_waited:
            self._has_waited = True
            told = replace(transfer, waited_s=clock.now_s() - start_s)
            for listener in self._links.listeners:
                listener.append(told)
        return True

    def is_completed(self) -> bool:
        has_come = all(work.is_completed() for work in self._works)
        return has_come and self._links.clock.now_s() >= self._transfer().done_s


class DelayedGloo(dist.ProcessGroup):
    """A process group along mesh axes that communicates through Gloo, and takes as long as the given links would.

    Each method starts Gloo's operation, and returns a handle that completes no sooner than the links would. Methods
    have the names that torch's functional collectives (C++) and its Python collectives call, in torch 2.11 and later.
    """

    def __init__(self, gloo: ProcessGroupGloo, axes: tuple[str, ...], links: _Links) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]
        # Operations without delay go to Gloo, and so does the group's name.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._gloo: Any = gloo
        self._axes = axes
        self.links = links

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> dist.Work:
        """All-reduce. Each of n ranks counts 2 (n - 1) / n of the tensor's bytes as sent."""
        return self._delayed("allreduce", 2 * self._others(_bytes_of(tensors)), self._gloo.allreduce(tensors, *options))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], *options: Any) -> dist.Work:
        """All-reduce several tensors as one transfer."""
        work = self._gloo.allreduce_coalesced(tensors, *options)
        return self._delayed("allreduce", 2 * self._others(_bytes_of(tensors)), work)

    def broadcast(self, tensors: list[torch.Tensor], *options: Any) -> dist.Work:
        """Broadcast; each rank counts the bytes of the whole tensor as sent."""
        return self._delayed("broadcast", _bytes_of(tensors), self._gloo.broadcast(tensors, *options))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *options: Any) -> dist.Work:
        """All-gather into lists of tensors; a rank sends its input to each other rank."""
        sent = (self.size() - 1) * _bytes_of(inputs)
        return self._delayed("allgather", sent, self._gloo.allgather(outputs, inputs, *options))

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, *options: Any) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [tensor], *options)

    all_gather_single = _allgather_base  # type: ignore[assignment]

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any
    ) -> dist.Work:
        """All-gather several tensors as one transfer. Each output is one tensor, not a list of parts."""
        works = [
            self._gloo._allgather_base(output, tensor, *options) for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._delayed("allgather", (self.size() - 1) * _bytes_of(inputs), *works)

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], *options: Any) -> dist.Work:
        """Reduce-scatter from lists of tensors.

        A rank sends all of its input except the part whose sum the rank receives.
        """
        sent = sum(self._others(_bytes_of(tensors)) for tensors in inputs)
        return self._delayed("reduce_scatter", sent, self._gloo.reduce_scatter(outputs, inputs, *options))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, *options: Any) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [tensor], *options)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any
    ) -> dist.Work:
        """Reduce-scatter several tensors as one transfer. Each input is one tensor, not a list of parts."""
        works = [
            self._gloo._reduce_scatter_base(output, tensor, *options)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._delayed("reduce_scatter", self._others(_bytes_of(inputs)), *works)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: list[int], input_sizes: list[int], *options: Any
    ) -> dist.Work:
        """All-to-all of rows of one tensor. Empty sizes mean that the rows are split evenly over ranks."""
        work = self._gloo.alltoall_base(output, tensor, output_sizes, input_sizes, *options)
        sent = self._others(_bytes_of([tensor]))
        if input_sizes and sum(input_sizes):
            sent = _bytes_of([tensor]) * (sum(input_sizes) - input_sizes[self.rank()]) // sum(input_sizes)
        return self._delayed("alltoall", sent, work)

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any) -> dist.Work:
        """All-to-all of whole tensors: tensor number i of `inputs` goes to rank i."""
        sent = _bytes_of(inputs) - _bytes_of([inputs[self.rank()]])
        return self._delayed("alltoall", sent, self._gloo.alltoall(outputs, inputs, *options))

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> dist.Work:
        """Send a tensor to one rank. A second message carries the time of this call, and of the tensor's arrival."""
        sent, latency_s = self._issued("send", _bytes_of(tensors)), self.links.latency_s(self._axes)
        times = torch.tensor([sent.issued_s, sent.done_s + latency_s], dtype=torch.float64)
        works = [self._gloo.send(tensors, to, tag), self._gloo.send([times], to, tag | _TIMES_TAG)]
        return _DelayedWork(works, self.links, lambda: sent)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from one rank, and complete at the arrival time that the sender's second message gives."""
        times, size_bytes = torch.empty(2, dtype=torch.float64), _bytes_of(tensors)
        works = [self._gloo.recv(tensors, source, tag), self._gloo.recv([times], source, tag | _TIMES_TAG)]
        duration_s = self.links.occupied_s(self._axes, size_bytes) + self.links.latency_s(self._axes)

        def came() -> Transfer:
            issued_s, done_s = times.tolist()
            return Transfer("recv", self._axes, size_bytes, issued_s, done_s, duration_s, 0.0)

        return _DelayedWork(works, self.links, came)

    def recv_anysource(self, *_: Any) -> NoReturn:
        """Raise `MeshError`, because the second message, which carries times, needs a named sender."""
        raise MeshError("recv of any rank has no delayed form on a delayed_mesh; name the sender: recv(tensor, src=1).")

    def _others(self, size_bytes: int) -> int:
        """Return the bytes that go to other ranks if `size_bytes` are split evenly over all ranks of the group."""
        return size_bytes * (self.size() - 1) // self.size()

    def _delayed(self, operation: str, sent_bytes: int, *works: Any) -> dist.Work:
        sent, latency_s = self._issued(operation, sent_bytes), self.links.latency_s(self._axes)
        done = replace(sent, done_s=sent.done_s + latency_s, duration_s=sent.duration_s + latency_s)
        if self.links.clock is _MACHINE:  # only by this clock does Gloo already wait for the last rank
            return _DelayedWork(works, self.links, lambda: done)
        last_s = torch.tensor([done.done_s], dtype=torch.float64)
        agreed = self._gloo.allreduce([last_s], _LATEST)
        return _DelayedWork([*works, agreed], self.links, lambda: replace(done, done_s=last_s.item()))

    def _issued(self, operation: str, sent_bytes: int) -> Transfer:
        """Occupy this rank's links from now on, and return the transfer.

        `done_s` of the transfer is the end of sending, without latency.
        """
        now_s = self.links.clock.now_s()
        done_s = self.links.occupy(self._axes, sent_bytes, now_s)
        duration_s = self.links.occupied_s(self._axes, sent_bytes)
        return Transfer(operation, self._axes, sent_bytes, now_s, done_s, duration_s, 0.0)


def delayed_mesh(
    axes: Mapping[str, int], links: Mapping[str, Link], *, box: tuple[int, Link] | None = None, clock: Clock = _MACHINE
) -> DeviceMesh:
    """Make a torch mesh of CPU processes whose communication takes as long as over given links.

    All processes must call this together, after `torch.distributed.init_process_group`. All groups that
    `autoshard.compile` makes of the mesh are delayed, even those along several axes.

    Args:
        axes: size of each axis by name, with ranks in row-major order: consecutive ranks lie along the last axis. The
            sizes multiply to the number of processes.
        links: the link of each axis; an axis without a link is not delayed.
        box: `(n, link)`: each n consecutive ranks share a box, such as one machine. A group inside a box uses `link` in
            place of its axes' links. None: no boxes.
        clock: an object with methods `now_s()` and `sleep(seconds)`. Default: the machine's clock. A clock that counts
            this process's work measures hidden communication exactly, even on a busy machine.

    Returns:
        The mesh, an argument of `autoshard.compile`. `record_transfers` records the transfers over its links.

    Raises:
        MeshError: a link's axis is not in the mesh, there is no process group, or it has another number of processes.

    Example:
        ```python
        torch.distributed.init_process_group("gloo")
        mesh = delayed_mesh({"data": 4}, {"data": Link(latency_s=1e-3, bandwidth_bytes_per_s=125e6)})
        step = autoshard.compile(model, mesh, optimizer=optimizer)
        ```
    """
    mesh = Mesh(axes)
    for axis in links:
        mesh.axis_size(axis)
    if not dist.is_initialized() or mesh.size != dist.get_world_size():
        found = dist.get_world_size() if dist.is_initialized() else "no process group"
        raise MeshError(
            f"delayed_mesh({dict(axes)!r}) needs {mesh.size} processes, found {found}; call "
            "torch.distributed.init_process_group('gloo') first, under torchrun with as many processes."
        )
    here = _Links({axis: links.get(axis, Link()) for axis in mesh.axis_names}, clock, box)
    name = f"delayed_gloo_{next(_NUMBERS)}"

    def create(options: Any, _: Any) -> DelayedGloo:
        gloo = ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        ranks = options.global_ranks_in_group
        is_inside = box is not None and len({rank // box[0] for rank in ranks}) == 1
        return DelayedGloo(gloo, (_BOX,) if is_inside else _crossed(mesh, ranks), here)

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    backends: dict[Any, Any] = dict.fromkeys(mesh.axis_names, name)
    return init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names, backend_override=backends)


@contextmanager
def record_transfers(device_mesh: DeviceMesh) -> Iterator[list[Transfer]]:
    """Record each collective and message over a `delayed_mesh` for which this rank waits within the context.

    The context yields a list, to which a `Transfer` is added when the wait for it ends. Each rank records only the
    transfers that it waits for.

    Raises:
        MeshError: the mesh is not from `delayed_mesh`.

    Example:
        ```python
        with record_transfers(mesh) as transfers:
            step(tokens, targets)
        exposed_s = sum(transfer.waited_s for transfer in transfers)
        ```
    """
    group = device_mesh.get_group(0)
    if not isinstance(group, DelayedGloo):
        raise MeshError(f"{device_mesh} has no delayed links; make it with autoshard.testing.delayed_mesh.")
    transfers: list[Transfer] = []
    group.links.listeners.append(transfers)
    try:
        yield transfers
    finally:
        group.links.listeners[:] = [item for item in group.links.listeners if item is not transfers]


_NUMBERS = count()
"""Numbers for the names of backends. Torch never forgets a backend's name, so each mesh registers a new name."""

_LATEST = dist.AllreduceOptions()
_LATEST.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

_BOX = "box"
"""The key, in place of an axis, of the link between ranks inside a box (`delayed_mesh`)."""

_TIMES_TAG = 2**30
"""A bit added to a message's tag. It marks the second message, which carries the times of the first."""


def _crossed(mesh: Mesh, ranks: Sequence[int]) -> tuple[str, ...]:
    places = [mesh.coordinates(rank) for rank in ranks]
    return tuple(axis for axis in mesh.axis_names if len({place[axis] for place in places}) > 1)


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
