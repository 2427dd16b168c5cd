"""Optimizers as people write them: state that is computed, factored, quantized, kept in attributes or on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class _PerParameter(Optimizer):
    """Calls `update` for each parameter with its state."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group["lr"])

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class ComputedMomentum(_PerParameter):
    def update(self, p, state, lr):
        before = state.get("m")
        state["m"] = p.grad * 0.1 if before is None else before * 0.9 + p.grad * 0.1
        p.sub_(state["m"], alpha=lr)


class DecayedMomentum(_PerParameter):
    def update(self, p, state, lr):
        decayed = p.grad + 0.1 * p
        if "m" not in state:
            state["m"] = torch.clone(decayed).detach()
        else:
            state["m"].mul_(0.9).add_(decayed)
        p.sub_(state["m"], alpha=lr)


class Lion(_PerParameter):
    def update(self, p, state, lr):
        if not state:
            state["m"] = torch.zeros_like(p, device=p.device)
        p.sub_((state["m"] * 0.9 + p.grad * 0.1).sign_(), alpha=lr)
        state["m"].lerp_(p.grad, 0.01)


class Factored(_PerParameter):
    """As Adafactor: a row and a column of each matrix, the whole of a vector."""

    def update(self, p, state, lr):
        squares = p.grad.square() + 1e-30
        if p.dim() < 2:
            state["v"] = torch.lerp(state["v"], squares, 0.1) if "v" in state else squares
            mean = state["v"]
        else:
            for name, value in (("row", squares.mean(-1)), ("column", squares.mean(-2))):
                state[name] = state[name] * 0.9 + value * 0.1 if name in state else value
            mean = torch.outer(state["row"], state["column"]) / state["row"].mean()
        p.sub_(p.grad * mean.rsqrt() * lr)


class Preconditioned(_PerParameter):
    """As Shampoo: one matrix and its inverse for each dimension."""

    def update(self, p, state, lr):
        gradient = p.grad
        for dim, size in enumerate(p.shape):
            if f"sum{dim}" not in state:
                state[f"sum{dim}"] = 1e-4 * torch.eye(size, device=p.device)
                state[f"inverse{dim}"] = torch.zeros(size, size, device=p.device)
            flat = gradient.transpose(0, dim).reshape(size, -1)
            state[f"sum{dim}"].add_(flat @ flat.t())
            state[f"inverse{dim}"].copy_(torch.linalg.inv(state[f"sum{dim}"]))
            gradient = (state[f"inverse{dim}"] @ flat).reshape(gradient.transpose(0, dim).shape).transpose(0, dim)
        p.sub_(gradient, alpha=lr)


class Lamb(_PerParameter):
    def update(self, p, state, lr):
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        change = state["m"] / (state["v"].sqrt() + 1e-6)
        p.sub_(change * torch.where(change.norm() > 0, p.norm() / change.norm(), 1.0), alpha=lr)


class LambThatReads(_PerParameter):
    def update(self, p, state, lr):
        state["m"] = p.grad.mul(0.1) if "m" not in state else state["m"].mul(0.9).add_(p.grad, alpha=0.1)
        p.sub_(state["m"], alpha=lr * p.norm().item() / max(state["m"].norm().item(), 1e-6))


class EightBit(_PerParameter):
    """Moments as int8 with a scale for each 64, computed again in every step."""

    def update(self, p, state, lr):
        m = p.grad * 0.1
        if "q" in state:
            m += 0.9 * (state["q"].float() * state["scale"][:, None]).flatten()[: p.numel()].view_as(p)
        blocks = torch.nn.functional.pad(m.flatten(), (0, -m.numel() % 64)).view(-1, 64)
        state["scale"] = blocks.abs().amax(1).clamp_min(1e-8) / 127
        state["q"] = (blocks / state["scale"][:, None]).round().to(torch.int8)
        p.sub_(m, alpha=lr)


class ScheduleFree(_PerParameter):
    def update(self, p, state, lr):
        if "z" not in state:
            state["z"] = torch.clone(p, memory_format=torch.preserve_format)
            state["v"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        change = p.grad.div_(state["v"].sqrt().add_(1e-8))
        p.lerp_(end=state["z"], weight=0.1)
        p.add_(change, alpha=-lr)
        state["z"].sub_(change, alpha=lr)


class DoubleWeights(_PerParameter):
    """Keeps the weights in a wider dtype."""

    def update(self, p, state, lr):
        if not state:
            state["weight"] = p.detach().double()
            state["m"] = torch.zeros_like(state["weight"])
        state["m"].mul_(0.9).add_(p.grad)
        state["weight"].sub_(state["m"], alpha=lr)
        p.copy_(state["weight"])


class FreesGradients(_PerParameter):
    def update(self, p, state, lr):
        state["m"] = p.grad * 0.1 if "m" not in state else state["m"] * 0.9 + p.grad
        p.grad = None
        p.sub_(state["m"], alpha=lr)


class NewData(_PerParameter):
    """Gives parameters and gradients new tensors instead of writing into theirs."""

    def update(self, p, state, lr):
        p.grad = p.grad * 2.0
        if "m" not in state:
            state["m"] = torch.full_like(p, 0.5, device=p.device)
        p.data = p.data - lr * (p.grad + state["m"])


class Averaging(_PerParameter):
    """Copies made when the optimizer is made, in a list of its own."""

    def __init__(self, params):
        super().__init__(params)
        self.averages = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p, average in zip(self.param_groups[0]["params"], self.averages, strict=True):
            p.sub_(p.grad, alpha=1e-3)
            average.lerp_(p, 0.01)


class InDict(_PerParameter):
    """Moments in an attribute, by parameter."""

    def __init__(self, params):
        super().__init__(params)
        self.moments = {}

    def update(self, p, state, lr):
        if p not in self.moments:
            self.moments[p] = torch.zeros_like(p)
        p.sub_(self.moments[p].mul_(0.9).add_(p.grad), alpha=lr)


class InList(_PerParameter):
    """Moments in an attribute, computed again in every step."""

    def __init__(self, params):
        super().__init__(params)
        self.moments = None

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        if self.moments is None:
            self.moments = [p.grad * 0.1 for p in parameters]
        else:
            self.moments = [m * 0.9 + p.grad * 0.1 for m, p in zip(self.moments, parameters, strict=True)]
        for p, m in zip(parameters, self.moments, strict=True):
            p.sub_(m, alpha=1e-3)


class AdamWithAverage(torch.optim.AdamW):
    def step(self, closure=None):
        result = super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["average"] = state["average"] * 0.99 + p * 0.01 if "average" in state else p.detach().clone()
        return result


class OnHost(_PerParameter):
    """Keeps momentum and weights in host memory."""

    def update(self, p, state, lr):
        gradient = p.grad.to("cpu")
        if not state:
            state["m"], state["weight"] = gradient * 0.1, p.to("cpu").clone()
        state["m"] = state["m"] * 0.9 + gradient * 0.1
        state["weight"].sub_(state["m"])
        p.copy_(state["weight"])


class Quantized(torch.Tensor):
    """A tensor of int8 codes and scales that passes for one of floats, as torchao's states do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], []

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Quantized:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def zeros(cls, like: torch.Tensor) -> Quantized:
        codes = torch.zeros(like.shape, dtype=torch.int8, device=like.device)
        return cls(codes, torch.zeros(like.shape[0], device=like.device))

    def dequantized(self) -> torch.Tensor:
        return self.codes.float() * self.scale.view(-1, *(1 for _ in self.codes.shape[1:]))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.lerp.Scalar:
            return func(args[0].dequantized(), *args[1:])
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            given = args[1].flatten(1) if args[1].dim() > 1 else args[1][:, None]
            scale = given.abs().amax(1).clamp_min(1e-8) / 127
            args[0].scale.copy_(scale)
            args[0].codes.copy_((given / scale[:, None]).round().view(args[0].shape))
            return args[0]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scale.detach())
        raise NotImplementedError(func)


class QuantizedMomentum(_PerParameter):
    def update(self, p, state, lr):
        if not state:
            state["m"] = Quantized.zeros(p)
        m = state["m"].lerp(p.grad, 0.1)
        state["m"].copy_(m)
        p.sub_(m, alpha=lr)


class SharpnessAware(Optimizer):
    """Two forward and backward passes a step; the old weights are put into the state outside of `step`."""

    def __init__(self, params: Iterable[torch.Tensor], base: Callable[..., Optimizer] = torch.optim.AdamW) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.restore(p, self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    def restore(self, p: torch.Tensor, old: torch.Tensor) -> None:
        p.copy_(old)


class SharpnessAwareThatSwaps(SharpnessAware):
    """Makes the old weights the parameters' data, so that both are one storage from then on."""

    def restore(self, p: torch.Tensor, old: torch.Tensor) -> None:
        p.data = old


HAND_WRITTEN: tuple[type[Optimizer], ...] = (
    ComputedMomentum,
    DecayedMomentum,
    Lion,
    Factored,
    Preconditioned,
    Lamb,
    LambThatReads,
    EightBit,
    QuantizedMomentum,
    ScheduleFree,
    DoubleWeights,
    FreesGradients,
    NewData,
    Averaging,
    InDict,
    InList,
    AdamWithAverage,
)
