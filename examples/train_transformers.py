"""transformers' `Trainer` under a plan: `python examples/train_transformers.py`, with `pip install 'memfit[zoo]'`.

The callback is all that memfit needs: it plans the trainer's own step, applies the plan, and logs the predicted and the
measured peak. Without `--plain` and with it, the losses are the same.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from memfit.integrations.transformers import MemfitCallback

LENGTH, VOCABULARY, STEPS = 128, 512, 6


def rows() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, VOCABULARY, (32, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(*, plain: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=0, eos_token_id=1))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows())  # type: ignore[arg-type]
        if not plain:
            trainer.add_callback(MemfitCallback(budget="30MiB"))
        trainer.train()


if __name__ == "__main__":
    main(plain="--plain" in sys.argv[1:])
