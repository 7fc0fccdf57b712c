"""Lightning's Trainer on a mesh gives the numbers of Lightning on one device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.utils.data import DataLoader

import autoshard
from autoshard import Cluster, Mesh, NotAvailableError, P
from autoshard.integrations.lightning import StepModule, Strategy
from tests.examples.scripts import run_python
from tests.integrations.lightning_runs import Classifier, LogsLoss, Noisy, fit, resumed, rows, whole_run

PAIR = Mesh({"ranks": 2})
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint:UserWarning"),
]


def assert_near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """A run of Lightning on one device, a run that resumes from its first epoch, and that epoch's checkpoint."""
    folder = tmp_path_factory.mktemp("plain")
    return whole_run(folder), resumed(folder / "epoch=0.ckpt"), folder / "epoch=0.ckpt"


def test_a_simulated_mesh_has_the_numbers_of_one_device(plain: Any, tmp_path: Path) -> None:
    """On a simulated mesh, training, validation and test give one device's numbers, also resumed from one device's
    checkpoint."""
    expected, second, checkpoint = plain
    assert_near(whole_run(tmp_path, Strategy(PAIR)), expected)
    assert_near(resumed(checkpoint, Strategy(PAIR)), second)


def test_two_ranks_have_the_numbers_of_one_device(plain: Any, tmp_path: Path) -> None:
    """Two ranks under torchrun have one device's numbers, and checkpoints resume from either on the other."""
    expected, second, checkpoint = plain
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run_python(*start, "-m", "tests.integrations.lightning_runs", str(tmp_path), str(checkpoint), folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert_near(found["whole"], expected)
    assert_near(found["resumed"], second)
    assert_near(resumed(tmp_path / "two" / "epoch=0.ckpt"), second)
    loaded, known = (
        Classifier.load_from_checkpoint(path / "epoch=1.ckpt", weights_only=False)
        for path in (tmp_path / "two", checkpoint.parent)
    )
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(known.named_parameters()), rtol=1e-4, atol=1e-5)
    assert found["refused"].startswith("The model's own code reads all parameters.")
    assert_near(found["stages"], fit(tmp_path, model=LogsLoss, limit_val_batches=0)[1].steps)
    noisy = DataLoader(Noisy(), batch_size=8, num_workers=1)
    assert_near(found["noisy"], fit(tmp_path, data=noisy)[1].steps)


def test_the_loader_has_the_batch_of_all_micro_batches(tmp_path: Path) -> None:
    """Micro-batches give the loss of the whole batch, and logging a value other than the loss is refused with them."""
    expected = fit(tmp_path, model=LogsLoss)[1].steps
    assert_near(fit(tmp_path, Strategy(PAIR, micro_batches=2), model=LogsLoss)[1].steps, expected)
    with pytest.raises(NotAvailableError, match=r"self.log\('hits', ...\).*in micro-batches, the loss alone"):
        fit(tmp_path, Strategy(PAIR, micro_batches=2))


def test_numbers_of_the_loop_are_followed(tmp_path: Path) -> None:
    """A loss that depends on epoch, step and batch number has one device's values, and so has a value logged on
    odd batches."""

    class Annealed(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            if batch_idx % 2:
                self.log("odd_step", loss.detach() * 2)
            return loss * (1 + self.current_epoch) / (1 + (self.global_step > 2))

    expected = fit(tmp_path, model=Annealed)[1].steps
    assert_near(fit(tmp_path, Strategy(PAIR), model=Annealed)[1].steps, expected)


def test_a_second_fit_and_prediction(tmp_path: Path) -> None:
    """After a second `fit` of the same module, predictions equal one device's, also with the best
    checkpoint's weights."""
    results = []
    for strategy in ("auto", Strategy(PAIR)):
        folder = tmp_path / str(len(results))
        found, _ = fit(folder, strategy, enable_checkpointing=True, max_epochs=1)
        model, loader = found.lightning_module, DataLoader(rows(8), batch_size=4)
        found.fit_loop.max_epochs = 2
        found.fit(model, DataLoader(rows(), batch_size=6), loader)
        results.append(
            [*found.predict(model, loader), *found.predict(model, loader, ckpt_path="best", weights_only=False)]
        )
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_a_fit_does_not_take_the_optimizer_state_of_an_earlier_one(tmp_path: Path) -> None:
    """A fit resumed at its end leaves no optimizer state to the next fit, which starts at step 1."""
    given = {"limit_train_batches": 1, "limit_val_batches": 0}
    first, _ = fit(tmp_path, max_epochs=1, **given)
    first.save_checkpoint(tmp_path / "first.ckpt")
    found, _ = fit(tmp_path, Strategy(PAIR), resume=tmp_path / "first.ckpt", max_epochs=1, **given)
    found.fit_loop.max_epochs = 2
    found.fit(Classifier(), DataLoader(rows(), batch_size=6), DataLoader(rows(8), batch_size=4))
    assert {int(state["step"]) for state in found.optimizers[0].state.values()} == {1}


def test_a_search_within_a_fit_leaves_no_optimizer_state(tmp_path: Path) -> None:
    """After a search of the learning rate, the steps of the fit and its checkpoint are those of one device."""
    results = []
    for strategy in ("auto", Strategy(PAIR)):
        finder = LearningRateFinder(num_training_steps=2, update_attr=False)
        found, seen = fit(tmp_path, strategy, callbacks=[finder], max_epochs=1, limit_train_batches=2)
        found.save_checkpoint(tmp_path / "searched.ckpt")
        (saved,) = torch.load(tmp_path / "searched.ckpt", weights_only=False)["optimizer_states"]
        results.append([seen.steps, saved["state"]])
    assert_near(*reversed(results))


def test_options_of_a_checkpoint_are_there_before_the_first_batch(plain: Any, tmp_path: Path) -> None:
    """A resumed fit begins with the saved learning rate, which a callback may change before the first batch."""

    class Decays(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            (group,) = trainer.optimizers[0].param_groups
            rates.append(group["lr"])
            group["weight_decay"] = 1.0

    results, rates = [], list[float]()
    for strategy in ("auto", Strategy(PAIR)):
        _, seen = fit(tmp_path, strategy, resume=plain[2], callbacks=[Decays()], limit_train_batches=2)
        results.append(seen.steps)
    assert rates[0] == rates[1] < 1e-2
    assert_near(*reversed(results))


def test_precision_is_that_of_the_step(tmp_path: Path) -> None:
    """`precision="bf16-mixed"` becomes the step's precision, and other precisions are refused by name."""
    found, _ = fit(tmp_path, Strategy(PAIR), precision="bf16-mixed", max_epochs=1)
    assert found.strategy.step.plan.precision == "bf16"
    with pytest.raises(NotAvailableError, match="precision='bf16-true'"):
        fit(tmp_path, Strategy(PAIR), precision="bf16-true")


def test_a_plan_of_the_step_module_runs(tmp_path: Path) -> None:
    """A plan of `StepModule` runs, and constraints of a strategy name the module's own parameters."""
    model = Classifier()
    batch = tuple(rows(6).tensors)
    plan = autoshard.plan(
        StepModule(model),
        PAIR,
        example_inputs=(batch,),
        optimizer=torch.optim.AdamW(model.parameters()),
        precision=None,
    )
    found, _ = fit(tmp_path, Strategy(PAIR, plan=plan), max_epochs=1)
    assert found.strategy.step.plan.parameters == plan.parameters
    split = Strategy(PAIR, constraints={"net.0.weight": P("ranks", None)})
    found, _ = fit(tmp_path, split, max_epochs=1)
    assert found.strategy.step.plan.parameters["module.net.0.weight"].spec == P("ranks", None)


def test_the_planner_chooses_the_axes_of_a_cluster(tmp_path: Path) -> None:
    """For a cluster in place of a mesh, the planner chooses the mesh."""
    found, _ = fit(tmp_path, Strategy(Cluster("h100_sxm", nodes=1, devices_per_node=2)), max_epochs=1)
    assert found.strategy.step.plan.mesh.size == 2


def test_there_is_no_step_before_the_first_batch() -> None:
    """`strategy.step` before the first batch is an error that says so."""
    with pytest.raises(NotAvailableError, match="no step is compiled before the first batch"):
        _ = Strategy(PAIR).step


REFUSED_SETTINGS = {
    "accumulate_grad_batches=2": {"accumulate_grad_batches": 2},
    "accumulate_grad_batches=4": {"callbacks": [GradientAccumulationScheduler({0: 4})]},
    "gradient_clip_algorithm='value'": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
    "StochasticWeightAveraging": {"callbacks": [StochasticWeightAveraging(1e-2)]},
    "WeightAveraging": {"callbacks": [WeightAveraging()]},
}


@pytest.mark.parametrize("found", REFUSED_SETTINGS)
def test_settings_are_refused_by_name(tmp_path: Path, found: str) -> None:
    """Each setting that a compiled step cannot follow is refused by name."""
    with pytest.raises(NotAvailableError, match=f"cannot train Classifier with {found}"):
        fit(tmp_path, Strategy(PAIR), **REFUSED_SETTINGS[found])


class _Manual(Classifier):
    automatic_optimization = False


class _Elsewhere(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)


class _Hooked(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class _Watch(lightning.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        pass


def _on_meta() -> Classifier:
    with torch.device("meta"):
        return Classifier()


REFUSED_MODULES: dict[str, Callable[[], Classifier]] = {
    "automatic_optimization=False": _Manual,
    "_Hooked.on_before_optimizer_step": _Hooked,
    "an optimizer over other parameters": _Elsewhere,
    "parameters on the meta device": _on_meta,
}


@pytest.mark.parametrize("found", REFUSED_MODULES)
def test_modules_are_refused_by_name(tmp_path: Path, found: str) -> None:
    """Each module that a compiled step cannot train is refused, and the error names the reason."""
    with pytest.raises(NotAvailableError, match=f"cannot train .* with {found}"):
        fit(tmp_path, Strategy(PAIR), model=REFUSED_MODULES[found], num_sanity_val_steps=0)


def test_a_callback_that_reads_gradients_is_refused(tmp_path: Path) -> None:
    """A callback with a hook between backward and update is refused by the hook's name."""
    with pytest.raises(NotAvailableError, match=r"_Watch\.on_after_backward: gradients exist within"):
        fit(tmp_path, Strategy(PAIR), callbacks=[_Watch()])


def _logs_a_number(self: Classifier, batch: Any) -> Any:
    self.log("rows", len(batch[0]))
    return self(batch[0]).sum()


def _returns_logits(self: Classifier, batch: Any) -> Any:
    logits = self(batch[0])
    return {"loss": logits.sum(), "logits": logits}


def _returns_nothing(self: Classifier, batch: Any) -> Any:
    return None


def _reads_the_trainer(self: Classifier, batch: Any) -> Any:
    return self(batch[0]).sum() / self.trainer.num_training_batches


def _updates_a_metric(self: Classifier, batch: Any) -> Any:
    loss = self(batch[0]).square().mean()
    self.accuracy.update(loss.detach())
    return loss


REFUSED_STEPS: dict[str, Callable[..., Any]] = {
    r"self.log\('rows', int\)": _logs_a_number,
    "returns 'logits' beside 'loss'": _returns_logits,
    "returns None": _returns_nothing,
    "reads trainer.num_training_batches": _reads_the_trainer,
    "updates the metric accuracy": _updates_a_metric,
}


@pytest.mark.parametrize("found", REFUSED_STEPS)
def test_training_steps_are_refused_by_name(tmp_path: Path, found: str) -> None:
    """A `training_step` that does more than a compiled step can run is refused, and the error names the statement."""
    kind = type("Stepped", (Classifier,), {"training_step": REFUSED_STEPS[found]})
    with pytest.raises(NotAvailableError, match=found):
        fit(tmp_path, Strategy(PAIR), model=kind)
