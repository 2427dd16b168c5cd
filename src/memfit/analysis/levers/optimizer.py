"""The optimizer's step done in another way: fused, or one tensor after another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memfit.analysis.levers.case import Case, Effect
from memfit.analysis.levers.lever import Lever
from memfit.capture import Category
from memfit.capture.optimizers import Implementation, implementations_of_step, step_with

_WAYS: dict[Implementation, tuple[str, str]] = {
    "fused": ("fused optimizer", "fused=True"),
    "single": ("optimizer one tensor at a time", "foreach=False"),
}


def optimizer(case: Case) -> Iterator[Lever]:
    """Ways that need less at once. They change nothing before the optimizer's step, which limits what they save."""
    if not case.matters(case.peak_bytes - case.peak_elsewhere_bytes):
        return
    named = case.trace.optimizer.split(", ")[0] or "AdamW"
    if case.step is None or (case.step.run is not None and case.step.optimizer is None):
        yield from _without_temporaries(case, named)
        return
    kinds = implementations_of_step(case.step)
    for kind, (name, option) in _WAYS.items():
        if kind not in kinds:
            continue
        with step_with(case.step, kind) as changed:
            captured = case.captured(changed, what=name)
        if captured is None:
            continue
        if captured.fingerprint == case.trace.fingerprint:
            return  # the step does this already, and the ways after it need no less
        how = f"torch.optim.{named}(model.parameters(), ..., {option})"
        yield case.lever(name, how, case.effect(captured), "captured", option="--optimizer-lever")


def _without_temporaries(case: Case, named: str) -> Iterator[Lever]:
    """What a fused step would need: no temporaries."""
    left = case.timeline.during_bytes - np.where(case.in_optimizer, case.row(Category.TEMPORARY), 0)
    yield case.lever(
        "fused optimizer",
        f"torch.optim.{named}(model.parameters(), ..., fused=True)",
        Effect(peak_bytes=int(left.max()), step_ms=case.step_ms),
        "estimated",
        assumes="a fused step makes no temporaries",
        timed=False,
    )
