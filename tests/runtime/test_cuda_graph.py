"""Steps launched from CUDA graphs equal steps whose kernels are launched one by one.

Without a GPU, a stand-in records a function by keeping it. At each launch, the function computes on the memory that it
was recorded with, and its results are copied to their old memory.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import Mesh, NotAvailableError
from autoshard.runtime.cuda_graph import CudaGraph, record_on_cuda
from autoshard.runtime.graphed_passes import GraphedPasses
from passes.driver import compile_model

ON_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"


class StandIn:
    """A stand-in for recording CUDA graphs, which counts recordings and launches."""

    def __init__(self) -> None:
        self.recorded = self.launched = 0

    def __call__(self, function: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """Return a function that launches the recorded one again, and the results' memory, as a `Record` does."""
        self.recorded += 1
        replay, results = record_on_cuda(function) if ON_CUDA else self._keep(function)

        def launch() -> None:
            self.launched += 1
            replay()

        return launch, results

    def _keep(self, function: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        results = [torch.empty_like(result) for result in function()]

        def again() -> None:
            for result, value in zip(results, function(), strict=True):
                result.copy_(value)

        return again, results


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("nccl" if ON_CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def recorded_by(patch: pytest.MonkeyPatch) -> StandIn:
    """Make steps that are compiled from now on record by a stand-in; return the stand-in."""
    found = StandIn()
    patch.setattr(compile_model, "graphs_of", lambda cuda_graph, *_, **__: GraphedPasses(found))
    return found


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Return the stand-in by which the test's steps record."""
    return recorded_by(monkeypatch)


class Net(nn.Module):
    """A model with products, dropout, and a buffer that each call changes."""

    calls: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error of the target."""
        self.calls.add_(1.5)
        out = self.down(self.dropout(torch.relu(self.up(x))))
        return (out - target).square().mean()


def train(batches: Sequence[int], *, cuda_graph: bool, dropout: float, **options: Any) -> list[Tensor]:
    """Return the losses of steps on batches of the given sizes, and then the model's state."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Net(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    mesh = init_device_mesh(DEVICE, (1,), mesh_dim_names=("data",))
    step = autoshard.compile(
        model, mesh, optimizer=optimizer, max_grad_norm=0.3, options=autoshard.Options(cuda_graph=cuda_graph), **options
    )
    torch.manual_seed(1)
    losses = []
    for size in batches:
        losses.append(step(torch.randn(size, 8, device=DEVICE), torch.randn(size, 4, device=DEVICE)))
        schedule.step()
    state = [
        item.full_tensor() if hasattr(item, "full_tensor") else item for item in step.sharded.state_dict().values()
    ]
    return [*losses, *state]


def test_a_graph_runs_on_what_it_is_given() -> None:
    stand_in = StandIn()
    graph = CudaGraph({0}, stand_in)
    weight = torch.arange(3.0, device=DEVICE)
    for call in range(5):
        (result,) = graph.run(
            lambda values: [values.pop(0) * values.pop(0)], [torch.full((3,), 1.0 + call, device=DEVICE), weight]
        )
        assert result.tolist() == [0.0, 1.0 + call, 2.0 + 2 * call]
        weight += 0  # in place: it stays
    assert (stand_in.recorded, stand_in.launched) == (1, 3)


def test_what_is_met_elsewhere_is_copied_from_then_on() -> None:
    stand_in = StandIn()
    graph = CudaGraph(set(), stand_in)
    kept = [torch.full((2,), float(number), device=DEVICE) for number in range(8)]
    for number, value in enumerate(kept[:1] * 4 + kept):
        (result,) = graph.run(lambda values: [values[0] + 1], [value])
        assert result.tolist() == [float(max(0, number - 4)) + 1] * 2
    assert stand_in.recorded == 2


@settings(max_examples=3, deadline=None)
@given(
    st.lists(st.sampled_from([4, 8]), min_size=6, max_size=9),
    st.sampled_from([None, 2, 4]),
    st.sampled_from([0.0, 0.5]),
)
def test_a_step_equals_one_without_a_graph(batches: list[int], micro_batches: int | None, dropout: float) -> None:
    options: dict[str, Any] = {"dropout": dropout, "micro_batches": micro_batches}
    expected = train(batches, cuda_graph=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        stand_in = recorded_by(patch)
        found = train(batches, cuda_graph=True, **options)
    assert stand_in.launched >= 1
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


def test_what_is_hoisted_is_computed_once_a_step(recorder: StandIn) -> None:
    options: dict[str, Any] = {"dropout": 0.0, "micro_batches": 4, "precision": "bf16"}
    found = train([8] * 5, cuda_graph=True, **options)
    launched = recorder.launched
    assert all(map(torch.equal, found, train([8] * 5, cuda_graph=True, **options)))
    # From the third call on: weights in bf16 once for each of the steps 3 to 5, passes of all but two micro-batches.
    assert launched == 3 + (5 * 4 - 2)


def test_what_cannot_be_recorded_is_one_error(recorder: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: StandIn, function: Callable[[], list[Tensor]]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(StandIn, "__call__", fail)
    with pytest.raises(NotAvailableError, match=r"cannot be recorded: operation not permitted.*Leave cuda_graph out"):
        train([4] * 3, cuda_graph=True, dropout=0.0)


@pytest.mark.parametrize("case", ["simulated", "on a CPU", "untraced", "no optimizer", "no flag"])
def test_what_it_does_not_go_with_is_refused(case: str) -> None:
    if case == "on a CPU" and ON_CUDA:
        pytest.skip("there is a GPU")
    model = nn.Linear(4, 4, device=None if case == "simulated" else DEVICE)
    mesh = Mesh({"data": 2}) if case == "simulated" else init_device_mesh(DEVICE, (1,), mesh_dim_names=("data",))
    optimizer = None
    if case == "untraced":
        optimizer = torch.optim.Adagrad(model.parameters())
    elif case != "no optimizer":
        optimizer = torch.optim.AdamW(model.parameters())
    flag: Any = "yes" if case == "no flag" else True
    match = "pass True or False" if case == "no flag" else "cuda_graph=True records training steps, but .*Or leave"
    with pytest.raises(NotAvailableError, match=match):
        autoshard.compile(model, mesh, optimizer=optimizer, options=autoshard.Options(cuda_graph=flag))


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_one_launch() -> None:
    expected = train([4] * 6, cuda_graph=False, dropout=0.5)
    found = train([4] * 6, cuda_graph=True, dropout=0.5)
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
def test_what_waits_for_the_device_is_refused_on_a_gpu() -> None:
    graph, value = CudaGraph(set()), torch.ones(2, device="cuda")

    def run() -> list[Tensor]:
        return graph.run(lambda values: [values[0] * values[0].sum().item()], [value])

    run()
    run()
    with pytest.raises(NotAvailableError, match="cannot be recorded"):
        run()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.manual_seed(3)
    again = torch.randn(4, device="cuda")  # random numbers and the device go on
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device="cuda"), again)
    assert len(CudaGraph(set()).run(lambda values: values, [value])) == 1
