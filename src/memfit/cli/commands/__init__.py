"""The commands of `memfit`, by name: a module for each, or for some that are alike. Torch is imported when one runs."""

from typing import Any

from memfit.cli.commands.calibrate import Calibrate
from memfit.cli.commands.compare import Compare
from memfit.cli.commands.curve import Curve
from memfit.cli.commands.devices import Devices
from memfit.cli.commands.env import Env
from memfit.cli.commands.estimate import Estimate
from memfit.cli.commands.explain import Explain
from memfit.cli.commands.plan import Plan
from memfit.cli.commands.report import Report
from memfit.cli.commands.search import Search
from memfit.cli.commands.shapes import Shapes
from memfit.cli.commands.verify import Verify
from memfit.cli.commands.version import Version

CLASSES: dict[str, type[Any]] = {
    "plan": Plan,
    "explain": Explain,
    "estimate": Estimate,
    "curve": Curve,
    "search": Search,
    "compare": Compare,
    "verify": Verify,
    "report": Report,
    "shapes": Shapes,
    "devices": Devices,
    "calibrate": Calibrate,
    "env": Env,
    "version": Version,
}
