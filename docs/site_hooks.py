"""Named by mkdocs.yml: what is said of code that runs while the site is built."""

from __future__ import annotations

from typing import Any

from markdown_exec._internal.formatters import python


def on_startup(**_: Any) -> None:
    """Give blocks the name of a file, as a reader's script would have: memfit prints the lines that hold memory."""
    python._code_block_id = lambda id=None, session=None, title=None: f"{id or session}.py"  # type: ignore[assignment]
