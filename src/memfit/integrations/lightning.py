"""Plans in Lightning's `Trainer`, and a batch-size finder that runs no trial.

    trainer = lightning.Trainer(..., callbacks=[MemfitCallback(budget="20GiB")])
    trainer.fit(module)

Note [Lightning's step]: `training_step`, `backward`, `optimizer_zero_grad` and `configure_gradient_clipping` are the
module's own, under the trainer's precision, in the order of automatic optimization: gradients are let go between
forward and backward. Lightning calls them inside `optimizer.step(closure)`; here the optimizer steps after them, which
holds the same tensors. `self.log` does nothing while a step is captured.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.capture import Step
from memfit.errors import InputError
from memfit.integrations.batches import find_batch_size, largest_batch
from memfit.integrations.planned_training import (
    PlannedTraining,
    load,
    logger,
    patched_attributes,
    resolve_target,
    unwrap_optimizer,
)
from memfit.plans import Plan, Search
from memfit.solve import SolveOptions

OLDEST = "2.5"
lightning = load("lightning", OLDEST)
_Callback: Any = lightning.Callback


def step(module: Any, batch: Any, *, trainer: Any = None, optimizer: Any = None) -> Step:
    """Return the training step of a `LightningModule`, for `memfit.plan`, `explain` and `search`.

    The optimizer is that of `configure_optimizers` unless given. `trainer` says accumulation, clipping and precision;
    without one they are those of a plain `Trainer()`.
    """
    if not isinstance(module, lightning.LightningModule):
        raise InputError(f"this is a {type(module).__name__}; give a lightning.LightningModule")
    if optimizer is None:
        optimizer = _configured_optimizer(module)
    return _step(module, batch, trainer, optimizer)


class MemfitCallback(_Callback):
    """Plans the module's own step when training begins, runs it under the plan, logs predicted and measured peak.

    `budget` is what tensors of one device may take (`"20GiB"`, bytes, or a part of the device); without it, all that is
    usable. `target` is the hardware, the module's own device unless given. `batch` is the largest batch that comes;
    without it, the longest of the dataset's first rows.
    """

    def __init__(
        self,
        *,
        budget: str | int | float | None = None,
        target: Any = None,
        batch: Any = None,
        options: SolveOptions | None = None,
    ) -> None:
        super().__init__()
        self._batch = batch
        self._training = PlannedTraining(budget=budget, target=target, options=options, retries=0)
        self._logged = False

    @property
    def plan(self) -> Plan | None:
        """The plan that the module runs, or ran last."""
        return self._training.plan

    @property
    def measured_peak_bytes(self) -> int | None:
        """The peak of a step as the allocator counted it; None before the fourth step."""
        return self._training.measured_peak_bytes

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Plan and apply: module, optimizers and loader are as the loop will use them."""
        _refuse_unsupported(trainer)
        batch = largest_batch(trainer.train_dataloader) if self._batch is None else self._batch
        planned = _step(pl_module, trainer.precision_plugin.convert_input(batch), trainer, trainer.optimizers)
        model = trainer.model if isinstance(trainer.model, nn.Module) else pl_module
        self._training.begin(planned, model, trainer.optimizers, prefetched=0)
        self._logged = False
        if trainer.is_global_zero:
            logger.warning(self._training.describe())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to measure a step."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._training.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the measurement of a step, and log predicted and measured peak once both are known."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._training.end_step()
        figures = self._training.figures()
        if len(figures) > 1 and not self._logged:
            self._logged = True
            for each in trainer.loggers:
                each.log_metrics(figures, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the plan off the module."""
        self._training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the plan off the module."""
        self._training.end()


class BatchSizeFinder(_Callback):
    """Sets `batch_size` of the module or the datamodule to the largest that fits, before the data is loaded.

    Unlike Lightning's own it runs nothing, so nothing can run out of memory, and works on several ranks. With
    `planned=True` it is the fastest size under a plan of `MemfitCallback` with the same budget, which follows it.
    """

    def __init__(
        self,
        *,
        budget: str | int | float | None = None,
        target: Any = None,
        planned: bool = False,
        batch_arg_name: str = "batch_size",
        max_val: int = 8192,
        batch: Any = None,
    ) -> None:
        super().__init__()
        self._budget, self._target, self._planned = budget, target, planned
        self._name, self._largest, self._batch = batch_arg_name, max_val, batch
        self.optimal_batch_size: int | None = None
        self.search: Search | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Search: the strategy has placed the module and made its optimizers, and no loader is there yet."""
        _refuse_unsupported(trainer)
        holders = _holders(trainer, pl_module, self._name)
        batch = self._batch
        if batch is None:
            source = trainer.datamodule if trainer.datamodule is not None else pl_module
            batch = largest_batch(source.train_dataloader())
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        target = resolve_target(self._target, pl_module.device, ranks)
        self.search = found = find_batch_size(
            lambda batch: _step(pl_module, batch, trainer, trainer.optimizers),
            batch,
            target=target,
            budget=self._budget,
            largest=self._largest,
            planned=self._planned,
        )
        best = found.best if self._planned else found.largest
        if best is None:
            raise InputError(f"not even a batch of 1 fits {found.budget_bytes:,} bytes on {found.target}:\n{found}")
        self.optimal_batch_size = trainer.strategy.broadcast(best.value)
        for holder in holders:
            if isinstance(holder, MutableMapping):
                holder[self._name] = self.optimal_batch_size
            else:
                setattr(holder, self._name, self.optimal_batch_size)
        if trainer.is_global_zero:
            logger.warning(
                f"memfit: {self._name} {self.optimal_batch_size} ({len(found.points)} sizes planned, none run)"
            )


def _step(module: Any, batch: Any, trainer: Any, optimizers: Any) -> Step:
    """Return what the trainer's loop does for one optimizer step."""
    several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    inner = [unwrap_optimizer(each) for each in several]
    count = 1 if trainer is None else trainer.accumulate_grad_batches
    takes_index = len(inspect.signature(module.training_step).parameters) > 1

    def training_step(batch: Any, number: int) -> Any:
        precision = contextlib.nullcontext() if trainer is None else trainer.precision_plugin.train_step_context()
        with precision:
            return module.training_step(batch, number) if takes_index else module.training_step(batch)

    def run(_: nn.Module, __: Any, batch: Any) -> None:
        with _nothing_logged(module), _attached(module, trainer):
            if not module.automatic_optimization:
                training_step(batch, 0)
                return
            (optimizer,) = inner
            for number in range(count):
                loss = _loss_of(training_step(batch, number)) / count
                if number == 0:
                    module.optimizer_zero_grad(0, 0, optimizer)
                module.backward(loss)
                del loss
            if trainer is not None:
                module.configure_gradient_clipping(
                    optimizer,
                    gradient_clip_val=trainer.gradient_clip_val,
                    gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                )
            optimizer.step()

    if module.automatic_optimization and len(inner) != 1:
        raise InputError(
            f"automatic optimization has one optimizer, and configure_optimizers gave {len(inner)}; set "
            "automatic_optimization = False"
        )
    return Step(module, batch, optimizer=inner[0], run=run)


def _loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"training_step returned a {type(output).__name__} without a loss; return the loss")
    return loss


@contextlib.contextmanager
def _nothing_logged(module: Any) -> Iterator[None]:
    """Let `self.log` do nothing: there is no loop that takes values, and they have none."""

    def log(*args: Any, **kwargs: Any) -> None:
        pass

    with patched_attributes(module, log=log, log_dict=log):
        yield


@contextlib.contextmanager
def _attached(module: Any, trainer: Any) -> Iterator[None]:
    """Give the module its trainer for a while, where it has none: outside `fit`."""
    try:
        has_trainer = module.trainer is not None
    except RuntimeError:
        has_trainer = False
    if has_trainer or trainer is None:
        yield
        return
    module.trainer = trainer
    try:
        yield
    finally:
        module.trainer = None


def _configured_optimizer(module: Any) -> Any:
    found = module.configure_optimizers()
    if isinstance(found, Mapping):
        found = found["optimizer"]
    while isinstance(found, list | tuple) and found and not isinstance(found[0], torch.optim.Optimizer):
        found = found[0]
    if isinstance(found, torch.optim.Optimizer):
        return found
    if isinstance(found, list | tuple) and found:
        return list(found)
    raise InputError("configure_optimizers gives no optimizer; give step(..., optimizer=...)")


def _holders(trainer: Any, module: Any, name: str) -> list[Any]:
    """Return what has the batch size: module, its hyperparameters, datamodule and its."""
    found: list[Any] = []
    for holder in (module, trainer.datamodule):
        if holder is not None:
            found += [holder] if hasattr(holder, name) else []
            found += [holder.hparams] if name in getattr(holder, "hparams", {}) else []
    if not found:
        raise InputError(
            f"neither the module nor a datamodule has {name!r}; give one of them that attribute and make its "
            "train_dataloader of it. Loaders that are given to fit() have their size already"
        )
    return found


def _refuse_unsupported(trainer: Any) -> None:
    """Refuse strategies under which the module is sharded when a callback is told that training begins."""
    name = type(trainer.strategy).__name__
    if name not in ("SingleDeviceStrategy", "DDPStrategy"):
        raise InputError(
            f"the trainer's strategy is {name}, under which the module is sharded or placed before callbacks run. Plan "
            "before fit(): plan = memfit.plan(memfit.integrations.lightning.step(module, batch), target=..., "
            "ranks=..., budget=...), then plan.apply(module), and leave MemfitCallback out"
        )


__all__ = ["BatchSizeFinder", "MemfitCallback", "step"]
