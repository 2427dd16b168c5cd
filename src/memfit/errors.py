"""The errors that memfit raises, which derive from MemfitError, and the warning that it gives of a plan at work."""


class MemfitError(Exception):
    """Base of every error that memfit raises on purpose."""


class InputError(MemfitError, ValueError):
    """Something the user gave is wrong; the message says what, and what to write instead."""


class StateError(MemfitError, RuntimeError):
    """A call came at a moment when it cannot be answered."""


class MissingFeatureError(MemfitError, NotImplementedError):
    """The request makes sense, and memfit cannot do it yet."""


class OffloadError(MemfitError, OSError):
    """What a plan offloads could not be written to the host, or did not come back as it was written."""


class PlanDrift(UserWarning):
    """Training is not the step that its plan was made for; the message says what differs and what that costs."""
