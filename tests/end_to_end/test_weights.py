"""Ranks read only their shards from weight files, and gather one block at a time to write them."""

from __future__ import annotations

import errno
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import P
from autoshard.errors import NotAvailableError, RankMismatchError, TraceError, WeightsError
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.distributed import DistributedEngine
from autoshard.runtime.weights.export_weights import export_weights
from autoshard.runtime.weights.load_weights import load_weights, together
from autoshard.runtime.weights.safetensors_writer import SafetensorsWriter
from tests.end_to_end.training import plain_step, whole
from tests.models import gpt2, llama
from tests.runtime.architectures import BUILDERS, build, logits
from tests.runtime.processes import on_processes, shared_folder

FOUR, PAIR, SQUARE = {"data": 4}, {"data": 2}, {"data": 2, "model": 2}

Layout = Callable[[int], PartitionSpec]
"""Function from a parameter's number of dims to its spec."""

LAYOUTS: dict[str, tuple[dict[str, int], Layout]] = {
    "rows": (FOUR, lambda dims: P("data")),
    "columns": (FOUR, lambda dims: P(*[None] * (dims - 1), "data")),
    "rows over two axes": (SQUARE, lambda dims: P(("data", "model"))),
    "rows and columns": (SQUARE, lambda dims: P("data", *[None] * (dims - 2), "model") if dims > 1 else P("model")),
    "one axis of two": (SQUARE, lambda dims: P("model")),
    "copies": (SQUARE, lambda dims: P()),
}


def engine_on(sizes: dict[str, int]) -> DistributedEngine:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return DistributedEngine(mesh)


def placed(model: nn.Module, engine: DistributedEngine, layout: Layout) -> nn.Module:
    engine.adopt(model)
    engine.place(model, {name: layout(item.dim()) for name, item in model.named_parameters() if item.dim()})
    return model


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        assert torch.equal(whole(model.state_dict()[name]), value), name


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def load(model: nn.Module, engine: DistributedEngine, path: Path) -> None:
    load_weights(model, engine, path, strict=True, cast=False)


def check_both_ways(name: str, layout: str) -> None:
    """Ranks load files of transformers, and transformers loads the ranks' files, with equal tensors and logits.

    Blocks of 2**24 bytes and of 200 bytes are read and written.
    """
    transformers.utils.logging.disable_progress_bar()
    sizes, lie = LAYOUTS[layout]
    engine, saved = engine_on(sizes), build(name)
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            saved.save_pretrained(folder / "theirs", max_shard_size="3KB")
        dist.barrier()
        for most_bytes in (2**24, 200):
            with by_blocks_of(most_bytes):
                model = placed(build(name, seed=1), engine, lie)
                load(model, engine, folder / "theirs")
                assert_equal(model, saved)
                export_weights(model, engine, folder / "ours", max_file_bytes=3000)
            if dist.get_rank() == 0:
                ours, theirs = contents(folder / "ours"), contents(folder / "theirs")
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[key], value) for key, value in theirs.items())
            dist.barrier()
        if dist.get_rank() == 0:
            loaded = type(saved).from_pretrained(folder / "ours")
            assert torch.equal(logits(name, loaded), logits(name, saved))


@contextmanager
def by_blocks_of(most_bytes: int) -> Iterator[None]:
    """Read, gather and write blocks of the given size in bytes, within this context."""
    with (
        mock.patch("autoshard.runtime.weights.load_weights.BLOCK_BYTES", most_bytes),
        mock.patch("autoshard.runtime.weights.export_weights.BLOCK_BYTES", most_bytes),
        mock.patch("autoshard.runtime.distributed.SMALL_BYTES", most_bytes),
    ):
        yield


def check_each_rank_reads_its_slices() -> None:
    """Each rank reads only the bytes of its shards, also if files have a tensor for each expert."""
    name = "mixtral, experts apart in files"
    engine, saved = engine_on(SQUARE), build(name)
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            saved.save_pretrained(folder)
        dist.barrier()
        model = placed(build(name, seed=1), engine, LAYOUTS["rows and columns"][1])
        read = [0]
        with mock.patch("autoshard.runtime.weights.weight_files._RegionReader.read", counting(read)):
            load(model, engine, folder)
        assert_equal(model, saved)
        held = sum(item.to_local().nbytes for item in model.parameters() if isinstance(item, DTensor))
        assert read[0] == held
        assert held < 0.35 * sum(item.nbytes for item in saved.parameters())


def counting(read: list[int]) -> Callable[..., torch.Tensor]:
    from autoshard.runtime.weights.weight_files import _RegionReader

    original = _RegionReader.read

    def counted(*args: Any) -> torch.Tensor:
        values = original(*args)
        read[0] += values.nbytes
        return values

    return counted


def check_one_block_at_a_time_is_gathered() -> None:
    """In an export, each gathered block is freed before the next, and has at most the block size."""
    name = "mixtral, experts apart in files"
    engine = engine_on(SQUARE)
    model = placed(build(name), engine, LAYOUTS["rows over two axes"][1])
    sizes: list[int] = []
    last: list[Callable[[], object]] = [lambda: None]
    original = engine.gather_region

    def gather_region(tensor: torch.Tensor, region: tuple[slice, ...], pipeline_rank: int | None) -> torch.Tensor:
        assert last[0]() is None, "the block before is freed"
        result = original(tensor, region, pipeline_rank)
        last[0] = weakref.ref(result)
        sizes.append(result.nbytes)
        return result

    with shared_folder() as folder, mock.patch.object(engine, "gather_region", gather_region), by_blocks_of(200):
        export_weights(model, engine, folder / "a", max_file_bytes=10**9)
    assert sum(sizes) == sum(item.nbytes for item in model.parameters())
    assert max(sizes) <= 200


def check_types() -> None:
    """bfloat16 weights are exported and loaded bit by bit, and transformers loads them as bfloat16."""
    engine, saved = engine_on(SQUARE), build("llama").bfloat16()
    with shared_folder() as folder:
        model = placed(build("llama").bfloat16(), engine, LAYOUTS["rows"][1])
        export_weights(model, engine, folder / "a", max_file_bytes=10**9)
        model = placed(build("llama", seed=1).bfloat16(), engine, LAYOUTS["columns"][1])
        load(model, engine, folder / "a")
        assert_equal(model, saved)
        assert transformers.AutoModelForCausalLM.from_pretrained(folder / "a", dtype="auto").dtype is torch.bfloat16


def check_errors_are_the_same_on_every_rank() -> None:
    """If one rank has a damaged file or another folder, all ranks raise, and no parameter changes."""
    engine, rank = engine_on(FOUR), dist.get_rank()
    with shared_folder() as folder:
        saved, mine = build("llama"), folder / str(rank)
        if rank == 0:
            build("qwen2, tied").save_pretrained(folder / "other")
            for number in range(4):
                saved.save_pretrained(folder / str(number))
        dist.barrier()
        model, before = placed(build("llama", seed=1), engine, LAYOUTS["rows"][1]), build("llama", seed=1)
        file = mine / "model.safetensors"
        data = file.read_bytes()
        if rank == 2:
            file.write_bytes(data[:-5])
        with pytest.raises(WeightsError, match=r"^Ranks \[2\]: .*/2/model.safetensors is damaged"):
            load(model, engine, mine)
        assert_equal(model, before)
        file.write_bytes(data)
        with pytest.raises(WeightsError, match=r"^Ranks \[1\]: .*Missing: 'lm_head.weight'.*Unexpected: "):
            load(model, engine, folder / "other" if rank == 1 else mine)
        assert_equal(model, before)
        load(model, engine, mine)
        assert_equal(model, saved)


def check_a_slow_rank_is_waited_for() -> None:
    """A rank that reads longer than the time limit is waited for, and its errors reach all ranks."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    engine = DistributedEngine(mesh, timeout_s=2.0)

    def read() -> int:
        if dist.get_rank() == 3:
            time.sleep(3.5)
        return dist.get_rank()

    assert together(engine, "read", read) == dist.get_rank()

    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("an expert is odd")

    with pytest.raises((ValueError, RankMismatchError), match="an expert is odd"):
        together(engine, "read", fail)


def check_a_full_disk_is_told_to_every_rank() -> None:
    """A full disk raises on all ranks and leaves no file, and the next export succeeds."""
    engine = engine_on(FOUR)
    model = placed(build("llama"), engine, LAYOUTS["rows"][1])

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with shared_folder() as folder:
        text = r"^Ranks \[0\]: .*model.safetensors cannot be written: .*No space"
        with mock.patch.object(SafetensorsWriter, "write", fail), pytest.raises(WeightsError, match=text):
            export_weights(model, engine, folder / "a", max_file_bytes=10**9)
        dist.barrier()
        assert not [*folder.iterdir()], "what was written takes no room of a full disk"
        dist.barrier()
        export_weights(model, engine, folder / "a", max_file_bytes=10**9)
        assert_equal(model, transformers.AutoModelForCausalLM.from_pretrained(folder / "a"))


def check_a_step_trains_on() -> None:
    """A step that loads weights before or after planning trains and exports as one device."""
    saved, inputs = llama()
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            saved.save_pretrained(folder / "first")
        dist.barrier()
        optimizer = torch.optim.SGD(saved.parameters(), lr=0.1)
        losses = [plain_step(saved, optimizer, **inputs) for _ in range(2)]
        for example in (None, inputs):
            torch.manual_seed(5)
            model = llama()[0]
            nn.init.ones_(model.lm_head.weight)
            step = autoshard.compile(
                model,
                autoshard.Mesh(PAIR),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                example_inputs=example,
                constraints={"*.weight": P("data")},
            )
            step.load_weights(folder / "first")
            torch.testing.assert_close([step(**inputs) for _ in range(2)], losses)
            step.export(folder / "second")
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "second")
            for name, value in loaded.state_dict().items():
                torch.testing.assert_close(value, saved.state_dict()[name])
            dist.barrier()


def check_from_meta(build_model: Callable[[], tuple[nn.Module, dict[str, Any]]], *, with_optimizer: bool) -> None:
    """Check that a model from meta loads files, exports equal values and has the loss of one device."""
    saved, inputs = build_model()
    with shared_folder() as folder:
        if rank_of_this() == 0:
            saved.save_pretrained(folder / "first")
        wait_for_all()
        with torch.device("meta"):
            model = build_model()[0]
        options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} if with_optimizer else {}
        compiled = autoshard.compile(
            model, autoshard.Mesh(PAIR), example_inputs=inputs, constraints={"*.weight": P("data")}, **options
        )
        compiled.load_weights(folder / "first")
        compiled.export(folder / "second")
        loaded = type(saved).from_pretrained(folder / "second")
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, saved.state_dict()[name]), name
        loss = compiled(**inputs) if with_optimizer else compiled(**inputs).loss
        torch.testing.assert_close(loss.detach(), saved(**inputs).loss.detach())


def rank_of_this() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def _pairs() -> dict[str, Callable[[], None]]:
    """Return `check_both_ways` for each architecture, each with the next of the layouts."""
    layouts = list(LAYOUTS)
    pairs = [(name, layouts[number % len(layouts)]) for number, name in enumerate(BUILDERS)]
    return {f"{name}: {layout}": partial(check_both_ways, name, layout) for name, layout in pairs}


PAIRS = _pairs()
ON_FOUR = {
    **PAIRS,
    "slices": check_each_rank_reads_its_slices,
    "gathered": check_one_block_at_a_time_is_gathered,
    "types": check_types,
    "errors": check_errors_are_the_same_on_every_rank,
    "slow rank": check_a_slow_rank_is_waited_for,
    "full disk": check_a_full_disk_is_told_to_every_rank,
}
ON_TWO = {
    "step": check_a_step_trains_on,
    "from meta": partial(check_from_meta, llama, with_optimizer=False),
    "from meta, tied": partial(check_from_meta, gpt2, with_optimizer=True),
}


test_with_two_processes = on_processes(ON_TWO, ranks=2, slow=["from meta"])

test_with_four_processes = on_processes(ON_FOUR, ranks=4, slow=ON_FOUR)


@pytest.mark.parametrize("with_optimizer", [False, True], ids=["module", "step"])
def test_on_the_simulator(with_optimizer: bool) -> None:
    """On the simulator, a module and a step load and export weights of a model from meta."""
    check_from_meta(llama, with_optimizer=with_optimizer)


def test_a_model_without_values_is_not_exported(tmp_path: Path) -> None:
    """`export` raises before a plan exists and before weights exist, and `load_weights` before a plan exists."""
    with torch.device("meta"):
        model, inputs = llama()
    sharded = autoshard.compile(model, autoshard.Mesh(PAIR))
    with pytest.raises(NotAvailableError, match=r"export would write weights.*example_inputs="):
        sharded.export(tmp_path / "a")
    with pytest.raises(NotAvailableError, match=r"load_weights would write weights.*example_inputs="):
        sharded.load_weights(tmp_path)
    inputs = {name: torch.zeros_like(value, device="cpu") for name, value in inputs.items()}
    sharded.compile_for(**inputs)
    with pytest.raises(TraceError, match="no values yet"):
        sharded.export(tmp_path / "a")
