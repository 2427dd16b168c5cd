"""What an installed memfit must do, run by the Python of the environment that it is installed in.

    python installed_memfit.py          # in an environment that has memfit and what it depends on

It imports nothing from the repository, so that it also runs where there is none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

OPTIONAL = (
    "accelerate",
    "datasets",
    "diffusers",
    "lightning",
    "matplotlib",
    "pandas",
    "peft",
    "plotly",
    "pulp",
    "pwlf",
    "pytest",
    "pytorch_lightning",
    "scipy",
    "timm",
    "torchtitan",
    "torchvision",
    "transformers",
    "trl",
)
"""Libraries that memfit works with or is tested with, and does without."""

COMMAND = ("plan", "gpt2", "--target", "rtx-4090", "--batch", "4", "--seq", "512", "--budget", "3GiB")


def main() -> None:
    """Run the checks; the first that fails ends it."""
    import memfit

    print(f"memfit {memfit.__version__} in {Path(memfit.__file__).parent}")
    check_data()
    with tempfile.TemporaryDirectory() as folder:
        check_command(Path(folder))


def check_data() -> None:
    """Read what is shipped beside the code: devices, shapes, the schema of plans, the page."""
    from memfit.hardware import list_devices
    from memfit.presets import list_shapes

    package = resources.files("memfit")
    assert len(list_devices()) > 20 and len(list_shapes()) > 15
    schema = json.loads((package / "plans" / "plan.schema.json").read_text())
    assert "checkpoint" in json.dumps(schema)
    assert "<html" in (package / "report" / "page" / "assets" / "page.html").read_text()
    assert (package / "py.typed").is_file()
    print(f"{len(list_devices())} devices, {len(list_shapes())} shapes, the schema and the page are there")


def check_command(folder: Path) -> None:
    """Plan a shape with the command, which writes its document and its page and imports no optional library."""
    plan, page = folder / "plan.json", folder / "page.html"
    arguments = [*COMMAND, "-o", str(plan), "--html", str(page)]
    code = (
        "import sys, memfit.cli, memfit.compat, memfit.integrations\n"
        f"status = memfit.cli.main({arguments!r})\n"
        f"print(sorted({{*{OPTIONAL!r}}} & {{*sys.modules}}), file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]", f"imported before it was used: {done.stderr}"
    document = json.loads(plan.read_text())
    assert document["checkpoint"] and document["predicted"]["peak_bytes"] <= document["budget_bytes"]
    assert "<html" in page.read_text()
    print(f"memfit {' '.join(COMMAND)}: {len(document['checkpoint'])} units checkpointed, no optional library imported")


if __name__ == "__main__":
    main()
