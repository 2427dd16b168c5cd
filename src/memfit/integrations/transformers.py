"""Plans in transformers' `Trainer`, and in the trainers that inherit from it (TRL's).

    trainer = Trainer(..., callbacks=[MemfitCallback(budget="20GiB")])
    trainer.train()

Note [The trainer's own step]: the step that is planned calls `training_step`, `get_batch_samples` and the optimizer of
the very trainer, in the order of its loop: autocast, label smoothing, a loss of one's own and whatever a subclass does
are captured as they run. Callbacks are not told which trainer they belong to; it is the one that has them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memfit.capture import Step
from memfit.errors import InputError, StateError
from memfit.integrations.accelerate import autocast_forward
from memfit.integrations.batches import largest_batch
from memfit.integrations.planned_training import PlannedTraining, load, logger, unwrap_optimizer
from memfit.plans import Plan
from memfit.solve import SolveOptions

OLDEST = "4.57"
transformers = load("transformers", OLDEST)


def step(trainer: Any, batch: Any = None, *, batch_size: int | None = None) -> Step:
    """Return the training step of a `Trainer`, for `memfit.plan`, `explain` and `search`; the trainer has not begun.

    Without a `batch` it is made of the longest of the dataset's first rows, by the trainer's own collator. With a
    `batch_size`, of so many rows.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise InputError(f"this is a {type(trainer).__name__}; give a transformers.Trainer")
    if trainer.model is None:
        raise InputError("this Trainer builds its model in train() (model_init); give it the model")
    if trainer.optimizer is None:
        trainer.create_optimizer()
    if batch is None:
        batch = largest_batch(trainer.get_train_dataloader(), batch_size or trainer.args.train_batch_size)
    return _step(trainer, batch)


class MemfitCallback(transformers.TrainerCallback):
    """Plans the trainer's own step when training begins, runs it under the plan, and logs predicted and measured peak.

    `budget` is what tensors of one device may take (`"20GiB"`, bytes, or a part of the device); without it, all that is
    usable. `target` is the hardware, the model's own device unless given. `batch` is the largest batch that comes,
    already collated; without it, the longest of the dataset's first rows. A step that runs out of memory in forward or
    backward is taken back, planned tighter and run again, `retries` times at most; 0 leaves that out.
    The model's own `gradient_checkpointing` is switched off: the plan takes its place.
    """

    def __init__(
        self,
        *,
        budget: str | int | float | None = None,
        target: Any = None,
        batch: Any = None,
        options: SolveOptions | None = None,
        retries: int = 3,
    ) -> None:
        self._batch = batch
        self._training = PlannedTraining(budget=budget, target=target, options=options, retries=retries)
        self._logged = 0

    @property
    def plan(self) -> Plan | None:
        """The plan that the model runs, or ran last."""
        return self._training.plan

    @property
    def measured_peak_bytes(self) -> int | None:
        """The peak of a step as the allocator counted it; None before the fourth step."""
        return self._training.measured_peak_bytes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Plan and apply: model, optimizer and loader are as the loop will use them."""
        trainer = _trainer_of(self)
        _refuse_unsupported(trainer)
        loader = kwargs["train_dataloader"]
        batch = self._batch if self._batch is not None else largest_batch(loader, state.train_batch_size)
        vars(trainer).pop("training_step", None)
        _switch_checkpointing_off(trainer)
        self._training.begin(_step(trainer, batch), trainer.model_wrapped, [trainer.optimizer], prefetched=1)
        if args.should_log:
            logger.warning(self._training.describe())
        self._logged = 0
        training, training_step = self._training, trainer.training_step

        def guarded(model: nn.Module, inputs: Any, *rest: Any, **more: Any) -> torch.Tensor:
            def run() -> torch.Tensor:
                return training_step(model, dict(inputs) if isinstance(inputs, Mapping) else inputs, *rest, **more)

            return training.run(run)

        trainer.training_step = guarded

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to measure a step."""
        self._training.begin_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the measurement of a step."""
        self._training.end_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log predicted and measured peak once, when both are known, and again after a replan."""
        figures = self._training.figures()
        if len(figures) > 1 and len(figures) + self._training.replans > self._logged:
            self._logged = len(figures) + self._training.replans
            wanted = control.should_log
            _trainer_of(self).log(figures)
            control.should_log = wanted  # a log of ours takes the place of none

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the plan off the model."""
        self._training.end()
        vars(_trainer_of(self)).pop("training_step", None)


def _step(trainer: Any, batch: Any) -> Step:
    """Return what the trainer's loop does for one optimizer step, on its own model, which is not wrapped here."""
    count, optimizer = trainer.args.gradient_accumulation_steps, unwrap_optimizer(trainer.optimizer)

    def run(model: nn.Module, _: Any, batch: Any) -> None:
        micro_batches = [dict(batch) if isinstance(batch, Mapping) else batch for _ in range(count)]
        found, items = trainer.get_batch_samples(iter(micro_batches), count, trainer.args.device)
        with _as_in_training(trainer, model, found):
            for inputs in found:
                trainer.training_step(model, inputs, items)
            if trainer.args.max_grad_norm is not None and trainer.args.max_grad_norm > 0:
                trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
            optimizer.step()
            model.zero_grad()

    return Step(trainer.model, batch, optimizer=optimizer, run=run, resident_batches=count + 1)


@contextlib.contextmanager
def _as_in_training(trainer: Any, model: nn.Module, batches: list[Any]) -> Iterator[None]:
    """Let the trainer run a step that counts for nothing: what it notes of it, such as metrics of TRL, is put back."""
    before = dict(vars(trainer))
    if "_metrics" in before:
        before["_metrics"] = copy.deepcopy(before["_metrics"])
    trainer.current_gradient_accumulation_steps = len(batches)
    prepared = getattr(model, "_is_accelerate_prepared", False) or not trainer.accelerator.native_amp
    try:
        with contextlib.nullcontext() if prepared else autocast_forward(trainer.accelerator, model):
            yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(before)


def _trainer_of(callback: MemfitCallback) -> Any:
    """Return the trainer that has this callback."""
    for each in gc.get_objects():
        if issubclass(type(each), transformers.Trainer):
            handler = getattr(each, "callback_handler", None)
            if handler is not None and any(own is callback for own in handler.callbacks):
                return each
    raise StateError("this MemfitCallback belongs to no Trainer; give it as Trainer(callbacks=[...]) or add_callback")


def _refuse_unsupported(trainer: Any) -> None:
    """Refuse what the step cannot be captured with, before anything is changed."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        which = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        raise InputError(
            f"the model is sharded by {which} when a callback is told that training begins. Plan and apply before "
            "train(): plan = memfit.plan(memfit.integrations.transformers.step(trainer), target=..., ranks=..., "
            "budget=...), then plan.apply(trainer.model), and leave MemfitCallback out"
        )
    if trainer.args.n_gpu > 1:
        raise InputError(
            "this Trainer runs several GPUs in one process (nn.DataParallel), which cannot be planned; start one "
            "process for each with torchrun, or show it one: CUDA_VISIBLE_DEVICES=0"
        )


def _switch_checkpointing_off(trainer: Any) -> None:
    """Switch the model's own checkpointing off, which the plan replaces, and say so."""
    model = trainer.model
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
        logger.warning("memfit: gradient_checkpointing is switched off for this training; the plan takes its place")


__all__ = ["MemfitCallback", "step"]
