"""Replace attributes and dictionary entries inside a block, and restore them after it."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by what `wrap` makes of it; other threads go on with the original function.

    So does whoever still holds the replacement after the block, as a module that was imported in it may.
    """
    original = getattr(owner, name)
    with on_this_thread(wrap(original), original) as call, attribute_set(owner, name, call):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute in the block, if there is one; a function for this thread alone."""
    if not hasattr(owner, name):
        yield
        return
    with contextlib.ExitStack() as stack:
        if isinstance(value, types.FunctionType | staticmethod):
            replacement = value.__func__ if isinstance(value, staticmethod) else value
            original = getattr(owner, name)  # a plain function also when it is taken from a class
            call = stack.enter_context(on_this_thread(replacement, original))
            value = staticmethod(call) if isinstance(value, staticmethod) else call
        stack.enter_context(attribute_set(owner, name, value))
        yield


@contextlib.contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the block; afterwards the owner has its own value again, or inherits it as before."""
    own = name in vars(owner)
    original = vars(owner)[name] if own else None  # not `getattr`, which binds a static method of a class
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def on_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield a function that calls the replacement on this thread inside the block, else the original."""
    here: int | None = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == here else original)(*args, **kwargs)

    try:
        yield call
    finally:
        here = None


@contextlib.contextmanager
def patched_item(table: dict[Any, Any], key: Any, value: Any) -> Iterator[None]:
    """Replace an entry of a dictionary inside the block."""
    original = table[key]
    table[key] = value
    try:
        yield
    finally:
        table[key] = original
