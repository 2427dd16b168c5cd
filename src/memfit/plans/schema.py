"""The JSON Schema of a plan document; `python -m memfit.plans.schema` writes it anew beside this file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memfit.plans.document import Plan

SCHEMA_FILE = Path(__file__).with_name("plan.schema.json")


def schema_text() -> str:
    """Generate the JSON Schema of the document's types."""
    schema = msgspec.json.schema(Plan)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for part in schema["$defs"].values():
        if "description" in part:  # Python 3.13 takes the margin off docstrings, earlier ones do not
            part["description"] = " ".join(part["description"].split())
    return msgspec.json.format(msgspec.json.encode(schema, order="deterministic"), indent=2).decode() + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text())
