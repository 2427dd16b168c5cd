"""memfit's callbacks in the loops of transformers and Lightning: the same losses, every step within the budget."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lightning")

from transformers import Trainer, TrainerCallback

import memfit
from memfit.errors import PlanDrift
from memfit.integrations.lightning import BatchSizeFinder
from memfit.integrations.lightning import MemfitCallback as LightningCallback
from memfit.integrations.lightning import step as lightning_step
from memfit.integrations.transformers import MemfitCallback, step
from tests.integrations import training_loops
from tests.integrations.library_training import (
    STEPS,
    LightningObserver,
    Module,
    Observer,
    build_lora,
    fit_warnings,
    losses_of,
    make_lightning,
    make_trainer,
)
from tests.integrations.training_loops import Training

pytestmark = [pytest.mark.slow]

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16": True},
    "accumulated and smoothed": {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "max_grad_norm": 0.5},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "LoRA": {},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def budget_for(planned: memfit.Step, part: float = 0.4) -> int:
    """Bytes between the smallest budget that can be met (0) and the one that needs nothing (1)."""
    least = memfit.plan(planned, target="cpu", budget="1B", progress=False)
    assert least.minimum_budget_bytes is not None
    return least.minimum_budget_bytes + int((least.baseline.peak_bytes - least.minimum_budget_bytes) * part)


def compare_trainers(name: str, steps: int = STEPS) -> None:
    arguments, build = {**CASES[name], "max_steps": steps}, build_lora if name == "LoRA" else training_loops.build
    planned_arguments = {key: value for key, value in arguments.items() if key != "gradient_checkpointing"}
    budget = budget_for(step(make_trainer(build(), [], **planned_arguments)))
    found = {}
    for callback in (None, MemfitCallback(budget=budget)):
        training = Training()
        trainer = make_trainer(model := build(), [] if callback is None else [callback], **arguments)
        if callback is not None:
            callback._training._measure = False  # one profiler at a time
        trainer.add_callback(Observer(model, training))
        with warnings.catch_warnings():
            warnings.simplefilter("error", PlanDrift)
            trainer.train()
        found[callback is not None] = losses_of(trainer), training.peaks_bytes
    assert callback is not None and callback.plan is not None and callback.plan.checkpoint
    assert len(found[True][0]) == steps
    assert found[True][0] == found[False][0]
    assert max(found[True][1]) <= budget, found[True][1]
    if name != "gradient_checkpointing":
        assert max(found[False][1]) > budget, "without the callback it would not have been within the budget"


@pytest.mark.zoo
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_with_the_callback_stays_within_the_budget(name: str) -> None:
    compare_trainers(name)


def test_a_slice_of_trainers_within_the_budget() -> None:
    compare_trainers("accumulated and smoothed", steps=4)


def test_the_callback_logs_what_it_predicted_and_measured(caplog: pytest.LogCaptureFixture) -> None:
    """And takes the plan off the model when training ends, with checkpointing of the model's own replaced."""
    budget = budget_for(step(make_trainer(training_loops.build(), [])))
    callback = MemfitCallback(budget=budget)
    trainer = make_trainer(training_loops.build(), [callback], gradient_checkpointing=True, max_steps=5)
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "memfit_measured_peak_gib" in entry]
    assert callback.measured_peak_bytes is not None and callback.plan is not None
    assert logged["memfit_measured_peak_gib"] == callback.measured_peak_bytes / 2**30
    assert len(losses_of(trainer)) == 5, "the trainer logs as often as without"
    predicted = callback.plan.predicted
    assert predicted is not None and logged["memfit_predicted_peak_gib"] == predicted.peak_bytes / 2**30
    assert predicted.peak_bytes <= callback.measured_peak_bytes <= budget
    assert any("gradient_checkpointing is switched off" in each.message for each in caplog.records)
    assert memfit.engines.plan_of_model(trainer.model) is None  # type: ignore[arg-type]
    assert "training_step" not in vars(trainer)


def test_a_step_that_fits_as_it_is_is_left_alone() -> None:
    callback = MemfitCallback(budget="1GiB")
    trainer = make_trainer(training_loops.build(), [callback], max_steps=2)
    trainer.train()
    assert callback.plan is not None and not callback.plan.checkpoint
    assert len(losses_of(trainer)) == 2


class FailingOnce(torch.autograd.Function):
    """The identity, which finds no memory in one of its backwards."""

    left = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        FailingOnce.left -= 1
        if FailingOnce.left == 0:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")
        return gradient


def test_a_step_that_runs_out_of_memory_is_planned_anew_and_run_again() -> None:
    """In the backward of a second micro-batch, when gradients of the first are there already."""

    class Fault(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            FailingOnce.left = 6
            model.model.layers[1].register_forward_hook(lambda _, __, output: FailingOnce.apply(output))

    arguments = {"gradient_accumulation_steps": 2, "max_steps": 5}
    budget = budget_for(step(make_trainer(training_loops.build(), [], **arguments)), part=0.8)
    plain = make_trainer(training_loops.build(), [], **arguments)
    plain.train()
    callback = MemfitCallback(budget=budget, target="cpu")
    trainer = make_trainer(training_loops.build(), [callback, Fault()], **arguments)
    trainer.train()
    assert FailingOnce.left < 0, "it did fail"
    assert callback._training.replans == 1
    assert callback.plan is not None and callback.plan.budget_bytes < budget * 0.95
    assert losses_of(trainer) == losses_of(plain)


@pytest.mark.zoo
def test_evaluation_and_resuming_are_as_without_the_callback() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {
            "eval_strategy": "steps",
            "eval_steps": 5,
            "save_strategy": "steps",
            "save_steps": 10,
        }
        budget = budget_for(step(make_trainer(training_loops.build(), [])))
        found = []
        for use in (False, True):
            home = str(Path(folder, str(use)))

            def make(use: bool = use, home: str = home) -> Trainer:
                callbacks = [MemfitCallback(budget=budget)] if use else []
                return make_trainer(training_loops.build(), callbacks, output_dir=home, **arguments)

            whole = make()
            whole.train()
            again = make()
            again.train(resume_from_checkpoint=f"{home}/checkpoint-10")
            found.append(
                [
                    [(entry.get("loss"), entry.get("eval_loss")) for entry in each.state.log_history]
                    for each in (whole, again)
                ]
            )
        keep = [[[pair for pair in log if any(pair)] for log in logs] for logs in found]
        assert keep[0] == keep[1]
        assert len(keep[1][1]) >= STEPS


def test_a_target_that_the_model_is_not_on_is_refused_before_it_is_planned() -> None:
    trainer = make_trainer(training_loops.build(), [MemfitCallback(budget="1MiB", target="h100-sxm")])
    with pytest.raises(memfit.InputError, match="the model is on cpu, and the target is NVIDIA H100"):
        trainer.train()


def test_a_plan_of_a_trainer_says_what_to_write() -> None:
    trainer = make_trainer(training_loops.build(), [])
    with pytest.raises(memfit.InputError, match=r"memfit\.integrations\.transformers\.step\(trainer\)"):
        memfit.plan(trainer, target="cpu")  # type: ignore[arg-type]


LIGHTNING_CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
    "bf16": {"precision": "bf16-mixed"},
}


def compare_lightning(name: str, steps: int = STEPS) -> None:
    arguments = {**LIGHTNING_CASES[name], "max_steps": steps}
    batch = next(iter(Module().train_dataloader()))
    budget = budget_for(lightning_step(Module(), batch, trainer=make_lightning([], **arguments)))
    found = {}
    for callback in (None, LightningCallback(budget=budget)):
        training, module = Training(), Module()
        callbacks: list[Any] = [LightningObserver(module, training)]
        if callback is not None:
            callback._training._measure = False  # one profiler at a time
            callbacks.insert(0, callback)
        trainer = make_lightning(callbacks, **arguments)
        torch.manual_seed(2)
        with fit_warnings() as told:
            trainer.fit(module)
        found[callback is not None] = module.losses, training.peaks_bytes, told
    assert callback is not None and callback.plan is not None and callback.plan.checkpoint
    assert len(found[True][1]) == steps
    assert torch.equal(torch.stack(found[True][0]), torch.stack(found[False][0]))
    assert max(found[True][1]) <= budget, found[True][1]
    assert max(found[False][1]) > budget, "without the callback it would not have been within the budget"
    assert found[True][2] == found[False][2], "no warning more: none about self.log(), none about the plan"


@pytest.mark.zoo
@pytest.mark.parametrize("name", LIGHTNING_CASES)
def test_lightning_with_the_callback_stays_within_the_budget(name: str) -> None:
    compare_lightning(name)


def test_a_slice_of_lightning_within_the_budget() -> None:
    compare_lightning("accumulated and clipped", steps=4)


def test_lightning_measures_what_was_predicted_though_gradients_are_freed_inside_of_a_step() -> None:
    callback = LightningCallback(budget=budget_for(lightning_step(Module(), next(iter(Module().train_dataloader())))))
    make_lightning([callback], max_steps=5).fit(Module())
    assert (
        callback.measured_peak_bytes is not None and callback.plan is not None and callback.plan.predicted is not None
    )
    assert callback.measured_peak_bytes == pytest.approx(callback.plan.predicted.peak_bytes, rel=0.01)


def test_the_batch_size_is_found_without_running_anything() -> None:
    """The largest whose peak is within the budget, and the next one's is not; the loader is made with it."""

    def peak(size: int) -> int:
        batch = next(iter(Module(size).train_dataloader()))
        return memfit.memory.Timeline.of(memfit.trace(lightning_step(Module(), batch), target="cpu")).peak_bytes

    budget = (peak(7) + peak(8)) // 2
    module, finder = Module(), BatchSizeFinder(budget=budget, max_val=16)
    trainer = make_lightning([finder], max_steps=1)
    trainer.fit(module)
    assert finder.optimal_batch_size == module.batch_size == 7
    assert trainer.train_dataloader.batch_size == 7
