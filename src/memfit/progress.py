"""A spinner on the error output that says what is being done, where that is a terminal."""

from __future__ import annotations

from rich.console import Console


class Progress:
    """Shows what is being done while its block runs; shows nothing without `show`, or where no terminal is."""

    def __init__(self, doing: str, *, show: bool = True) -> None:
        self._doing = doing
        console = Console(stderr=True)
        self._spinner = console.status(f"{doing} …") if show and console.is_terminal else None

    def add(self, more: str) -> None:
        """Show more of it, after what is being done."""
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
