"""transformers' Trainer on a mesh gives the numbers of transformers' own Trainer on one device."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, GPT2LMHeadModel, TrainingArguments

import autoshard
from autoshard import Cluster, Mesh, NotAvailableError
from autoshard.integrations.transformers import Trainer
from autoshard.integrations.transformers.arguments import as_one_device, check_arguments, precision_of
from tests.examples.scripts import run_python
from tests.integrations.trainer_runs import SAVED, arguments, gpt2, losses, masked, rows, trainer, whole_run

PAIR = Mesh({"ranks": 2})


def assert_near(found: list[Any], expected: list[Any]) -> None:
    assert [list(item[:2]) for item in found] == [list(item[:2]) for item in expected]
    torch.testing.assert_close([item[2] for item in found], [item[2] for item in expected], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives the run of transformers' own Trainer for a number of accumulated batches."""

    @cache
    def run(accumulated: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("plain")
        return whole_run(folder, None, gradient_accumulation_steps=accumulated)

    return run


def assert_runs_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_near(found["losses"], expected["losses"])
    assert_near(found["resumed"], expected["losses"])
    torch.testing.assert_close(found["metrics"], expected["metrics"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_simulated_mesh_has_the_losses_of_one_device(plain: Any, tmp_path: Path, accumulated: int) -> None:
    """On a simulated mesh, losses, metrics and a resumed run equal one device's."""
    found = whole_run(tmp_path, PAIR, gradient_accumulation_steps=accumulated)
    assert_runs_equal(found, plain(accumulated))


def test_two_ranks_have_the_losses_of_one_device(plain: Any, tmp_path: Path) -> None:
    """Two ranks under torchrun have one device's losses, resumed from one rank's checkpoint too, and their workers
    draw alike."""
    whole_run(tmp_path / "one", Mesh({"ranks": 1}))
    checkpoint = tmp_path / "one" / "first" / "checkpoint-2"
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run_python(*start, "-m", "tests.integrations.trainer_runs", str(tmp_path), str(checkpoint), folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert_runs_equal(found["plain"], plain(1))
    assert_near(found["accumulated"], [entry for entry in plain(2)["losses"] if entry[1] != "eval_loss"])
    assert_near(found["other"], plain(1)["losses"])
    drawn = trainer(tmp_path / "one_drawn", data_collator=masked, dataloader_num_workers=1, max_steps=2)
    drawn.train()
    assert_near(found["drawn"], losses(drawn))
    alone = trainer(tmp_path / "alone", Mesh({"ranks": 1}), **SAVED)
    alone.train(resume_from_checkpoint=str(tmp_path / "plain" / "first" / "checkpoint-2"))
    assert_near(losses(alone), plain(1)["losses"])


def test_the_best_checkpoint_is_loaded_and_old_ones_are_deleted(tmp_path: Path) -> None:
    """With early stopping, the best checkpoint is loaded, the others are deleted, and transformers reads its folder."""
    given = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    kept = {**SAVED, "save_total_limit": 1, **given, "learning_rate": 0.1, "max_steps": 12}
    found = trainer(tmp_path, PAIR, callbacks=[EarlyStoppingCallback(1)], **kept)
    found.train()
    best = found.state.best_model_checkpoint
    assert [folder.name for folder in tmp_path.iterdir()] == [Path(best).name]
    assert found.state.global_step < 12
    assert found.evaluate()["eval_loss"] == pytest.approx(found.state.best_metric, rel=1e-6)
    loaded = GPT2LMHeadModel.from_pretrained(best)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, found.model.get_parameter(name))


def test_a_run_without_steps_left_has_the_weights_of_its_checkpoint(tmp_path: Path) -> None:
    """A Trainer that resumes at the end of training saves the weights of the checkpoint."""
    given = {"train_dataset": rows(4), "save_strategy": "epoch", "num_train_epochs": 1}
    trainer(tmp_path / "first", PAIR, **given).train()
    found = trainer(tmp_path / "second", PAIR, **given)
    found.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    found.save_model(str(tmp_path / "saved"))
    folders = (tmp_path / "saved", tmp_path / "first" / "checkpoint-1")
    torch.testing.assert_close(*(GPT2LMHeadModel.from_pretrained(folder).state_dict() for folder in folders))


def test_predictions_are_those_of_one_device(tmp_path: Path) -> None:
    """Predictions before training, and after two calls of `train`, equal one device's."""
    results = []
    for mesh in (None, PAIR):
        found = trainer(tmp_path / str(mesh is None), mesh, num_train_epochs=1)
        before = found.predict(rows(6))
        found.train()
        found.train()
        after = found.predict(rows(6))
        results.append([before.predictions, before.label_ids, after.predictions, after.metrics["test_loss"]])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_a_trainer_only_predicts(tmp_path: Path) -> None:
    """A Trainer without a dataset for training predicts."""
    found = trainer(tmp_path, PAIR, train_dataset=None).predict(rows(4))
    assert found.predictions.shape == (4, 8, 64)


class Stream(IterableDataset):
    """An iterable dataset of rows, without a length."""

    def __iter__(self) -> Any:
        yield from rows()


def test_a_stream_is_read(tmp_path: Path) -> None:
    """Training on an iterable dataset for a number of steps has one device's losses."""
    results = []
    for mesh in (None, PAIR):
        found = trainer(tmp_path / str(mesh is None), mesh, train_dataset=Stream(), max_steps=4)
        found.train()
        results.append(losses(found))
    assert_near(*results)


def test_an_optimizer_and_schedule_of_the_user_are_used(tmp_path: Path) -> None:
    """An optimizer and a schedule that the user made give one device's losses."""
    results = []
    for mesh in (None, PAIR):
        model = gpt2()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        found = trainer(tmp_path / str(mesh is None), mesh, model=model, max_steps=3, optimizers=(optimizer, schedule))
        found.train()
        results.append(losses(found))
    assert_near(*results)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adagrad", "rmsprop"])
def test_optimizers_by_name(tmp_path: Path, optim: str) -> None:
    """Each optimizer by name gives one device's losses."""
    results = []
    for mesh in (None, PAIR):
        found = trainer(tmp_path / str(mesh is None), mesh, max_steps=2, optim=optim)
        found.train()
        results.append(losses(found))
    assert_near(*results)


def test_a_model_on_meta_is_initialised_by_its_step(tmp_path: Path) -> None:
    """A model on the meta device is compiled for an example, gets weights from `init_weights`, and trains."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(gpt2().config)
    found = trainer(tmp_path, PAIR, model=model, max_steps=2)
    found.step.compile_for(**found.example_inputs())
    found.step.init_weights(0)
    found.train()
    assert [number for number, name, _ in losses(found) if name == "loss"] == [1, 2]


def test_the_planner_chooses_the_axes_of_a_cluster(tmp_path: Path) -> None:
    """For a cluster in place of a mesh the planner chooses the mesh, and a second Trainer runs the plan with equal
    losses."""
    cluster = Cluster("h100_sxm", nodes=1, devices_per_node=2)
    found = trainer(tmp_path, cluster, max_steps=1)
    found.train()
    plan = found.step.plan
    assert plan.mesh.size == 2
    again = trainer(tmp_path, found.step.plan.mesh, max_steps=1, plan=plan)
    again.train()
    assert_near(losses(again), losses(found))


def test_bf16_is_the_precision_of_the_step(tmp_path: Path) -> None:
    """`bf16=True` becomes the step's precision, and without it the precision is None."""
    found = trainer(tmp_path, PAIR, max_steps=1, bf16=True)
    found.train()
    assert found.step.plan.precision == "bf16"
    assert precision_of(arguments(tmp_path)) is None


def test_fp16_scales_the_loss(tmp_path: Path) -> None:
    """`fp16=True` becomes the step's precision, with a scale of the loss."""
    found = trainer(tmp_path, PAIR, max_steps=1, fp16=True)
    found.train()
    assert found.step.plan.precision == "f16"
    assert found.step.loss_scale is not None


def test_a_skipped_step_does_not_move_the_schedule(tmp_path: Path) -> None:
    """Steps that are skipped because of infinite losses do not advance the learning rate."""
    skip = autoshard.Options(on_nonfinite="skip")
    found = trainer(tmp_path, PAIR, max_steps=3, learning_rate=1e30, options=skip)
    found.train()
    rates = [value for _, name, value in losses(found) if name == "learning_rate"]
    assert found.step.skipped_steps == 2
    assert rates == pytest.approx([1e30, 2e30 / 3, 2e30 / 3])


REFUSED = {
    "fsdp": "full_shard",
    "deepspeed": "zero3.json",
    "parallelism_config": object(),
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 25,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "activation_checkpointing": True,
    "gradient_checkpointing": True,
    "auto_find_batch_size": True,
    "torch_compile": True,
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0,
    "label_smoothing_factor": 0.1,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "save_on_each_node": True,
    "enable_jit_checkpoint": True,
    "eval_use_gather_object": True,
    "debug": ["underflow_overflow"],
    "optim": "adafactor",
    "mixed_precision": "fp8",
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """Each argument that a compiled step cannot follow is refused with its value."""
    args = arguments(tmp_path)
    setattr(args, name, REFUSED[name])
    with pytest.raises(NotAvailableError, match=f"cannot run with {name}="):
        Trainer(gpt2(), args, mesh=PAIR)


def test_strategies_of_accelerate_launch_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that `accelerate launch` sets for FSDP are refused by name."""
    args = arguments(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(NotAvailableError, match="ACCELERATE_USE_FSDP=true of `accelerate launch`"):
        Trainer(gpt2(), args, mesh=PAIR)


@pytest.mark.slow
def test_a_plan_of_the_trainers_example_runs(tmp_path: Path) -> None:
    """A plan for a Trainer's model, optimizer and example inputs runs in another Trainer."""
    found = trainer(tmp_path, PAIR)
    given = {"optimizer": found.create_optimizer(), "max_grad_norm": found.args.max_grad_norm}
    plan = autoshard.plan(found.model, PAIR, example_inputs=found.example_inputs(), precision=None, **given)
    again = trainer(tmp_path, PAIR, plan=plan, max_steps=2)
    again.train()
    assert again.step.plan.parameters == plan.parameters


@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches", "gradient_accumulation_kwargs"])
def test_options_of_accelerate_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """Each field of `accelerator_config` that the Trainer cannot follow is refused by name."""
    args = arguments(tmp_path)
    setattr(args.accelerator_config, name, {"num_steps": 2} if name.endswith("kwargs") else True)
    with pytest.raises(NotAvailableError, match=f"accelerator_config.{name}="):
        check_arguments(args)


def test_all_refused_arguments_are_in_one_message(tmp_path: Path) -> None:
    """Two refused arguments are in one error."""
    args = arguments(tmp_path)
    args.torch_compile = args.bf16_full_eval = True
    with pytest.raises(NotAvailableError, match=r"torch_compile=True: .*; bf16_full_eval=True: "):
        check_arguments(args)


def test_a_loss_of_the_user_is_refused(tmp_path: Path) -> None:
    """`compute_loss_func`, and a subclass with its own `compute_loss`, are refused."""

    class Own(Trainer):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            return super().compute_loss(*args, **options)

    with pytest.raises(NotAvailableError, match=r"Own\.compute_loss overrides"):
        Own(gpt2(), arguments(tmp_path), mesh=PAIR)
    with pytest.raises(NotAvailableError, match="compute_loss_func="):
        Trainer(gpt2(), arguments(tmp_path), mesh=PAIR, compute_loss_func=lambda *_, **__: None)


def test_a_checkpoint_of_transformers_is_refused(tmp_path: Path) -> None:
    """Resuming from a checkpoint of transformers' own Trainer is refused."""
    trainer(tmp_path / "plain", **{**SAVED, "max_steps": 2}).train()
    found = trainer(tmp_path / "own", PAIR, **SAVED)
    with pytest.raises(autoshard.CheckpointError, match="no complete checkpoint in autoshard/"):
        found.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))


def test_a_stream_has_no_example(tmp_path: Path) -> None:
    """`example_inputs` of an iterable dataset is refused."""
    found = trainer(tmp_path, PAIR, train_dataset=Stream(), max_steps=1)
    with pytest.raises(NotAvailableError, match="train_dataset=Stream has no rows"):
        found.example_inputs()


def test_the_mesh_is_one_device_to_the_training_loop(tmp_path: Path) -> None:
    """The training loop gets one device with a batch of all accumulated batches, and the user's arguments do not
    change."""
    given = arguments(tmp_path, gradient_accumulation_steps=3)
    found = as_one_device(given)
    assert isinstance(found, TrainingArguments)
    assert (found.world_size, found.per_device_train_batch_size, found.gradient_accumulation_steps) == (1, 12, 1)
    assert (given.per_device_train_batch_size, given.gradient_accumulation_steps) == (4, 3)
