"""Weights, checkpoints and state dicts of a model in stages: each rank has those of its own stages alone."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import CheckpointError, Checkpoints, Mesh, NotAvailableError, P, Recipe, TraceError
from autoshard.errors import WeightsError
from autoshard.runtime import distributed
from autoshard.runtime.stages.stage_meshes import is_elsewhere
from autoshard.runtime.weights.local_part import LocalPart
from tests.end_to_end.test_pipelines import skips
from tests.end_to_end.test_weights import assert_equal, contents, counting, shared_folder
from tests.end_to_end.training import index_of, plain_step
from tests.models import gpt2
from tests.runtime.processes import report, run_checks

STAGES, SQUARE, LINE = Mesh({"pipeline": 2}), Mesh({"pipeline": 2, "data": 2}), Mesh({"data": 4})
PAIR, ONE, FOUR_STAGES = Mesh({"data": 2}), Mesh({"data": 1}), Mesh({"pipeline": 4})
SHARDED = {"*weight": P("data"), "*:*weight": P("data")}
SAVED, MORE = 2, 3


def mesh_here() -> Mesh:
    """Return a mesh of two stages, with one rank each on two processes and two ranks each on four."""
    return STAGES if dist.get_world_size() == 2 else SQUARE


def compiled(model: nn.Module, inputs: dict[str, Any], mesh: Mesh, **options: Any) -> Any:
    constraints = SHARDED if "data" in mesh.axis_names else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    settings = {"micro_batches": 2, "max_grad_norm": 0.3, "time_budget_s": 3.0, "constraints": constraints, **options}
    return autoshard.compile(model, mesh, optimizer=optimizer, example_inputs=inputs, **settings)


def gpt2_on_meta() -> tuple[nn.Module, dict[str, Any]]:
    """Return a GPT-2 of two layers on meta, whose last stage reads the embedding of the first, and a batch."""
    inputs = gpt2(2)[1]
    with torch.device("meta"):
        return gpt2(2)[0], inputs


def in_stages(kind: str = "skips", mesh: Mesh | None = None, **options: Any) -> tuple[Any, dict[str, Any]]:
    model, inputs = skips() if kind == "skips" else gpt2_on_meta()
    return compiled(model, inputs, mesh or mesh_here(), **options), inputs


def losses(step: Any, inputs: dict[str, Any], count: int = MORE) -> list[float]:
    return [float(step(**inputs)) for _ in range(count)]


def held(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's local parts of parameters."""
    return [
        item.to_local().detach() for item in model.parameters() if isinstance(item, DTensor) and not is_elsewhere(item)
    ]


def bytes_held(model: nn.Module) -> int:
    """Return the bytes of this rank's parts of parameters."""
    return sum(item.nbytes for item in held(model))


def check_weights_are_made() -> None:
    """A rank allocates and initialises the weights of its stages alone, equal to one device bit by bit."""
    given = [0]
    original = distributed.memory_of

    def memory_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        made = original(tensor, device)
        given[0] += made.nbytes
        return made

    with mock.patch.object(distributed, "memory_of", memory_of):
        step, inputs = in_stages("gpt2")
    model = step.sharded
    whole = sum(item.nbytes for item in gpt2(2)[0].parameters())
    assert given[0] == bytes_held(model) < whole / dist.get_world_size() * 1.3
    with pytest.raises(TraceError, match="no values yet: "):
        step(**inputs)
    step.init_weights(0)
    one = autoshard.compile(gpt2_on_meta()[0], ONE, example_inputs=inputs)
    one.init_weights(0)
    expected = one.state_dict()
    for name, value in model.state_dict().items():
        part = LocalPart.of(value)
        assert torch.equal(part.tensor, expected[name][index_of(part)]), name
        assert is_elsewhere(value) or part.tensor.numel()
    assert model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight")
    assert float(step(**inputs)) == pytest.approx(float(one(**inputs).loss.detach()), rel=1e-5)


def check_what_a_stage_lacks_is_named() -> None:
    """If one stage has no weights, all ranks raise and name them; after `init_weights` a step runs."""
    step, inputs = in_stages("gpt2")
    first = dist.get_rank() < dist.get_world_size() // 2
    for value in step.sharded.parameters() if first else ():
        if not is_elsewhere(value):
            nn.init.ones_(value.to_local())
    with pytest.raises(TraceError, match=r"no values yet: 'transformer\.h\.1\."):
        step(**inputs)
    with pytest.raises(TraceError, match=r"no values yet: 'transformer\.h\.1\."):
        Checkpoints("nowhere").save(step, at=0)
    step.init_weights(0)
    assert step(**inputs).isfinite()
    with pytest.raises(NotAvailableError, match="reads all parameters"):
        step.sharded.generate(inputs["input_ids"])


def check_files() -> None:
    """Each rank reads only its parts of weight files, and the exported folder equals what transformers writes."""
    saved, inputs = gpt2(2)
    step, _ = in_stages("gpt2")
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            saved.save_pretrained(folder / "theirs", max_shard_size="20KB")
        dist.barrier()
        read = [0]
        with mock.patch("autoshard.runtime.weights.weight_files._RegionReader.read", counting(read)):
            step.load_weights(folder / "theirs")
        assert read[0] == bytes_held(step.sharded)
        step.export(folder / "ours", max_file_bytes=20_000)
        if dist.get_rank() == 0:
            ours, theirs = contents(folder / "ours"), contents(folder / "theirs")
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())
            assert_equal(type(saved).from_pretrained(folder / "ours"), saved)
        assert float(step(**inputs)) == pytest.approx(float(saved(**inputs).loss.detach()), rel=1e-5)
        step.export(folder / "trained")
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "trained")
        assert float(step(**inputs)) == pytest.approx(float(reloaded(**inputs).loss.detach()), rel=1e-5)


def check_files_that_do_not_fit() -> None:
    """If one rank finds a damaged weight file, all ranks raise and name it, and no parameter changes."""
    step, inputs = in_stages("gpt2")
    step.init_weights(0)
    before = float(step(**inputs))
    rank, saved = dist.get_rank(), gpt2(2)[0]
    with shared_folder() as folder:
        for number in range(dist.get_world_size()) if rank == 0 else ():
            saved.save_pretrained(folder / str(number))
        dist.barrier()
        mine = folder / str(rank)
        file = mine / "model.safetensors"
        data = file.read_bytes()
        if rank == 1:
            file.write_bytes(data[:-5])
        with pytest.raises(WeightsError, match=r"^Ranks \[1\]: .*model.safetensors is damaged"):
            step.load_weights(mine)
        (folder / "file").touch()
        with pytest.raises(WeightsError, match="is a file"):
            step.export(folder / "file")
    assert float(step(**inputs)) < before


def check_state_dicts(folder: Path) -> None:
    """Each rank's state dict has all names and loads again, also from a plain run; `torch.save` is refused."""
    step, inputs = in_stages()
    assert set(step.sharded.state_dict()) == set(skips()[0].state_dict())
    losses(step, inputs, SAVED)
    check_torchs_functions(step)
    assert len(step.state_dict()["optimizer"]["state"]) == len(list(step.sharded.parameters())) - 2
    state = copy.deepcopy(step.state_dict())
    dcp.save(step.sharded.state_dict(), checkpoint_id=folder / f"plain {dist.get_world_size()}")
    expected = losses(step, inputs)
    with pytest.raises(NotAvailableError, match=r"cannot gather or save.*export\(path\)|is sharded on DeviceMesh"):
        torch.save(state, io.BytesIO())
    step.load_state_dict(state)
    assert losses(step, inputs) == expected
    model, _ = skips()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for _ in range(SAVED):
        plain_step(model, optimizer, limit=0.3, **inputs)
    step.load_state_dict(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    plain = [plain_step(model, optimizer, limit=0.3, **inputs).item() for _ in range(MORE)]
    assert losses(step, inputs) == pytest.approx(plain, rel=1e-5)


def check_torchs_functions(step: Any) -> None:
    """Torch's state-dict functions get and set the state of local stages, and cannot gather a whole state."""
    whole, module = StateDictOptions(full_state_dict=True), step.sharded
    for gather in (get_model_state_dict, partial(get_optimizer_state_dict, optimizers=step.optimizer)):
        with pytest.raises(NotAvailableError, match=r"other ranks of the axis 'pipeline'.*export\(path\)"):
            gather(module, options=whole)
    before = [item.clone() for item in held(module)]
    state = copy.deepcopy(get_state_dict(module, step.optimizer))
    back = partial(set_state_dict, module, step.optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    back(options=StateDictOptions(strict=False))  # a parameter that is not used has no state
    assert all(map(torch.equal, before, held(module)))
    ones = {name: torch.ones(item.shape) for name, item in module.state_dict().items()}
    set_model_state_dict(module, copy.deepcopy(ones), options=whole)
    assert all((item == 1).all() for item in held(module))
    rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(
        module, {name: 2 * item for name, item in ones.items()} if dist.get_rank() == 0 else {}, options=rank_0
    )
    assert all((item == 2).all() for item in held(module))
    back(options=StateDictOptions(strict=False))


def check_saving(folder: Path, name: str, mesh: Mesh, **options: Any) -> None:
    """After loading its own checkpoint, a step repeats the losses after saving, bit by bit."""
    step, inputs = in_stages(mesh=mesh, **options)
    checkpoints = Checkpoints(folder / name)
    losses(step, inputs, SAVED)
    checkpoints.save(step, at=SAVED)
    expected = losses(step, inputs)
    checkpoints.wait()
    if dist.get_rank() == 0:
        torch.save(expected, folder / f"{name}.losses")
    dist.barrier()
    assert checkpoints.load(step) == SAVED
    assert losses(step, inputs) == expected


def check_loading(folder: Path, name: str, mesh: Mesh, *, planned: bool = True, **options: Any) -> None:
    """On another mesh, losses after loading a checkpoint equal those of the saved run to 1e-6."""
    model, inputs = skips()
    for value in model.parameters():
        nn.init.ones_(value)
    step = compiled(model, inputs if planned else None, mesh, **options)  # type: ignore[arg-type]
    assert Checkpoints(folder / name).load(step) == SAVED
    assert losses(step, inputs) == pytest.approx(torch.load(folder / f"{name}.losses"), rel=1e-6)


def check_damage(folder: Path, name: str) -> None:
    """A damaged byte in one rank's checkpoint file raises on all ranks and names the file, and training continues."""
    step, inputs = in_stages()
    step(**inputs)
    checkpoints = Checkpoints(folder / name)
    checkpoints.save(step, at=1)
    checkpoints.wait()
    file = folder / name / "step-1" / "__1_0.distcp"
    if dist.get_rank() == 0:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"ranks \[.*1.*\]: .*__1_0.distcp is damaged"):
        checkpoints.load(step)
    assert step(**inputs).isfinite()


ON_TWO = {
    "weights are made": check_weights_are_made,
    "what a stage lacks": check_what_a_stage_lacks_is_named,
    "files": check_files,
    "files that do not fit": check_files_that_do_not_fit,
    "state dicts": check_state_dicts,
    "saved in stages": partial(check_saving, name="two stages", mesh=STAGES),
    "loaded without stages": partial(check_loading, name="four ranks", mesh=PAIR),
    "loaded in stages": partial(check_loading, name="four ranks", mesh=STAGES, recipe=Recipe(schedule="GPipe")),
    "loaded before a plan": partial(check_loading, name="four ranks", mesh=STAGES, planned=False),
    "damage": partial(check_damage, name="damaged"),
}
ON_FOUR = {
    "saved in stages": partial(check_saving, name="four ranks", mesh=SQUARE),
    "loaded without stages": partial(check_loading, name="four ranks", mesh=LINE),
}
ON_FOUR_SLOWLY = {
    "files": check_files,
    "state dicts": check_state_dicts,
    "saved in stages": partial(check_saving, name="four ranks", mesh=SQUARE),
    "weights are made": check_weights_are_made,
    "saved without stages": partial(check_saving, name="no stages", mesh=LINE),
    "loaded in more stages": partial(check_loading, name="four ranks", mesh=FOUR_STAGES),
    "loaded in virtual stages": partial(check_loading, name="four ranks", mesh=SQUARE, recipe=Recipe(virtual_stages=2)),
    "loaded in stages": partial(check_loading, name="no stages", mesh=SQUARE),
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def bound(checks: dict[str, Any], folder: Path) -> dict[str, Any]:
    takes_none = (check_weights_are_made, check_what_a_stage_lacks_is_named, check_files, check_files_that_do_not_fit)
    return {name: check if check in takes_none else partial(check, folder) for name, check in checks.items()}


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, str]:
    four = run_checks(bound(ON_FOUR, folder), ranks=4, deadline_s=400)
    two = run_checks(bound(ON_TWO, folder), ranks=2, deadline_s=400)
    return {f"{name} on 4": found for name, found in four.items()} | {f"{name} on 2": it for name, it in two.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f"{name} on 4" for name in ON_FOUR), *(f"{name} on 2" for name in ON_TWO)])
def test_on_processes(outcomes: dict[str, str], name: str) -> None:
    """The check passes on every rank of two or of four."""
    report(outcomes, name)


@pytest.mark.slow
def test_more_on_four_processes(tmp_path: Path) -> None:
    """On four processes, checks of files, state dicts and checkpoints between meshes pass."""
    found = run_checks(bound(ON_FOUR_SLOWLY, tmp_path), ranks=4, deadline_s=600)
    for name in ON_FOUR_SLOWLY:
        report(found, name)
    check_the_library_reads(tmp_path / "plain 4")


@pytest.mark.parametrize("mesh", [ONE, STAGES], ids=str)
def test_on_one_process(outcomes: dict[str, str], folder: Path, mesh: Mesh) -> None:
    """One device and simulated stages continue from a checkpoint of four ranks in stages."""
    report(outcomes, "saved in stages on 4")
    check_loading(folder, "four ranks", mesh)


def test_the_library_reads_what_ranks_hold(outcomes: dict[str, str], folder: Path) -> None:
    """State dicts saved by `torch.distributed.checkpoint` from all ranks form the trained model of one device."""
    report(outcomes, "state dicts on 2")
    check_the_library_reads(folder / "plain 2")


def check_the_library_reads(saved: Path) -> None:
    model, inputs = skips()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for _ in range(SAVED):
        plain_step(model, optimizer, limit=0.3, **inputs)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=saved)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)


def test_simulated_stages_have_the_same_life(tmp_path: Path) -> None:
    """Simulated stages initialise as one device, read and export weight files, and resume from a checkpoint."""
    saved, inputs = gpt2(2)
    saved.save_pretrained(tmp_path / "theirs")
    step = compiled(gpt2_on_meta()[0], inputs, SQUARE)
    step.init_weights(0)
    one = autoshard.compile(gpt2_on_meta()[0], ONE, example_inputs=inputs)
    one.init_weights(0)
    assert all(torch.equal(step.sharded.state_dict()[name], value) for name, value in one.state_dict().items())
    step.load_weights(tmp_path / "theirs")
    step.export(tmp_path / "ours")
    assert_equal(type(saved).from_pretrained(tmp_path / "ours"), saved)
    losses(step, inputs, 1)
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(step, at=1)
    expected = losses(step, inputs)
    assert checkpoints.load(step) == 1
    assert losses(step, inputs) == expected
