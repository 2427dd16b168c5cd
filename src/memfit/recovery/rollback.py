"""Roll back a failed step, with as few copies as possible.

Note [Taking a step back]: forward and backward write to gradients, to buffers and to the generators, the optimizer to
parameters and its state. Before a step the guard copies the generators and the buffers (of those above 1 MiB only the
ones that the first step changed: some kernels write statistics without raising a counter). Of everything else it notes
who is there and its version counter, which torch raises with every write. After a failure

1. parameters and state whose counters are where they were need nothing; state that the failed step created is dropped;
2. gradients that were None are None again; those that the step itself let go stay away; those that it wrote to are
   copied back if steps accumulate (`accumulates=True`), and are a loss otherwise;
3. an optimizer that had begun to write cannot be taken back without a copy. So that it does not begin when it cannot
   end, the guard first allocates what its step will take, and lets it go again (`rehearse`): the allocation that
   would have failed inside fails here. With `copies=True` parameters and state are copied before, and all of them are
   put back, whatever their counters say.

What is lost is named, and then the step is not run again. Optimizers that are not torch's own may write where no
counter sees it (`p.data`): they are taken back with copies only, once they have begun.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memfit.engines import plan_of_model
from memfit.torch_private.autograd import version_of
from memfit.torch_private.distributed_tensors import local_tensor
from memfit.torch_private.modules import buffer_table
from memfit.verify import generators, set_generators

_COUNTED_FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Fused kernels raise no counter of parameters; these raise that of the state's step before they run, which tells that
they ran and not what they wrote to."""

_SMALL_BYTES = 1 << 20


@dataclass(slots=True)
class _Tensor:
    """A tensor before the step: as it is, and a copy if there is one."""

    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None = None

    @property
    def written(self) -> bool:
        return version_of(self.tensor) != self.version

    @property
    def changed(self) -> bool:
        """Whether it was written to, by its counter or by its values."""
        return self.written or (self.copy is not None and not torch.equal(self.copy, self.tensor))

    def put_back(self) -> bool:
        if self.copy is None:
            return False
        with torch.no_grad():
            self.tensor.copy_(self.copy)
        return True


@dataclass(slots=True)
class _Gradient:
    name: str
    parameter: nn.Parameter
    before: weakref.ref[torch.Tensor] | None
    version: int
    copy: torch.Tensor | None


@dataclass(slots=True)
class Before:
    """The tensors and states that a step starts from, to roll back to."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: list[_Tensor] = field(default_factory=list)
    gradients: list[_Gradient] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str, torch.Tensor | None, _Tensor | None]] = field(default_factory=list)
    state: dict[Any, dict[Any, Any]] = field(default_factory=dict)
    states: list[_Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    generators: tuple[Any, ...] = ()
    optimizer_began: bool = False
    copied: bool = False

    def rehearse(self, sizes_bytes: list[int], device: torch.device) -> None:
        """Allocate what the optimizer's step will, and free it: it fails here or not at all."""
        held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes_bytes]
        held.clear()

    def copy_all(self) -> None:
        """Copy what the optimizer writes to."""
        for each in (*self.parameters, *self.states):
            each.copy = each.tensor.detach().clone()
        self.copied = True

    @property
    def held_bytes(self) -> int:
        """What the copies take that are kept while the step runs."""
        copies = [each.copy for each in (*self.parameters, *self.states, *self.gradients)]
        copies += [kept.copy for *_, kept in self.buffers if kept is not None]
        return sum(local_tensor(each).nbytes for each in copies if each is not None)

    def restore(self) -> list[str]:
        """Roll the step back; return the names of what could not be restored."""
        applied = plan_of_model(self.model)
        if applied is not None:
            applied.reset()
        lost = self._restore_optimizer()
        lost += self._restore_gradients()
        lost += self._restore_buffers()
        set_generators(self.generators)
        return lost

    def _restore_optimizer(self) -> list[str]:
        lost = []
        blind = self.optimizer_began and (self.copied or not _counted(self.optimizer))
        for each in (*self.parameters, *self.states):
            if (each.written or blind) and not each.put_back():
                lost.append(each.name)
        state = self.optimizer.state
        for key in [key for key in state if key not in self.state]:
            del state[key]
        for key, values in self.state.items():
            now = state[key]
            if isinstance(now, dict):
                now.clear()
                now.update(values)
            else:
                state[key] = values
        for group, before in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(before)
        return lost

    def _restore_gradients(self) -> list[str]:
        lost = []
        for each in self.gradients:
            before = None if each.before is None else each.before()
            if each.copy is not None:
                each.parameter.grad = each.copy
            elif before is not None and version_of(before) != each.version:
                lost.append(f"gradient of {each.name}")
            else:
                each.parameter.grad = before
        return lost

    def _restore_buffers(self) -> list[str]:
        lost = []
        for module, name, tensor, kept in self.buffers:
            buffer_table(module)[name] = tensor
            if kept is not None and kept.changed and not kept.put_back():
                lost.append(kept.name)
        return lost


class Keeper:
    """Records what each step starts from; earlier steps show which buffers change."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, accumulates: bool) -> None:
        self._model = model
        self._optimizer = optimizer
        self._accumulates = accumulates
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._changing: set[str] | None = None

    def before(self) -> Before:
        """Record what a step starts from now."""
        made = Before(self._model, self._optimizer)
        self._note_buffers(made)
        self._note_optimizer(made)
        stepped = (each for group in self._optimizer.param_groups for each in group["params"])
        named = {id(each): (name, each) for name, each in self._model.named_parameters()}
        for each in stepped:  # shards of units that are whole at the moment are not among the model's parameters
            named.setdefault(id(each), (self._name(each), each))
        for name, parameter in named.values():
            grad = parameter.grad
            made.gradients.append(
                _Gradient(
                    name,
                    parameter,
                    None if grad is None else weakref.ref(grad),
                    0 if grad is None else version_of(grad),
                    grad.detach().clone() if grad is not None and self._accumulates else None,
                )
            )
        made.generators = generators()
        return made

    def learn(self, done: Before) -> None:
        """Learn from the first finished step which buffers steps change."""
        if self._changing is None:
            self._changing = {kept.name for *_, kept in done.buffers if kept is not None and kept.changed}

    def _note_buffers(self, made: Before) -> None:
        for path, module in self._model.named_modules():
            for name, buffer in buffer_table(module).items():
                kept = None
                if buffer is not None:
                    full = f"{path}.{name}" if path else name
                    kept = _Tensor(f"buffer {full}", buffer, version_of(buffer))
                    if self._changing is None or kept.name in self._changing or buffer.nbytes <= _SMALL_BYTES:
                        kept.copy = buffer.detach().clone()
                made.buffers.append((module, name, buffer, kept))

    def _note_optimizer(self, made: Before) -> None:
        optimizer = self._optimizer
        known = set()
        for group in optimizer.param_groups:
            made.groups.append({key: value for key, value in group.items() if key != "params"})
            known.update(map(id, group["params"]))
            made.parameters += [_Tensor(self._name(each), each, version_of(each)) for each in group["params"]]
        made.parameters += [
            _Tensor(name, each, version_of(each))
            for name, each in self._model.named_parameters()
            if id(each) not in known
        ]
        for key, values in optimizer.state.items():
            if not isinstance(values, dict):
                made.state[key] = values
                continue
            made.state[key] = dict(values)
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    made.states.append(_Tensor(f"{name} of {self._name(key)}", value, version_of(value)))

    def _name(self, parameter: Any) -> str:
        return self._names.get(id(parameter), "a parameter of the optimizer")


def _counted(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether every write of this optimizer raises a version counter that the guard looks at."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer).__module__.startswith("torch.optim.") and (not fused or type(optimizer) in _COUNTED_FUSED)
