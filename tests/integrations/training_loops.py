"""One small model in the loops people use: three epochs of ten batches, four accumulated, so a last window of two.

Every loop trains the same model on the same data and gives what the allocator did in each of its steps.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from memfit.capture import Step
from memfit.memory import measured

EPOCHS, BATCHES, ACCUMULATE = 3, 10, 4
STEPS_IN_EPOCH = -(-BATCHES // ACCUMULATE)
_BATCH, _LENGTH, _VOCABULARY = 2, 64, 128
_MARK_BYTES = 40_000_007


def build() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=_VOCABULARY,
        max_position_embeddings=_LENGTH,
        attention_dropout=0.1,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).train()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, _VOCABULARY, (BATCHES * _BATCH, _LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def loader() -> DataLoader:
    return DataLoader(data(), batch_size=_BATCH)  # type: ignore[arg-type]


def step(**options: Any) -> Step:
    """The step of these loops; how they hold outputs and gradients is in the options."""
    rows = next(iter(loader()))
    return Step(build(), rows, optimizer=make_optimizer, accumulation_steps=ACCUMULATE, **options)


@dataclass(slots=True)
class Training:
    """What a training did: the peak of each step by the allocator's events, and the parameters it ended with."""

    peaks_bytes: list[int] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


@contextlib.contextmanager
def observed(model: nn.Module, training: Training) -> Iterator[None]:
    """Fill in `training` by what happens in the block. An allocation after each optimizer step marks the step's end."""
    resident = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }

    def mark(*_: Any) -> None:
        torch.empty(_MARK_BYTES, dtype=torch.uint8)

    hook = register_optimizer_step_post_hook(mark)
    try:
        with measured() as truth:
            yield
    finally:
        hook.remove()
    level = peak = sum(resident.values())
    for event in truth.events:
        if event.bytes == _MARK_BYTES:
            training.peaks_bytes.append(peak)
            peak = level
        elif event.bytes != -_MARK_BYTES:
            level += event.bytes
            peak = max(peak, level)
    training.parameters = {name: each.detach().clone() for name, each in model.named_parameters()}


def train_plain(model: nn.Module, prepare: Callable[..., Any]) -> Training:
    """A loop of one's own, in which the output stays in its variable until the next one takes its place."""
    optimizer, batches, training = make_optimizer(model.parameters()), loader(), Training()
    prepare(model, optimizer)
    torch.manual_seed(2)
    with observed(model, training):
        for _ in range(EPOCHS):
            for number, batch in enumerate(batches):
                output = model(**batch)
                loss = output.loss / ACCUMULATE
                loss.backward()
                training.losses.append(loss.item())
                if (number + 1) % ACCUMULATE == 0 or number + 1 == BATCHES:
                    optimizer.step()
                    optimizer.zero_grad()
    return training


def train_accelerate(model: nn.Module, prepare: Callable[..., Any]) -> Training:
    """The loop of accelerate's documentation."""
    from accelerate import Accelerator

    training = Training()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True)
    prepared, optimizer, batches = accelerator.prepare(model, make_optimizer(model.parameters()), loader())
    prepare(model, optimizer)
    torch.manual_seed(2)
    with observed(model, training):
        for _ in range(EPOCHS):
            for batch in batches:
                with accelerator.accumulate(prepared):
                    output = prepared(**batch)
                    loss = output.loss
                    accelerator.backward(loss)
                    training.losses.append(loss.item())
                    optimizer.step()
                    optimizer.zero_grad()
    return training


def train_transformers(model: nn.Module, prepare: Callable[..., Any]) -> Training:
    """The Trainer of transformers."""
    training = Training()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=_BATCH,
            gradient_accumulation_steps=ACCUMULATE,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=2,
        )
        trainer = Trainer(
            model=model,  # type: ignore[arg-type]
            args=arguments,
            train_dataset=data(),  # type: ignore[arg-type]
            optimizers=(make_optimizer(model.parameters()), None),  # type: ignore[arg-type]
        )
        trainer.callback_handler.callbacks = [
            each for each in trainer.callback_handler.callbacks if "Printer" not in type(each).__name__
        ]
        prepare(model, None)
        with observed(model, training):
            trainer.train()
        training.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return training


def train_lightning(model: nn.Module, prepare: Callable[..., Any]) -> Training:
    """Lightning's automatic optimization, which calls zero_grad between forward and backward."""
    import lightning

    training = Training()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            training.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.model.parameters())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        barebones=False,
    )
    batches = loader()
    prepare(model, None)
    torch.manual_seed(2)
    with warnings.catch_warnings(), observed(model, training):
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer.fit(Module(), batches)
    return training
