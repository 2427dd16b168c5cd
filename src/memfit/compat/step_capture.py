"""What the prototypes' context managers have in common here: a whole step is captured before any of them answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from memfit.capture import Step
from memfit.cost import MODES
from memfit.errors import MissingFeatureError, StateError
from memfit.hardware import Device, Target

if TYPE_CHECKING:
    from typing_extensions import Self

FoundT = TypeVar("FoundT")


class StepCapture(ABC, Generic[FoundT]):
    """Captures its step on entry; a subclass says in `_capture` how, and keeps what it finds in `_found`."""

    _variable = "estimator"
    """What a user would call it in a `with` statement, for the error text."""

    def __init__(self, step: Step | Callable[[], Any] | None = None, *, target: str | Device | Target = "cpu") -> None:
        self.target = target
        self._step = step
        self._found: FoundT | None = None

    def __enter__(self) -> Self:
        if self._found is None:
            if self._step is None:
                name = type(self).__name__
                raise StateError(
                    f"{name} captures a whole step before it can answer, so it cannot watch the code of a `with` block;"
                    f" put that code into a function and write `{name}().run(function)`,"
                    f" or `with {name}(memfit.Step(...)) as {self._variable}`"
                )
            self._capture(self._step)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _captured(self) -> FoundT:
        if self._found is None:
            raise StateError(
                f"{type(self).__name__} has captured nothing yet; enter it with a step, or call run(function)"
            )
        return self._found

    @abstractmethod
    def _capture(self, step: Step | Callable[[], Any]) -> None: ...


class TimedStepCapture(StepCapture[FoundT]):
    """Captures a step and times its ops in one of the prototypes' ways."""

    def __init__(self, step: Step | Callable[[], Any] | None = None, *, target: str | Device | Target = "cpu") -> None:
        super().__init__(step, target=target)
        self._mode = MODES[0]

    def __call__(self, estimate_mode_type: str) -> Self:
        """Choose how ops are timed: `"operator-level-cost-model"` (the default) or `"operator-level-benchmark"`."""
        if estimate_mode_type not in MODES:
            raise MissingFeatureError(
                f"there is no way {estimate_mode_type!r} of timing ops; choose one of {', '.join(map(repr, MODES))}"
            )
        self._mode = estimate_mode_type
        return self

    def run(self, function: Callable[[], Any]) -> Self:
        """Capture and time one step made by a function without arguments, which has its model itself."""
        self._capture(function)
        return self
