"""A spinner on the error output that says what is being done, where that is a terminal."""

from __future__ import annotations

from rich.console import Console


class Progress:
    """Spinner that shows what is being done inside its block; silent without `show` or a terminal."""

    def __init__(self, doing: str, *, show: bool = True) -> None:
        self._doing = doing
        console = Console(stderr=True)
        self._spinner = console.status(f"{doing} …") if show and console.is_terminal else None

    def add(self, more: str) -> None:
        """Append details to the spinner's text."""
        self.update(f"{self._doing}: {more}")

    def update(self, doing: str) -> None:
        """Update the spinner's text."""
        if self._spinner is not None:
            self._spinner.update(f"{doing} …")

    def __enter__(self) -> Progress:
        if self._spinner is not None:
            self._spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._spinner is not None:
            self._spinner.stop()
