"""What differs between the step that a plan was made for and another one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from memfit._version import __version__
from memfit.capture import NO_INDEX, Trace
from memfit.errors import InputError
from memfit.paths import folded, module_label, named_differences
from memfit.plans.record import InputRecord, ParameterRecord, TraceRecord
from memfit.plans.trace_record import build_trace_record, strip_build
from memfit.plans.wrappers import named_modules, named_parameters
from memfit.torch_private.wrappers import is_wrapped_by_fsdp1, own_class

if TYPE_CHECKING:
    from memfit.plans.document import Plan

_SHOWN = 12


class PlanMismatch(InputError):
    """A plan for another step; `differences` says in which ways."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__(differences)
        self.differences = tuple(differences)

    def __str__(self) -> str:
        shown = [f"  - {each}" for each in self.differences[:_SHOWN]]
        if len(self.differences) > _SHOWN:
            shown.append(f"  - and {len(self.differences) - _SHOWN} more")
        advice = "plan this step again, or use the plan with the step it was made for"
        return "\n".join(["the plan was made for another step:", *shown, f"what to do: {advice}"])


def find_differences(plan: Plan, trace: Trace) -> list[str]:
    """List in which ways a trace is not the one that the plan was made for; empty when it is."""
    here = build_trace_record(trace)
    found = list(find_record_differences(here, plan.trace))
    if len(found) == 1 and here.ops != plan.trace.ops:
        found += _first_other_op(plan, trace)
    if not found:
        found += _unit_differences(plan, trace)
    if not found and plan.fingerprint != trace.fingerprint:
        found.append(
            "ops have other shapes, arguments or lifetimes in places that a plan does not keep "
            f"(fingerprint {trace.fingerprint[:12]} here and {plan.fingerprint[:12]} in the plan)"
        )
        if plan.memfit != __version__:
            found.append(f"memfit is {__version__} here and {plan.memfit} in the plan")
    return found


def find_model_differences(plan: Plan, model: nn.Module) -> list[str]:
    """List in which ways a model is not the one that the plan was made for; its batch is not known here."""
    found = []
    if strip_build(torch.__version__) != plan.trace.torch:
        found.append(f"torch is {strip_build(torch.__version__)} here and {plan.trace.torch} in the plan")
    kinds = sorted({parameter.device.type for parameter in model.parameters()} - {plan.trace.device_type})
    if kinds:
        planned = f"{plan.trace.device} ({plan.trace.device_type})"
        found.append(
            f"the model is on {' and '.join(kinds)}, and the plan is for {planned}; move the model there, or plan for "
            "the device that it is on"
        )
    if not _flattened(model):
        here = _parameters(model)
        part = _part_of_several(here, plan.trace.parameters)
        if part is not None:
            return [*found, part]
        found += find_parameter_differences(here, plan.trace.parameters)
    modules = dict(named_modules(model))
    for entry in plan.checkpoint:
        module = modules.get(entry.module)
        if module is None:
            found.append(f"unit {entry.unit!r} is not in the model")
        elif not entry.is_loss and (kind := _kind(module)) != entry.kind:
            found.append(f"unit {entry.unit!r} is a {kind} here and a {entry.kind} in the plan")
        if entry.after is not None and entry.after not in modules:
            found.append(f"module {entry.after!r}, after which the loss begins, is not in the model")
    return found


def find_optimizer_differences(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """List in which ways an optimizer is not the one that the plan was made for; it may step a part of the model."""
    found = []
    name, planned = type(optimizer).__name__, plan.trace.optimizer
    if name not in planned.split(", "):
        found.append(f"the optimizer is {name} here and {planned or 'none'} in the plan")
    own = {id(parameter) for parameter in model.parameters()}
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [parameter for parameter in stepped if id(parameter) not in own]
    if others:
        shape = _tensor(others[0].shape, str(others[0].dtype).removeprefix("torch."))
        found.append(
            f"the optimizer steps {len(others)} of {len(stepped)} parameters that are not this model's, first a "
            f"{shape}; make it with {name}(model.parameters(), ...)"
        )
    return found


def _parameters(model: nn.Module) -> tuple[ParameterRecord, ...]:
    names: dict[int, list[str]] = defaultdict(list)
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in named_parameters(model):
        names[id(parameter)].append(name)
        parameters[id(parameter)] = parameter
    return tuple(
        ParameterRecord(
            names=tuple(names[key]),
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=parameter.requires_grad,
        )
        for key, parameter in parameters.items()
    )


def _flattened(model: nn.Module) -> bool:
    """Return whether FSDP1 holds the model's parameters flattened, which hides their shapes."""
    return is_wrapped_by_fsdp1(model)


def _kind(module: nn.Module) -> str:
    """Name a module's class, its own one where `fully_shard` has swapped it."""
    return own_class(module).__name__


def _part_of_several(here: Sequence[ParameterRecord], there: Sequence[ParameterRecord]) -> str | None:
    """Say what to write when a model is one of several that were planned together; None when it is not."""
    mine = {parameter.names[0]: _tensor(parameter.shape, parameter.dtype) for parameter in here}
    planned = {name: _tensor(each.shape, each.dtype) for each in there for name in each.names}
    models = list(dict.fromkeys(name.partition(".")[0] for name in planned))
    if not mine or len(models) == 1:
        return None
    for model in models:
        own = {name.partition(".")[2]: each for name, each in planned.items() if name.partition(".")[0] == model}
        if mine.keys() <= own.keys() and all(own[name] == each for name, each in mine.items()):
            written = ", ".join(f'"{each}": {each}' for each in models)
            return (
                f"this is {model} alone, and the plan is for {', '.join(models)} together; give the whole model, or, "
                "where a training function uses several models, all of them by these names: "
                f"plan.apply(torch.nn.ModuleDict({{{written}}}), optimizer)"
            )
    return None


def find_record_differences(here: TraceRecord, there: TraceRecord) -> Iterator[str]:
    """Yield what is not the same in two records of traces, what explains most first."""
    for name, label in (
        ("torch", "torch"),
        ("device", "the device"),
        ("threads", "the number of threads (torch.set_num_threads, OMP_NUM_THREADS)"),
        ("autocast", "autocast"),
        ("cast", "the cast of parameters"),
        ("optimizer", "the optimizer"),
    ):
        mine, planned = getattr(here, name), getattr(there, name)
        if mine != planned:
            yield f"{label} is {_shown(mine)} here and {_shown(planned)} in the plan"
    yield from find_parameter_differences(here.parameters, there.parameters)
    yield from _input_differences(here.inputs, there.inputs)
    if here.ops != there.ops:
        yield f"the step has {here.ops} ops here and {there.ops} in the plan"


def find_parameter_differences(here: Sequence[ParameterRecord], there: Sequence[ParameterRecord]) -> Iterator[str]:
    """Yield parameters that differ; of layers that are not there at all, only how many there are."""
    mine = {parameter.names[0]: describe_parameter(parameter) for parameter in here}
    planned = {parameter.names[0]: describe_parameter(parameter) for parameter in there}
    found = named_differences(mine, planned)
    for path, count, planned_count in found.counts:
        yield f"{path or 'the model'} has {count} numbered parts with parameters here and {planned_count} in the plan"
    for now, then, names in found.groups:
        label = f"parameter {names[0]}" if len(names) == 1 else f"parameters {folded(names)} ({len(names)})"
        verb = "is" if len(names) == 1 else "are"
        if then is None:
            yield f"{label}, {now}, {verb} here and not in the plan"
        elif now is None:
            yield f"{label}, {then}, {verb} in the plan and not here"
        else:
            yield f"{label} {verb} {now} here and {then} in the plan"


def _unit_differences(plan: Plan, trace: Trace) -> Iterator[str]:
    """Yield units of the plan that are other ops in this trace."""
    calls = {(call.module, call.begin, call.end) for call in trace.calls}
    paths = {module.path for module in trace.modules}
    for entry in plan.checkpoint:
        if not entry.is_loss and (entry.module, entry.begin, entry.end) not in calls:
            yield f"unit {entry.unit!r} is no module call of ops {entry.begin} up to {entry.end} here"
            continue
        for op in sorted((*entry.saved_ops, *entry.recomputed_ops), key=lambda op: op.offset):
            name = trace.ops[entry.begin + op.offset].name
            if name != op.name:
                yield f"op {op.offset} of unit {entry.unit!r} is {name} here and {op.name} in the plan"
                break
    for unit in plan.shard.units if plan.shard is not None else ():
        if unit.module not in paths:
            yield f"module {unit.module!r}, which the plan shards, is not in the model"


def _first_other_op(plan: Plan, trace: Trace) -> Iterator[str]:
    """Yield the first op that differs, of those that the plan keeps: the ops of its units."""
    for entry in plan.checkpoint:
        unit = module_label(entry.unit)
        for op in sorted((*entry.saved_ops, *entry.recomputed_ops), key=lambda op: op.offset):
            index = entry.begin + op.offset
            if index >= len(trace.ops):
                yield f"the step ends here before op {index}, {op.name} of unit {unit!r} in the plan"
                return
            found = trace.ops[index]
            if found.name != op.name:
                where = "outside any module"
                if found.call != NO_INDEX:
                    where = f"in {module_label(trace.calls[found.call].module)}"
                yield (
                    f"the first op that differs, of those that the plan keeps, is op {index}: {found.name} {where} "
                    f"here and {op.name}, op {op.offset} of unit {unit!r}, in the plan"
                )
                return


def _input_differences(here: Sequence[InputRecord], there: Sequence[InputRecord]) -> Iterator[str]:
    if len(here) != len(there):
        yield f"the batch has {len(here)} tensors here and {len(there)} in the plan"
        return
    for index, (mine, planned) in enumerate(zip(here, there, strict=True)):
        if mine != planned:
            now, then = describe_input(mine), describe_input(planned)
            yield f"tensor {index} of the batch is {now} here and {then} in the plan"


def _shown(value: object) -> str:
    return "off" if value is None else str(value)


def _tensor(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def describe_input(record: InputRecord) -> str:
    """Return a tensor of the batch in words: its dtype and shape, or its bytes where no op reads it."""
    if record.shape is None or record.dtype is None:
        return f"{record.bytes} bytes that no op reads"
    return _tensor(record.shape, record.dtype)


def describe_parameter(record: ParameterRecord) -> str:
    """Return a parameter in words: its dtype, shape, whether it is frozen, and its other names."""
    parts = [_tensor(record.shape, record.dtype)]
    if not record.trainable:
        parts.append("frozen")
    if len(record.names) > 1:
        parts.append(f"also called {', '.join(record.names[1:])}")
    return " ".join(parts)
