"""A tokenizer that is made here: no file is downloaded."""

from __future__ import annotations

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def make_tokenizer(size: int = 128) -> PreTrainedTokenizerFast:
    """One word for each token, `w0` to the last; the first two are the beginning and the end."""
    words = {f"w{number}": number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w1")
