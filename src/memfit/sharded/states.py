"""What a unit is doing. One state machine for every unit, whose members say where they may lead."""

from __future__ import annotations

from enum import Enum

from memfit.errors import StateError


class State(Enum):
    """The phase of a unit; the value is how errors name it."""

    IDLE = "idle"
    FORWARD = "forward"
    PRE_BACKWARD = "pre-backward"
    BACKWARD = "backward"
    POST_BACKWARD = "post-backward"
    SUMMONED = "summoned"

    def leads_to(self, state: State) -> bool:
        """Whether a unit in this state may go on to that one."""
        return state in _NEXT[self]


# A unit that runs several times in a step goes from a backward to the next one, or to a forward that backward repeats.
# What never sees its inputs' gradients is idle again when the whole backward ends.
_NEXT = {
    State.IDLE: {State.FORWARD, State.PRE_BACKWARD, State.SUMMONED},
    State.FORWARD: {State.IDLE},
    State.PRE_BACKWARD: {State.BACKWARD, State.IDLE},
    State.BACKWARD: {State.PRE_BACKWARD, State.POST_BACKWARD, State.IDLE},
    State.POST_BACKWARD: {State.PRE_BACKWARD, State.FORWARD, State.IDLE},
    State.SUMMONED: {State.IDLE},
}


def check_transition(unit: str, before: State, after: State) -> None:
    """Refuse what cannot follow, with what to do about it."""
    if before.leads_to(after):
        return
    if State.SUMMONED in (before, after):
        raise StateError(
            f"{unit} is {before.value} and cannot become {after.value}: full parameters are for reading and writing "
            "between steps; leave full_parameters() before you run the model, and enter it after the backward"
        )
    raise StateError(
        f"{unit} is {before.value} and cannot become {after.value}; a module that calls itself, or a backward inside "
        "of a forward, cannot be sharded: give the module around it as the unit"
    )
