"""The GPU benchmark of kernels runs without a GPU: in a dry run, and with a fake timer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.kernels.registry import FUSED, KERNELS
from cost_models.device import device
from tests.benchmarks import gpu_kernels, gpu_liger, gpu_training
from tests.benchmarks.gpu_block import Sizes, compile_ours, make_block, step_of
from tests.benchmarks.gpu_case import Case, Kind
from tests.benchmarks.gpu_cases import cases
from tests.benchmarks.gpu_liger import Liger
from tests.benchmarks.gpu_page import Row, page

H200 = device("h200")


class _Calls(TorchDispatchMode):
    """Record the operators that run within this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(func)
        return func(*args, **(kwargs or {}))


def test_every_case_is_measured() -> None:
    """On the meta device with a fake timer, every case is measured without failure, and every kernel has a case."""

    def once(function: Callable[[], Any], grad_to_none: Any = None) -> float:
        function()
        return 2.0

    bench = gpu_kernels.Bench(H200, once, compiler=lambda plain: plain)
    with torch.device("meta"), _Calls() as calls:
        rows = [bench.measure(case) for case in cases()]
    assert [note for row in rows for note in row.notes] == []
    assert all(row.ours_ms == row.eager_ms == 2.0 for row in rows)
    assert all(row.predicted_ms > 0 for row in rows)
    written = page({"device": "none"}, rows)
    assert all(row.name in written for row in rows)
    kernels = {*KERNELS.values(), *(kernel.operator for kernel in FUSED)}
    assert kernels - calls.found == set()


def test_the_dry_run_lists_every_case() -> None:
    """In a dry run all kernels and references have equal shapes, and a block is planned."""
    table = gpu_kernels.dry_run(H200, lengths=(2048,))
    names = list(table.columns[0].cells)
    assert {f"attention, head {size}, {length}" for size in (64, 128) for length in (2048, 8192, 32768)} < set(names)
    assert sum(str(name).startswith("generated:") for name in names) > 1
    assert names[-1] == "Llama block, forward and backward, 2048"
    assert all(float(str(cell)) > 0 for cell in table.columns[2].cells)


def test_results_of_other_shapes_are_found() -> None:
    """A case whose kernel gives another shape than its reference is refused by name."""
    with torch.device("meta"):
        case = next(cases())
        wrong = Case(case.name, lambda: case.ours()[0], case.plain, case.moved_bytes)
        with pytest.raises(ValueError, match="gated gives"):
            gpu_kernels.check(wrong)


@pytest.fixture
def _own_process_group() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("_own_process_group")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has no interpreter")
def test_a_block_is_what_it_is_in_eager() -> None:
    """A small block, compiled on one rank, has the loss and input gradient of eager."""
    torch.manual_seed(0)
    block, inputs = make_block(8, Sizes(64, 96, 4, 2), torch.float32)
    ours, x = compile_ours(block, inputs), inputs[0]
    expected = step_of(block, inputs)[0]()
    grad, x.grad = x.grad, None
    found = step_of(ours, inputs)[0]()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(x.grad, grad)


def _row(kind: Kind, **known: Any) -> Row:
    times: dict[str, Any] = {"ours_ms": 1.0, "compiled_ms": None, "eager_ms": None, "liger_ms": None}
    rest: dict[str, Any] = {"moved_bytes": 4e9, "flops": 3e12, "copy_bytes_per_s": 4.5e12}
    return Row("some kernel", kind, 0.9, **(times | rest | known))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            _row(Kind.MEMORY, compiled_ms=1.2, liger_ms=0.9),
            ["pass copy 0.89 (>= 0.85)", "pass Inductor 1.20 (>= 1.00)", "FAIL Liger 0.90 (>= 1.00)"],
        ),
        (_row(Kind.MEMORY, ours_ms=2.0), ["FAIL copy 0.44 (>= 0.85)"]),
        (_row(Kind.MEMORY, moved_bytes=1e6, compiled_ms=1.0), ["pass Inductor 1.00 (>= 1.00)"]),
        (_row(Kind.PRODUCTS, eager_ms=0.5), []),
        (_row(Kind.ATTENTION, eager_ms=0.9), ["pass torch's best 0.90 (>= 0.90)"]),
        (_row(Kind.BLOCK, compiled_ms=1.05), ["FAIL torch.compile 1.05 (>= 1.10)"]),
        (_row(Kind.MEMORY, ours_ms=None, compiled_ms=1.0), []),
    ],
)
def test_targets_are_judged(row: Row, expected: list[str]) -> None:
    """Each row is judged by its share of a copy's bandwidth, and by its speed against each measured rival."""
    assert [str(verdict) for verdict in row.verdicts()] == expected


def test_the_page_counts_what_is_met() -> None:
    """The page has the facts, the number of met targets, a line for each row, and the failures."""
    rows = [_row(Kind.ATTENTION, eager_ms=0.5), _row(Kind.MEMORY, compiled_ms=2.0)]
    text = page({"torch": "2.13", "Liger-Kernel": "not installed"}, rows)
    assert "* targets: 2 of 3 met, 2 rows" in text
    assert "* Liger-Kernel: not installed" in text
    assert "| some kernel | 1.000 | 0.900 | 2.000 |  |  | 4000 GB/s | 89% |" in text
    failed = Row("other", Kind.MEMORY, 1.0, None, None, 1.0, None, 1.0, 0.0, ("ours: RuntimeError: out of memory",))
    assert "* other: ours: RuntimeError: out of memory" in page({}, [failed])


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale, None


def test_a_function_of_ligers_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of Liger runs forward, backward or both, and `check` refuses wrong arguments."""
    module = ModuleType("liger_kernel.ops")
    module.Scaled = _Scaled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", module)
    x, grad = torch.ones(3), torch.full((3,), 2.0)
    assert Liger("Scaled", (x, 3.0)).prepare()()[0].tolist() == [3.0] * 3
    for with_forward in (False, True):
        run = Liger("Scaled", (x, 3.0), (grad,), with_forward).prepare()
        assert [run()[0].tolist() for _ in range(2)] == [[6.0] * 3] * 2
    Liger("Scaled", (x, 3.0)).check()
    with pytest.raises(TypeError, match="missing a required argument"):
        Liger("Scaled", (x,)).check()


def test_without_liger_a_case_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Liger-Kernel, a case has no time for it and no note."""
    monkeypatch.setattr(gpu_liger, "version", lambda: None)
    case = Case("case", lambda: None, lambda: None, 1, liger=Liger("Missing", ()))
    row = gpu_kernels.Bench(H200, lambda function, grad_to_none: 1.0, lambda plain: plain).measure(case)
    assert (row.ours_ms, row.liger_ms, row.notes) == (1.0, None, ())


def test_what_fails_is_noted() -> None:
    """A kernel that fails leaves a note and no time, and its rival is still timed."""

    def fail() -> None:
        raise RuntimeError("out of memory\nand more")

    bench = gpu_kernels.Bench(H200, lambda function, grad_to_none: function() or 1.0, lambda plain: plain)
    row = bench.measure(Case("case", fail, lambda: None, 1))
    assert (row.ours_ms, row.eager_ms, row.notes) == (None, 1.0, ("ours: RuntimeError: out of memory",))


@pytest.mark.slow
def test_training_is_raced(tmp_path: Path) -> None:
    """The benchmark of training steps runs a small model on a CPU with equal losses, which the page shows."""
    page_of = tmp_path / "page.md"
    options = ["--tiny", "--models", "llama", "--contenders", "eager;ours", "--rounds", "2", "--output", str(page_of)]
    gpu_training.main(options)
    rows = [line.split("|") for line in page_of.read_text().splitlines() if line.startswith(("| eager", "| ours"))]
    assert [row[1].strip() for row in rows] == ["eager", "ours"]
    assert float(rows[0][-2]) == pytest.approx(float(rows[1][-2]), rel=1e-2)
