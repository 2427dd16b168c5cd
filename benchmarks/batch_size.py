"""How long it takes to find the largest batch size, beside Lightning's and transformers' own finders.

One model, one limit of memory (RLIMIT_AS, under which torch's allocator fails as on a full machine), four ways to find
the largest batch that trains: Lightning's `Tuner.scale_batch_size` by powers of two and by bisection, transformers'
`auto_find_batch_size` (accelerate's `find_executable_batch_size`), which run steps until one fails or one fits, and
`memfit.integrations.lightning.BatchSizeFinder`, which runs none. Each is a process of its own, interleaved; times are
medians of CPU seconds and count the search alone, without imports and the building of the model. The budget that memfit
is given is the limit, less what a process has mapped before its model is built; on a CPU, where planning takes of the
same memory as training, it plans without the limit. That its answer trains under the limit, and one sample more does
not, is tried.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import memfit.units

WAYS = ("memfit", "lightning-power", "lightning-binsearch", "transformers")
START = 128
"""Where transformers begins, to go down by a tenth each time that a batch does not fit."""
LENGTH, VOCABULARY = 256, 2048


def build(layers: int, hidden: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).train()


class Rows:
    """Rows of tokens, made when they are asked for."""

    def __len__(self) -> int:
        return 4 * START

    def __getitem__(self, number: int) -> dict[str, Any]:
        import torch

        row = torch.full((LENGTH,), number % VOCABULARY)
        return {"input_ids": row, "labels": row}


def make_module(layers: int, hidden: int) -> Any:
    import lightning
    import torch
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = build(layers, hidden), 2

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters())

        def train_dataloader(self) -> Any:
            return DataLoader(Rows(), batch_size=self.batch_size)  # type: ignore[arg-type]

    return Module()


def make_trainer(**arguments: Any) -> Any:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        **arguments,
    )


def make_transformers_trainer(layers: int, hidden: int, size: int) -> Any:
    from transformers import Trainer, TrainingArguments

    return Trainer(
        model=build(layers, hidden),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=size,
            auto_find_batch_size=True,
            max_steps=3,  # as many as Lightning runs for each size
            max_grad_norm=0.0,  # Lightning's do not clip
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
        ),
        train_dataset=Rows(),  # type: ignore[arg-type]
    )


def find(way: str, layers: int, hidden: int, budget: int) -> tuple[int, float]:
    """Find the batch size in this process, under the limit; return it and the seconds."""
    if way == "transformers":
        trainer = make_transformers_trainer(layers, hidden, START)
        begin = time.process_time()
        trainer.train()
        return trainer._train_batch_size, time.process_time() - begin
    module = make_module(layers, hidden)
    if way == "memfit":
        from memfit.integrations.lightning import BatchSizeFinder

        class TimedFinder(BatchSizeFinder):
            def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
                begin = time.process_time()
                super().on_fit_start(trainer, pl_module)
                self.seconds = time.process_time() - begin

        finder = TimedFinder(budget=budget, target="cpu")
        make_trainer(callbacks=[finder], limit_train_batches=0).fit(module)
        assert finder.optimal_batch_size is not None
        return finder.optimal_batch_size, finder.seconds
    from lightning.pytorch.tuner import Tuner

    trainer = make_trainer(max_epochs=1)
    begin = time.process_time()
    found = Tuner(trainer).scale_batch_size(module, mode=way.removeprefix("lightning-"), margin=0.0)
    assert found is not None
    return found, time.process_time() - begin


def child(way: str, layers: int, hidden: int, budget: int, size: int | None) -> None:
    """Load everything, map what a first step maps, set the limit, and find, or try a size."""
    import torch

    from memfit.verify import mapped_bytes

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if way == "transformers":
        make_transformers_trainer(1, 64, 2).train()
    else:
        make_trainer(max_steps=1).fit(make_module(1, 64))
    before = mapped_bytes()
    assert before is not None
    if way != "memfit" or size is not None:
        resource.setrlimit(resource.RLIMIT_AS, (before + budget, resource.RLIM_INFINITY))
    if size is not None:
        module = make_module(layers, hidden)
        module.batch_size = size
        make_trainer(max_steps=3).fit(module)
        print("{}")
        return
    size, seconds = find(way, layers, hidden, budget)
    print(json.dumps({"size": size, "seconds": seconds}))


def run(way: str, arguments: argparse.Namespace, *size: str) -> dict[str, Any] | None:
    """Run a finder in a process of its own; with a size, train with that, which gives None when it does not fit."""
    # Tensors are mapped and unmapped one by one, so that what is mapped is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    words = ["--way", way, "--budget", arguments.budget, "--layers", str(arguments.layers)]
    done = subprocess.run(
        [sys.executable, __file__, *words, "--hidden", str(arguments.hidden), *size],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if size and "DefaultCPUAllocator: can't allocate memory" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def expected(way: str, largest: int) -> int:
    """The answer of a finder that tries certain sizes only, where `largest` is the largest that fits."""
    if way == "lightning-power":
        return 1 << (largest.bit_length() - 1)
    size = START
    while way == "transformers" and size > largest:
        size = int(size * 0.9)
    return size if way == "transformers" else largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="256MiB")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, help="in this process, a batch size to try")
    parser.add_argument("--way", choices=WAYS, help="in this process, as main starts it")
    arguments = parser.parse_args()
    budget = memfit.units.parse_bytes(arguments.budget)
    if arguments.way is not None:
        child(arguments.way, arguments.layers, arguments.hidden, budget, arguments.size)
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            found[way].append(run(way, arguments) or {})
    ours = statistics.median(each["seconds"] for each in found["memfit"])
    (largest,) = {each["size"] for each in found["memfit"]}
    shape = f"Llama of {arguments.layers} layers of {arguments.hidden}, {LENGTH} tokens a row"
    print(f"{shape}, {arguments.budget} of memory")
    print(f"{'finder':<22}{'batch':>6}{'of those it tries':>19}{'CPU s':>9}{'memfit is':>12}")
    for way in WAYS:
        sizes = sorted({each["size"] for each in found[way]})
        seconds = statistics.median(each["seconds"] for each in found[way])
        same = "the same" if sizes == [expected(way, largest)] else f"not {expected(way, largest)}"
        times = "" if way == "memfit" else f"{seconds / ours:.1f}x"
        print(f"{way:<22}{'/'.join(map(str, sizes)):>6}{same:>19}{seconds:>9.1f}{times:>12}")
    for size in (largest, largest + 1):
        trained = run("memfit", arguments, "--size", str(size)) is not None
        print(f"a batch of {size} under the limit: {'trains' if trained else 'out of memory'}")


if __name__ == "__main__":
    main()
