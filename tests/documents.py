"""Write what memfit answers for many steps, as JSON, and compare two such folders.

    python tests/documents.py write FOLDER
    python tests/documents.py compare FOLDER FOLDER

A change that must not change answers is held to this: write the documents with the code before and after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ZOO = str(Path(__file__).parent / "zoo" / "zoo_models.py")
COMMANDS = {
    "plan-llama3-8b-8-ranks": "plan llama3-8b -t h100-sxm -n 8 --batch 2 --seq 8192",
    "plan-llama3-8b-32-ranks": "plan llama3-8b -t a100-sxm-80gb -n 32 --batch 1 --seq 8192",
    "plan-llama3-8b-64GiB": "plan llama3-8b -t h100-sxm -n 8 --batch 2 --seq 8192 -b 64GiB",
    "plan-llama3-8b-infeasible": "plan llama3-8b -t h100-sxm -n 8 --batch 2 --seq 8192 -b 10GiB",
    "plan-llama3-8b-ddp": "plan llama3.2-1b -t h100-sxm -n 8 --parallel ddp --batch 1 --seq 2048",
    "plan-llama3-70b": "plan llama3-70b -t h100-sxm -n 64 --batch 1 --seq 4096",
    "plan-llama3.2-1b": "plan llama3.2-1b -t rtx-4090 --batch 1 --seq 2048",
    "plan-llama3.2-1b-accumulated": "plan llama3.2-1b -t a100-sxm-80gb --batch 2 --accumulation-steps 4 -b 60GiB",
    "plan-gpt2": "plan gpt2 -t rtx-4090 --batch 16 -b 12GiB",
    "plan-gpt2-cpu": "plan gpt2 -t cpu --batch 2 --seq 256 -b 3GiB",
    "plan-gpt2-xl-levers": "plan gpt2-xl -t a100-sxm-80gb --batch 8 -b 40GiB --optimizer-lever",
    "plan-bert-large": "plan bert-large -t v100-sxm2-32gb --batch 16 -b 14GiB",
    "plan-vit-large": "plan vit-large -t a100-sxm-40gb --batch 64 -b 20GiB",
    "plan-vit-huge-forbid": "plan vit-huge -t h100-sxm --batch 64 -b 40GiB --forbid layers.0",
    "plan-qwen3-8b": "plan qwen3-8b -t h100-sxm -n 8 --batch 1 --seq 4096",
    "plan-mixtral": "plan mixtral-8x7b -t h100-sxm -n 64 --batch 1 --seq 2048",
    "curve-gpt2": "curve gpt2 -t rtx-4090 --batch 16",
    "curve-llama3-8b": "curve llama3-8b -t h100-sxm -n 8 --batch 2 --seq 4096",
    "curve-vit-base-cpu": "curve vit-base -t cpu --batch 2",
    "explain-gpt2": "explain gpt2 -t rtx-4090 --batch 16",
    "explain-llama3-8b": "explain llama3-8b -t h100-sxm -n 8 --batch 2 --seq 8192",
    "explain-bert-base-cpu": "explain bert-base -t cpu --batch 2 --seq 128",
    "explain-vit-large": "explain vit-large -t a100-sxm-40gb --batch 64",
    "search-gpt2": "search gpt2 -t rtx-4090 --over batch",
    "search-llama3.2-1b-seq": "search llama3.2-1b -t h100-sxm --over seq --batch 1",
    **{
        f"plan-zoo-{name}-{target}": f"plan {ZOO}:{name} -t {target} -b {budget}"
        for name, budget in (("llama", "8MiB"), ("t5", "6MiB"), ("unet", "12MiB"), ("lstm", "1KiB"))
        for target in ("cpu", "h100-sxm")
    },
    "explain-zoo-gpt2-autocast": f"explain {ZOO}:gpt2_autocast -t h100-sxm",
    "curve-zoo-mlp": f"curve {ZOO}:mlp -t cpu",
}


def write(folder: Path) -> int:
    """Write every document; the count of commands that failed."""
    folder.mkdir(parents=True, exist_ok=True)

    def run(name: str, command: str) -> bool:
        done = subprocess.run(
            [sys.executable, "-m", "memfit", *command.split(), "--json"], capture_output=True, text=True, check=False
        )
        folder.joinpath(f"{name}.json").write_text(done.stdout)
        good = done.returncode in (0, 3)
        sys.stdout.write(f"{name}: {'written' if good else done.stderr.strip() or done.returncode}\n")
        return good

    with ThreadPoolExecutor(2) as pool:
        return sum(not good for good in pool.map(run, COMMANDS, COMMANDS.values()))


def compare(one: Path, other: Path) -> int:
    """Print every place in which documents differ; the count of documents that do."""
    names = sorted({path.name for path in (*one.glob("*.json"), *other.glob("*.json"))})
    differing = 0
    for name in names:
        pair = [folder / name for folder in (one, other)]
        if not all(path.exists() for path in pair):
            found = ["only in one of the folders"]
        else:
            first, second = (json.loads(path.read_text() or "null") for path in pair)
            found = _differences(first, second, "")
        differing += bool(found)
        sys.stdout.writelines(f"{name}: {each}\n" for each in found[:10])
        if len(found) > 10:
            sys.stdout.write(f"{name}: and {len(found) - 10} more\n")
    sys.stdout.write(f"{len(names) - differing} of {len(names)} documents are equal\n")
    return differing


def _differences(one: Any, other: Any, at: str) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            each
            for key in {**one, **other}
            for each in (
                _differences(one[key], other[key], f"{at}.{key}")
                if key in one and key in other
                else [f"{at}.{key} is only in one of them"]
            )
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for index, pair in pairs for each in _differences(*pair, f"{at}[{index}]")]
    return [] if one == other else [f"{at}: {str(one)[:60]} and {str(other)[:60]}"]


if __name__ == "__main__":
    verb, *folders = sys.argv[1:]
    sys.exit(min(1, {"write": write, "compare": compare}[verb](*map(Path, folders))))
