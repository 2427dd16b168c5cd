"""Third-party models at small sizes, built from configuration, each as a training step on real CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit import Step

BATCH, LENGTH, VOCABULARY = 2, 64, 512
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
ADAFACTOR = partial(torch.optim.Adafactor, lr=1e-3)

STEPS: dict[str, Callable[[], Step]] = {}


def zoo(name: str) -> Callable[[Callable[[], Step]], Callable[[], Step]]:
    """Register a step under a name."""

    def register(build: Callable[[], Step]) -> Callable[[], Step]:
        STEPS[name] = build
        return build

    return register


def resize(*, batch: int, length: int) -> None:
    """Build the steps from now on with this batch size and sequence length."""
    global BATCH, LENGTH
    BATCH, LENGTH = batch, length


def tokens(length: int | None = None, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, vocabulary, (BATCH, LENGTH if length is None else length))


def language_batch(**extra: Any) -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone(), **extra}


def image(size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(BATCH, channels, size, size)


def causal_model(kind: str, **options: Any) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


@zoo("llama")
def llama() -> Step:
    return Step(causal_model("llama", **LLAMA), language_batch(), optimizer=ADAMW)


@zoo("llama-bf16-autocast")
def llama_autocast() -> Step:
    model = causal_model("llama", **LLAMA)
    return Step(model, language_batch(), optimizer=ADAMW, autocast=torch.bfloat16, clip_grad_norm=1.0)


@zoo("llama-checkpointed")
def llama_checkpointed() -> Step:
    model = causal_model("llama", **LLAMA)
    model.gradient_checkpointing_enable()
    model.train()
    return Step(model, language_batch(), optimizer=ADAMW)


@zoo("llama-lora")
def llama_lora() -> Step:
    import peft

    model = causal_model("llama", **LLAMA)
    settings = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    return Step(peft.get_peft_model(model, settings), language_batch(), optimizer=ADAMW)


@zoo("llama-accumulated")
def llama_accumulated() -> Step:
    model = causal_model("llama", **LLAMA)
    return Step(model, language_batch(), optimizer=SGD, accumulation_steps=3, clip_grad_norm=1.0)


@zoo("gpt2")
def gpt2() -> Step:
    return Step(
        causal_model("gpt2", n_embd=128, n_layer=3, n_head=4, use_cache=False),
        language_batch(),
        optimizer=ADAMW,
    )


@zoo("gpt2-autocast")
def gpt2_autocast() -> Step:
    model = causal_model("gpt2", n_embd=128, n_layer=3, n_head=4, use_cache=False)
    return Step(model, language_batch(), optimizer=ADAMW, autocast=torch.bfloat16)


@zoo("qwen3-bf16")
def qwen3() -> Step:
    model = causal_model("qwen3", **LLAMA, head_dim=32).to(torch.bfloat16)
    return Step(model, language_batch(), optimizer=ADAMW)


@zoo("mixtral")
def mixtral() -> Step:
    model = causal_model("mixtral", **LLAMA, num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation("grouped_mm")
    return Step(model, language_batch(), optimizer=ADAMW)


@zoo("bert")
def bert() -> Step:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
    )
    batch = language_batch(attention_mask=torch.ones(BATCH, LENGTH, dtype=torch.long))
    return Step(transformers.BertForMaskedLM(config), batch, optimizer=SGD)


@zoo("t5")
def t5() -> Step:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return Step(transformers.T5ForConditionalGeneration(config), language_batch(), optimizer=ADAFACTOR)


@zoo("deberta")
def deberta() -> Step:
    import transformers

    config = transformers.DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=32,
    )
    return Step(transformers.DebertaV2ForMaskedLM(config), language_batch(), optimizer=ADAMW)


@zoo("mamba")
def mamba() -> Step:
    model = causal_model("mamba", hidden_size=64, num_hidden_layers=2, state_size=8, use_cache=False)
    return Step(model, language_batch(), optimizer=ADAMW)


@zoo("whisper")
def whisper() -> Step:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=64,
        max_target_positions=64,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    batch = {"input_features": torch.randn(BATCH, 16, 128), "labels": tokens(32)}
    return Step(transformers.WhisperForConditionalGeneration(config), batch, optimizer=ADAMW)


@zoo("wav2vec2")
def wav2vec2() -> Step:
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    batch = {"input_values": torch.randn(BATCH, 800), "labels": torch.randint(1, 32, (BATCH, 8))}
    return Step(transformers.Wav2Vec2ForCTC(config), batch, optimizer=ADAMW)


@zoo("gru")
def gru() -> Step:
    return Step(Gated(), (torch.randn(8, 24, 32), torch.randint(0, 10, (8,))), optimizer=ADAMW)


@zoo("vit")
def vit() -> Step:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=32,
        patch_size=4,
        hidden_dropout_prob=0.1,
        num_labels=10,
    )
    batch = {"pixel_values": image(), "labels": torch.randint(0, 10, (BATCH,))}
    return Step(transformers.ViTForImageClassification(config), batch, optimizer=ADAMW)


@zoo("swin")
def swin() -> Step:
    import transformers

    config = transformers.SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.1,
    )
    config.num_labels = 10
    batch = {"pixel_values": image(64), "labels": torch.randint(0, 10, (BATCH,))}
    return Step(transformers.SwinForImageClassification(config), batch, optimizer=SGD)


@zoo("convnext")
def convnext() -> Step:
    import transformers

    config = transformers.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, image_size=64)
    config.num_labels = 10
    batch = {"pixel_values": image(64), "labels": torch.randint(0, 10, (BATCH,))}
    return Step(transformers.ConvNextForImageClassification(config), batch, optimizer=ADAMW)


@zoo("clip")
def clip() -> Step:
    import transformers

    common = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={
            **common,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": LENGTH,
            "eos_token_id": 2,
        },
        vision_config={**common, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
    batch = {"input_ids": tokens(), "pixel_values": image(), "return_loss": True}
    return Step(transformers.CLIPModel(config), batch, optimizer=ADAMW)


def noise_loss(output: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output.sample, batch["sample"])


@zoo("unet")
def unet() -> Step:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        dropout=0.1,
    )
    batch = {"sample": image(), "timestep": torch.randint(0, 1000, (BATCH,))}
    return Step(model, batch, loss=noise_loss, optimizer=ADAMW)


@zoo("dit")
def dit() -> Step:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
        dropout=0.1,
    )
    model.train()

    def loss(output: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(output.sample, batch["hidden_states"])

    batch = {
        "hidden_states": image(16, 4),
        "timestep": torch.randint(0, 1000, (BATCH,)),
        "class_labels": torch.randint(0, 10, (BATCH,)),
    }
    return Step(model, batch, loss=loss, optimizer=ADAMW)


@zoo("vae")
def vae() -> Step:
    import diffusers

    model = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(16, 32),
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    )
    model.train()
    batch = {"sample": image(), "sample_posterior": True}
    return Step(model, batch, loss=noise_loss, optimizer=ADAMW)


class Gated(nn.Module):
    """A two-layer GRU that classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(32, 64, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output, _ = self.gru(x)
        return nn.functional.cross_entropy(self.head(output[:, -1]), y)


class Recurrent(nn.Module):
    """A two-layer LSTM that classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output, _ = self.lstm(x)
        return nn.functional.cross_entropy(self.head(output[:, -1]), y)


@zoo("lstm")
def lstm() -> Step:
    return Step(Recurrent(), (torch.randn(8, 24, 32), torch.randint(0, 10, (8,))), optimizer=ADAMW)


class Residual(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.body(x) + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(Residual(16, 32, 1), Residual(32, 64, 2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(self.stem(x))), y)


@zoo("resnet")
def resnet() -> Step:
    return Step(ResidualNetwork(), (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))), optimizer=SGD)


class Perceptron(nn.Module):
    """A plain MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU())
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), y)


@zoo("mlp")
def mlp() -> Step:
    return Step(Perceptron(), (torch.randn(64, 64), torch.randint(0, 10, (64,))), optimizer=SGD)
