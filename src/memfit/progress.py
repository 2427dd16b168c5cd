"""What is being done, on the error output: a spinner where that is a terminal, lines elsewhere if asked for."""

from __future__ import annotations

from rich.console import Console


class Progress:
    """Spinner that shows what is being done inside its block; silent without `show`.

    Without a terminal it is silent too, or with `lines`, for what takes minutes, prints a line for each update.
    """

    def __init__(self, doing: str, *, show: bool = True, lines: bool = False) -> None:
        self._doing = doing
        self._console = Console(stderr=True)
        self._spinner = self._console.status(f"{doing} …") if show and self._console.is_terminal else None
        self._lines = lines and show and self._spinner is None

    def add(self, more: str) -> None:
        """Append details to the spinner's text."""
        self.update(f"{self._doing}: {more}")

    def update(self, doing: str) -> None:
        """Update the spinner's text."""
        if self._spinner is not None:
            self._spinner.update(f"{doing} …")
        elif self._lines:
            self._console.print(f"{doing} …", highlight=False)

    def __enter__(self) -> Progress:
        if self._spinner is not None:
            self._spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._spinner is not None:
            self._spinner.stop()
