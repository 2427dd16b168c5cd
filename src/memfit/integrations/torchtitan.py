"""Plans in torchtitan's trainer, and a `Step` from its job configuration: its model, loss, clipping and optimizers.

    from torchtitan.train import main
    main(memfit.integrations.torchtitan.planned_trainer(budget="60GiB"))  # in place of main(Trainer)

    step = memfit.integrations.torchtitan.step("llama3_8b.toml")
    memfit.trace(step, target="h100-sxm", mesh=memfit.integrations.torchtitan.mesh("llama3_8b.toml", ranks=64))

Note [torchtitan]: what torchtitan's `Trainer` does with the configuration is done in the same order with torchtitan's
own functions, and `Trainer.forward_backward_step` runs the forward, the loss and the backward. Left out is what touches
a disk or the screen: tokenizer, data, checkpoints, metrics. The number of valid tokens in the batch, for which the
trainer reduces 8 bytes over the ranks, is taken to be all of them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import inspect
import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.capture import Step, spec, trace
from memfit.errors import InputError
from memfit.integrations.planned_training import check_feasible, describe_plan, logger, resolve_target
from memfit.plans import Plan
from memfit.plans import plan as make_plan
from memfit.solve import SolveOptions
from memfit.tradeoff import LOSS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DIMENSIONS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""The dimensions of torchtitan's mesh, outermost first, and the settings of `[parallelism]` with their degrees."""


def step(config: Any, *, model_args: Any = None) -> Step:
    """Return the training step of a torchtitan job: a `JobConfig`, or the path of its TOML file.

    `model_args` takes the place of those that `model.flavor` names. The step is captured on the ranks of a mesh with
    torchtitan's names (`mesh`), and runs on real ones with a model that `Step.model(mesh)` has built.
    """
    config = _resolve_config(config)
    _refuse_unsupported(config)
    job = _Job(config, model_args)
    shape = (config.training.local_batch_size, config.training.seq_len)
    tokens, labels = spec(shape, torch.int64), spec(shape, torch.int64)
    return Step(job.build, (tokens, labels), optimizer=job.optimizers, run=job.run)


def planned_trainer(
    trainer_class: Any = None,
    *,
    budget: str | int | float | None = None,
    target: Any = None,
    options: SolveOptions | None = None,
) -> Any:
    """Return torchtitan's `Trainer`, or a subclass of it, with a plan in place of its activation checkpointing.

    Every rank captures the step of the job's own configuration before process groups are made, plans it for `budget`
    (what tensors of one rank may take; without it, all that is usable) and applies the plan to the model that
    torchtitan has built and parallelized. `target` is the hardware, the rank's own device unless given. The trainer's
    `plan` says what was decided; `activation_checkpoint.mode` of the configuration is switched off.
    """
    base = _load("torchtitan.train").Trainer if trainer_class is None else trainer_class

    class PlannedTrainer(base):
        """A trainer whose model runs a memfit plan."""

        plan: Plan

        def __init__(self, job_config: Any) -> None:
            self.plan = _plan_job(job_config, budget=budget, target=target, options=options or SolveOptions())
            super().__init__(job_config)
            (model,) = self.model_parts
            self.plan.apply(model, self.optimizers)

    return PlannedTrainer


def _plan_job(config: Any, *, budget: Any, target: Any, options: SolveOptions) -> Plan:
    """Plan the step of a job on as many ranks as torchrun says, and switch the job's own checkpointing off."""
    config = _resolve_config(config)
    if getattr(config.experimental, "custom_import", ""):
        importlib.import_module(config.experimental.custom_import)  # may register the model; the trainer does the same
    mode = config.activation_checkpoint.mode
    if mode != "none":
        config.activation_checkpoint.mode = "none"
        logger.warning(f"memfit: activation_checkpoint.mode {mode!r} is switched off; the plan takes its place")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = _load("torchtitan.tools.utils").device_type
    hardware = resolve_target(target, torch.device(device), ranks)
    captured = trace(step(config), target=hardware, mesh=mesh(config, ranks=ranks))
    if LOSS not in (*options.force, *options.forbid):
        options = replace(options, forbid=(*options.forbid, LOSS))  # the trainer calls it, not `plan.loss`
    plan = make_plan(captured, target=hardware, budget=budget, options=options, progress=False)
    check_feasible(plan)
    if int(os.environ.get("RANK", "0")) == 0:
        logger.warning(describe_plan(plan))
    return plan


def mesh(config: Any, *, ranks: int) -> dict[str, int]:
    """Return the mesh that torchtitan makes of so many ranks, by its names, outermost first; sizes of 1 are left out.

    `data_parallel_shard_degree = -1`, which is the default, are the ranks that the other dimensions leave.
    """
    sizes = _degrees(_resolve_config(config))
    if sizes["dp_shard"] == -1:
        sizes["dp_shard"] = ranks // math.prod(size for name, size in sizes.items() if name != "dp_shard")
    if math.prod(sizes.values()) != ranks:
        named = ", ".join(f"parallelism.{_DIMENSIONS[name]}={size}" for name, size in sizes.items() if size != 1)
        raise InputError(f"{ranks} ranks cannot be divided as the configuration says: {named}")
    return {name: size for name, size in sizes.items() if size > 1} or {"dp_shard": 1}


class _Job:
    """Builds and runs the step of one configuration."""

    def __init__(self, config: Any, model_args: Any) -> None:
        self._config = config
        self._model_args = model_args
        self._spec = _load("torchtitan.protocols.train_spec").get_train_spec(config.model.name)
        if model_args is None and config.model.flavor not in self._spec.model_args:
            known = ", ".join(self._spec.model_args)
            raise InputError(f"model.flavor is {config.model.flavor!r}; {config.model.name} has {known}")
        self._dims: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        """How each model that was built is distributed."""

    def build(self, mesh: DeviceMesh) -> nn.Module:
        """Build and parallelize the model as the trainer does; torchtitan makes its own meshes of the same ranks."""
        config = self._config
        _check_mesh(config, mesh)
        dims = self._parallel_dims(mesh)
        args = self._resolve_model_args()
        utils = _load("torchtitan.tools.utils")
        with torch.device("meta"), utils.set_default_dtype(_dtype(config.training.dtype)):
            model = self._spec.model_cls(args)
        with _device_type(mesh.device_type):
            model = self._spec.parallelize_fn(model, dims, config)
            model.to_empty(device=mesh.device_type)
            with torch.no_grad():
                model.init_weights(buffer_device=None)
        model.train()
        self._dims[model] = dims
        return model

    def optimizers(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Build torchtitan's container of optimizers for the model that these parameters are of."""
        model = next(each for each in self._dims if any(own is parameters[0] for own in each.parameters()))
        return self._spec.build_optimizers_fn([model], self._config.optimizer, self._dims[model])

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        """Run one step in the order of `Trainer.train_step`, and return its loss."""
        trainer = self._trainer(model)
        dims = trainer.parallel_dims
        inputs, labels = batch
        micro_batches = self._micro_batches(dims)
        optimizer.zero_grad()
        valid_tokens = float(labels.numel() * micro_batches * dims.dp_replicate * dims.dp_shard)
        counted = "global_valid_tokens" in inspect.signature(trainer.forward_backward_step).parameters  # since 0.2.2
        more = {"global_valid_tokens": valid_tokens} if counted else {}
        losses = []
        for _ in range(micro_batches):
            loss = trainer.forward_backward_step(input_dict={"input": inputs}, labels=labels, **more)
            losses.append(loss.detach())
        _load("torchtitan.distributed.utils").clip_grad_norm_(
            list(model.parameters()),
            self._config.training.max_norm,
            foreach=True,
            pp_mesh=None,
            ep_enabled=dims.ep_enabled,
        )
        optimizer.step()
        return torch.sum(torch.stack(losses))

    def _trainer(self, model: nn.Module) -> Any:
        """Return a trainer that has what its forward and backward read, without the rest of its constructor."""
        dims = self._dims.get(model)
        if dims is None:
            raise InputError("the step of a torchtitan job runs on a model that its own Step.model(mesh) has built")
        config, spec_ = self._config, self._spec
        utils = _load("torchtitan.distributed.utils")
        kind = dims.world_mesh.device_type
        trainer = object.__new__(_load("torchtitan.train").Trainer)
        trainer.job_config = config
        trainer.parallel_dims = dims
        trainer.train_spec = spec_
        trainer.model_parts = [model]
        trainer.model_args = model.model_args
        trainer.loss_fn = spec_.build_loss_fn(config, parallel_dims=dims)
        trainer.device = torch.device(kind, 0) if kind != "cpu" else torch.device(kind)
        trainer.tokenizer = None
        trainer.train_context = utils.get_train_context(
            dims.tp_enabled and not config.parallelism.disable_loss_parallel
        )
        trainer.maybe_enable_amp = utils.maybe_enable_amp(dims, config.training.mixed_precision_param, kind)
        return trainer

    def _parallel_dims(self, mesh: DeviceMesh) -> Any:
        degrees = _degrees(self._config)
        parallelism = self._config.parallelism
        dims = _load("torchtitan.distributed").ParallelDims(
            **degrees,
            ep=parallelism.expert_parallel_degree,
            etp=parallelism.expert_tensor_parallel_degree,
            world_size=mesh.size(),
        )
        with _device_type(mesh.device_type):
            dims.build_mesh()
        return dims

    def _resolve_model_args(self) -> Any:
        """Return a copy of the model's arguments: torchtitan writes the sequence length into them."""
        given = self._model_args
        args = copy.deepcopy(self._spec.model_args[self._config.model.flavor] if given is None else given)
        args.update_from_config(self._config)
        if getattr(args, "attn_type", "sdpa") != "sdpa":
            raise InputError(
                f"the model has {args.attn_type} attention, whose masks are made of a tokenizer's data; choose a "
                "model.flavor with scaled_dot_product_attention"
            )
        return args

    def _micro_batches(self, dims: Any) -> int:
        """Return over how many micro-batches a step accumulates gradients."""
        training = self._config.training
        at_once = training.local_batch_size * dims.dp_replicate * dims.dp_shard
        whole = training.global_batch_size if training.global_batch_size > 0 else at_once
        if whole % at_once:
            raise InputError(
                f"training.global_batch_size is {whole}; give a multiple of {at_once}, which the ranks take at once"
            )
        return whole // at_once


def _resolve_config(config: Any) -> Any:
    """Return the job configuration, read from its file when a path is given."""
    module = _load("torchtitan.config")
    installed = importlib.metadata.version("torchtitan")
    if not installed.startswith("0.2.") or installed == "0.2.0":
        raise InputError(
            f"torchtitan {installed} is installed, and memfit reads the configurations of 0.2.1 and 0.2.2: "
            "pip install torchtitan==0.2.2"
        )
    if isinstance(config, str | os.PathLike):
        if not os.path.exists(config):
            raise InputError(f"there is no torchtitan configuration at {os.fspath(config)!r}")
        return module.ConfigManager().parse_args(["--job.config_file", os.fspath(config)])
    if not isinstance(config, module.JobConfig):
        raise InputError(
            f"the configuration is a {type(config).__name__}; give a torchtitan.config.JobConfig or the path of its "
            "TOML file"
        )
    return config


def _refuse_unsupported(config: Any) -> None:
    """Refuse settings whose step would not be captured as torchtitan runs it."""
    parallelism, training = config.parallelism, config.training
    refused = {
        "parallelism.pipeline_parallel_degree": parallelism.pipeline_parallel_degree != 1,
        "parallelism.expert_parallel_degree": parallelism.expert_parallel_degree != 1,
        "parallelism.context_parallel_degree": parallelism.context_parallel_degree != 1,
        "compile.enable": config.compile.enable,
        "model.converters": bool(config.model.converters),
        "training.enable_cpu_offload": training.enable_cpu_offload,
        "optimizer.early_step_in_backward": config.optimizer.early_step_in_backward,
        "fault_tolerance.enable": getattr(getattr(config, "fault_tolerance", None), "enable", False),
    }
    found = [name for name, is_set in refused.items() if is_set]
    if found:
        raise InputError(f"a torchtitan step with {', '.join(found)} cannot be captured yet; leave it at its default")


def _degrees(config: Any) -> dict[str, int]:
    return {name: getattr(config.parallelism, setting) for name, setting in _DIMENSIONS.items()}


def _check_mesh(config: Any, given: DeviceMesh) -> None:
    """Compare the mesh of a capture, or of a real run, with the configuration."""
    names = given.mesh_dim_names or ("dp_shard",)
    sizes = {"dp_shard" if name == "dp" else name: given.size(number) for number, name in enumerate(names)}
    wanted = mesh(config, ranks=given.size())
    if {name: size for name, size in sizes.items() if size > 1} != {n: s for n, s in wanted.items() if s > 1}:
        raise InputError(f"the mesh is {sizes}, and the configuration's is {wanted}; give mesh={wanted}")
    if [name for name in sizes if name in wanted] != list(wanted):
        raise InputError(f"torchtitan's mesh has its dimensions in this order: {', '.join(wanted)}")


def _dtype(name: str) -> torch.dtype:
    return _load("torchtitan.config").TORCH_DTYPE_MAP[name]


@contextlib.contextmanager
def _device_type(kind: str) -> Iterator[None]:
    """Let torchtitan make its meshes on this kind of device; it takes the first accelerator of the machine, or cuda."""
    names = vars(_load("torchtitan.distributed.parallel_dims"))
    before, names["device_type"] = names["device_type"], kind
    try:
        yield
    finally:
        names["device_type"] = before


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"torchtitan cannot be imported ({error}); install it with memfit: pip install 'memfit[torchtitan]'"
        ) from error


__all__ = ["mesh", "planned_trainer", "step"]
