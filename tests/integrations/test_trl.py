"""TRL's SFTTrainer with the callback: a Trainer by inheritance, with a loss and metrics of its own. `make trl`."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

pytest.importorskip("trl", exc_type=ImportError, reason="make trl installs TRL")

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from memfit.integrations.transformers import MemfitCallback, step
from tests.integrations import training_loops
from tests.integrations.library_training import STEPS, Observer, losses_of
from tests.integrations.small_tokenizer import make_tokenizer
from tests.integrations.test_callbacks import budget_for, one_thread
from tests.integrations.training_loops import Training

pytestmark = pytest.mark.zoo
__all__ = ["one_thread"]


def make(callbacks: list[Any]) -> SFTTrainer:
    rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in training_loops.data()])
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=2,
    )
    return SFTTrainer(
        model=training_loops.build(),
        args=arguments,
        train_dataset=rows,
        processing_class=make_tokenizer(),
        callbacks=callbacks,
    )


def test_supervised_fine_tuning_stays_within_the_budget() -> None:
    torch.manual_seed(0)
    budget = budget_for(step(make([])))
    found = {}
    for callback in (None, MemfitCallback(budget=budget)):
        training = Training()
        trainer = make([] if callback is None else [callback])
        if callback is not None:
            callback._training._measure = False  # one profiler at a time
        trainer.add_callback(Observer(trainer.model, training))
        trainer.train()
        tokens = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
        found[callback is not None] = losses_of(trainer), tokens, training.peaks_bytes
    assert callback is not None and callback.plan is not None and callback.plan.checkpoint
    assert len(found[True][0]) == STEPS
    assert found[True][:2] == found[False][:2], "losses, and tokens that TRL counts: none for the capture"
    assert max(found[True][2]) <= budget < max(found[False][2])
