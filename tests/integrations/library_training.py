"""Twenty steps of a small model by transformers' `Trainer` and by Lightning's, with memfit's callback and without."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integrations import training_loops
from tests.integrations.training_loops import Training, observed

STEPS = 20


def build_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = training_loops.build()
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], r=4))  # type: ignore[arg-type]


def make_trainer(model: nn.Module, callbacks: list[Any], *, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 2,
    }
    trainer = kind(
        model=model,  # type: ignore[arg-type]
        args=TrainingArguments(**{**defaults, **arguments}),
        train_dataset=training_loops.data(),  # type: ignore[arg-type]
        eval_dataset=training_loops.data()[:4],  # type: ignore[arg-type]
        callbacks=callbacks,
    )
    trainer.callback_handler.callbacks = [
        each for each in trainer.callback_handler.callbacks if "Printer" not in type(each).__name__
    ]
    return trainer


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Observer(TrainerCallback):
    """Measures every step by the allocator's events; planning, which profiles as well, comes before it."""

    def __init__(self, model: nn.Module, training: Training) -> None:
        self._block = observed(model, training)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._block.__enter__()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._block.__exit__(None, None, None)


class Module(lightning.LightningModule):
    """The model as a LightningModule that logs its loss and has its batch size as an attribute."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.model = training_loops.build()
        self.batch_size = batch_size
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return training_loops.make_optimizer(self.model.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(training_loops.data(), batch_size=self.batch_size)  # type: ignore[arg-type]


class LightningObserver(lightning.Callback):
    def __init__(self, model: nn.Module, training: Training) -> None:
        self._block = observed(model, training)

    def on_train_start(self, *_: Any) -> None:
        self._block.__enter__()

    def on_train_end(self, *_: Any) -> None:
        self._block.__exit__(None, None, None)


def make_lightning(callbacks: list[Any], **arguments: Any) -> lightning.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    defaults: dict[str, Any] = {"max_steps": STEPS, "accelerator": "cpu", "logger": False}
    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return lightning.Trainer(callbacks=callbacks, **{**defaults, **dict.fromkeys(quiet, False), **arguments})


@contextlib.contextmanager
def fit_warnings() -> Iterator[list[str]]:
    """The warnings of a block but the one about workers, which is Lightning's about any loader here."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [str(each.message) for each in caught if "many workers" not in str(each.message)]
