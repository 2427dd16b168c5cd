"""Capture of one training step: no GPU, no weights, no data, one pass."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from memfit.capture.environment import LOCK, neutral_modes, no_garbage_collection, same_random_state, torch_threads
from memfit.capture.fake_ranks import Mesh, RankLike, building, fake_ranks, resolve_mesh, resolve_rank, takes_mesh
from memfit.capture.optimizers import LeftState
from memfit.capture.parameter_cast import ParameterCast
from memfit.capture.pipelines import Messages
from memfit.capture.random_numbers import held_generators, same_generators
from memfit.capture.random_paths import RandomDraws, largest_path
from memfit.capture.repeated_blocks import NotRepeated, may_have_row
from memfit.capture.restoration import ValueSnapshot, remove_leftovers
from memfit.capture.step import Step, find_step, find_variables
from memfit.capture.step_capture import StepCapture
from memfit.capture.step_checks import check_batch_tensors, check_model, check_parallel_model
from memfit.capture.trace_types import Trace
from memfit.errors import InputError
from memfit.hardware import Device, Target
from memfit.torch_private.modules import modules_by_path
from memfit.torch_private.wrappers import compiled_original, has_compiled_parts


def trace(
    step: Step | Callable[..., Any],
    *,
    target: str | os.PathLike[str] | Device | Target | None = None,
    mesh: Mesh | None = None,
    rank: RankLike | None = None,
    cast: ParameterCast | None = None,
    replicate: bool = True,
) -> Trace:
    """Capture one steady-state step as the target would run it; without a target, as the GPU of this machine would.

    The optimizer's state exists already and gradients start as the step itself leaves them, as in every step but the
    first. The model, the optimizer, the batch and the random state are left as they were found.

    With a `mesh`, such as `{"dp": 8}`, the step is captured as one of so many ranks runs it: its model is a factory
    that wraps it, with `fully_shard`, DistributedDataParallel or FSDP1, and that may take the `DeviceMesh` as an
    argument called `mesh`. It is the first rank unless `rank` says which, by number or by its place in dimensions of
    the mesh, `{"pp": 3}`: ranks of a pipeline hold different stages. With a `cast`, parameters are computed with in
    another dtype than the model's (Note [Cast parameters]). Of equal blocks in a row five run, and the record of the
    others is made from theirs (Note [Repeated blocks]): the same trace, sooner. `replicate=False` runs all of them.
    """
    device = _target(target).device
    threads = device.threads if device.type == "cpu" else None
    with LOCK, no_garbage_collection(), same_random_state(), neutral_modes(), torch_threads(threads):
        if not isinstance(step, Step):
            if isinstance(step, nn.Module):
                raise InputError("trace takes a step, not a model: memfit.trace(memfit.Step(model, batch), target=...)")
            if not callable(step):
                raise InputError(f"trace takes a memfit.Step or a function that runs one, not a {type(step).__name__}")
            step = find_step(step)
        if mesh is not None:
            if cast is not None:
                raise InputError("a step that is captured on a mesh casts its own parameters; leave the cast out")
            sizes = resolve_mesh(mesh)
            return _trace_ranks(step, device, sizes, resolve_rank(rank, sizes))
        if rank is not None:
            raise InputError(f"rank={rank!r} is for a step on several ranks; give their mesh, as in mesh={{'pp': 4}}")
        return _trace_step(step, device, cast, replicate)


def _trace_step(step: Step, device: Device, cast: ParameterCast | None, replicate: bool) -> Trace:
    """Capture a step in a process made neutral; all that this takes is let go of when it returns."""
    notes: list[str] = []
    built = step.build_model()
    model = _eager(built, notes)
    named = modules_by_path(model)
    modules = [module for _, module in named]
    check_model(named)
    check_batch_tensors(step.batch)
    cast = None if cast is None else cast.resolve(model)
    held = held_generators(modules, find_variables(step.run))
    snapshot = ValueSnapshot(modules, (step.run, step.loss, step.optimizer, step.model))
    leftovers: list[weakref.ref[Any]] = []
    replicate = replicate and may_have_row(modules)
    passed_blocks = False  # whether the last pass has left blocks of a row out, so that an error may be due to that

    def captured(
        gradients: dict[str, torch.Tensor], state: LeftState, draws: RandomDraws, replicated: bool
    ) -> StepCapture:
        nonlocal passed_blocks
        capture = StepCapture(
            step,
            model,
            device,
            gradients,
            state,
            draws,
            held,
            compiled=model is not built,
            cast=cast,
            replicate=replicated,
        )
        try:
            capture.run()
        finally:
            passed_blocks = capture.row_capture is not None and capture.row_capture.passed
            leftovers.extend(capture.leftovers)
            snapshot.restore()
        return capture

    def capture_once(draws: RandomDraws, replicated: bool) -> Trace:
        capture = captured({}, {}, draws, replicated)
        if capture.left_gradients or capture.left_state:
            capture = captured(capture.left_gradients, capture.left_state, draws, replicated)
        return capture.result(notes)

    def capture_with(draws: RandomDraws) -> Trace:
        nonlocal replicate
        if replicate:
            try:
                found = capture_once(draws, True)
                if not draws.read:
                    return found
            except Exception as error:
                if not isinstance(error, NotRepeated) and not passed_blocks:
                    raise  # an error of the step, before anything of it was left out
            replicate = False
            draws.read.clear()
        return capture_once(draws, False)

    try:
        with same_generators(held):
            result = largest_path(capture_with)
    except BaseException as error:
        for note in remove_leftovers(leftovers, error):
            warnings.warn(f"{note} (the capture itself failed: {type(error).__name__})", stacklevel=2)
        raise
    return msgspec.structs.replace(result, notes=(*result.notes, *remove_leftovers(leftovers)))


def _trace_ranks(step: Step, device: Device, sizes: dict[str, int], rank: int) -> Trace:
    """Capture a step on ranks that are not there (Note [Parallel capture]). The model is built for it, and goes."""
    on_mesh = getattr(step.model, "step_on_mesh", None)  # of a factory whose step differs from mesh to mesh
    step = step if on_mesh is None else on_mesh(step, sizes)
    if isinstance(step.model, nn.Module):
        raise InputError(
            "a step on several ranks is captured from a function that builds and wraps its model: "
            "memfit.Step(build, batch, ...) where build(mesh) calls fully_shard(module, mesh=mesh)"
        )
    if isinstance(step.optimizer, torch.optim.Optimizer):
        raise InputError(
            "the model is built for the capture: give the optimizer as a class or a function of parameters"
        )
    check_batch_tensors(step.batch)
    held = held_generators((), find_variables(step.run))
    messages = Messages()

    def capture_rank(number: int) -> Trace:
        with fake_ranks(sizes, device, number) as ranks, same_generators(held):

            def captured(draws: RandomDraws) -> Trace:
                notes: list[str] = []
                messages.begin()
                with building(device):
                    built = step.build_model(**({"mesh": ranks} if takes_mesh(step.model) else {}))
                model = _eager(built, notes)
                check_parallel_model(model, device.type)
                capture = StepCapture(
                    step, model, device, {}, {}, draws, held, compiled=model is not built, mesh=sizes, rank=number
                )
                capture.run()
                return capture.result(notes)

            return largest_path(captured)

    with messages.applied():
        return messages.complete(rank, capture_rank)


def _target(target: str | os.PathLike[str] | Device | Target | None) -> Target:
    if target is not None:
        return Target.parse(os.fspath(target) if isinstance(target, os.PathLike) else target)
    if torch.cuda.is_available():
        return Target.parse(torch.cuda.get_device_name())
    raise InputError(
        "name a target: this machine has no GPU. For example target='h100-sxm', 'a100-sxm-80gb', 'rtx-4090' or 'cpu'; "
        "memfit.hardware.list_devices() gives all of them"
    )


def _eager(model: nn.Module, notes: list[str]) -> nn.Module:
    """Return the model behind `torch.compile`, which is captured as its eager original."""
    original = compiled_original(model)
    if has_compiled_parts(model):
        notes.append("the model is compiled; it was captured as its eager original")
    return original if isinstance(original, nn.Module) else model
