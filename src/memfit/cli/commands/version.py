"""`memfit version`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from memfit._version import __version__
from memfit.cli.options import Json
from memfit.cli.output import show_text


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print memfit's version.

    examples:
      memfit version
    """

    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        show_text(json.dumps({"memfit": __version__}) if self.json else __version__)
        return 0
