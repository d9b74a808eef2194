"""Models people have, in tiny configurations, each with a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.stock.kit import RECORDS, Case, shaken
from torch import Tensor, nn

import weightclip as wc

VOCABULARY, CLASSES = 40, 3


def floats(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(RECORDS, *shape, generator=torch.Generator().manual_seed(seed))


def labels(*shape: int, high: int = CLASSES) -> Tensor:
    return torch.randint(0, high, (RECORDS, *shape), generator=torch.Generator().manual_seed(3))


def text(length: int = 6) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (RECORDS, length), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, 4:], mask[3, 2:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


class RMSNet(nn.Module):
    """An MLP with RMS norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.SiLU(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Encoder(nn.Module):
    """nn.TransformerEncoderLayer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Recurrent(nn.Module):
    """Tokens, a bidirectional LSTM of two layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(VOCABULARY, 5), nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(ids))[0][:, -1])


class UNet(nn.Module):
    """One level down, bilinear upsampling, a skip connection; a class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.norm, self.up, self.out = nn.GroupNorm(2, 6), nn.Conv2d(6, 4, 1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.down(x))
        deep = torch.relu_(self.norm(self.inner(F.max_pool2d(first, 2))))
        wide = F.interpolate(deep, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(torch.cat([first, self.up(wide)], 1)).flatten(2).transpose(1, 2)


class Seq2Seq(nn.Module):
    """Encoder and decoder with learned positions, a padding mask and a causal mask; embedding and head tied."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 8, padding_idx=0), nn.Embedding(6, 8)
        self.model = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        causal = nn.Transformer.generate_square_subsequent_mask(4)
        padding = torch.zeros_like(x[..., 0]).masked_fill(attention_mask == 0, -1e4)
        y = self.model(x, x[:, :4], tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return self.head(y)


class VAE(nn.Module):
    """Returns a tuple; the noise of the code comes with each record."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x[:, :6]).chunk(2, 1)
        return self.decode(mean + torch.exp(0.5 * spread) * x[:, 6:]), mean, spread


def elbo(output: Any, target: Tensor) -> Tensor:
    rebuilt, mean, spread = output
    rest = 0.5 * (spread.exp() + mean.square() - 1 - spread).sum(1)
    return (rebuilt - target).square().sum(1) + rest


class Heads(nn.Module):
    """Two heads in a mapping: a class and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.value = nn.Linear(6, 8), nn.Linear(8, CLASSES), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"kind": self.kind(h), "value": self.value(h).squeeze(1)}


def both_heads(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output["kind"], target.long(), reduction="none") + (output["value"] - target).square()


PLAIN: dict[str, Callable[[], Case]] = {
    "RMSNorm MLP": lambda: Case(RMSNet(), floats(6), labels()),
    "TransformerEncoderLayer": lambda: Case(Encoder(), floats(5, 8), labels()),
    "LSTM": lambda: Case(Recurrent(), text()["input_ids"], labels()),
    "UNet": lambda: Case(UNet(), floats(1, 8, 8), labels(64)),
    "seq2seq": lambda: Case(Seq2Seq(), text(), labels(4, high=VOCABULARY)),
    "VAE": lambda: Case(VAE(), floats(8), floats(6), elbo, wc.PerRecordLoss(elbo)),
    "two heads": lambda: Case(Heads(), floats(6), labels().float(), both_heads, wc.PerRecordLoss(both_heads)),
}


def _text_settings(**more: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 16, "max_position_embeddings": 10, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, **more}  # fmt: skip


def _gpt(lib: Any, **more: Any) -> Any:
    return lib.GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=2, n_head=2, n_positions=10, resid_pdrop=0.0,
                          embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, num_labels=CLASSES,
                          use_cache=False, **more)  # fmt: skip


def bert(lib: Any) -> nn.Module:
    return lib.BertForSequenceClassification(lib.BertConfig(**_text_settings()))


def _lora(lib: Any) -> Case:
    import peft  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["query", "value"]
    )
    return Case(peft.get_peft_model(bert(lib), config), text(), labels())


def _frozen(lib: Any) -> Case:
    model: Any = bert(lib)
    model.bert.requires_grad_(False)
    return Case(model, text(), labels())


def _pictures(size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": floats(3, size, size)}


def _converted(model: nn.Module) -> nn.Module:
    return wc.make_compatible(model, report=None)


HUGGING: dict[str, Callable[[Any], Case]] = {
    "BERT": lambda lib: Case(bert(lib), text(), labels()),
    "DistilBERT": lambda lib: Case(lib.DistilBertForSequenceClassification(lib.DistilBertConfig(
        vocab_size=VOCABULARY, dim=8, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=10, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=CLASSES)), text(), labels()),
    "GPT-2": lambda lib: Case(lib.GPT2ForSequenceClassification(_gpt(lib, pad_token_id=0)), text(), labels()),
    "GPT-2 LM": lambda lib: Case(lib.GPT2LMHeadModel(_gpt(lib)), text(), labels(6, high=VOCABULARY)),
    "Llama": lambda lib: Case(lib.LlamaForCausalLM(lib.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=10, bos_token_id=1, eos_token_id=2, use_cache=False)),
        {"input_ids": text()["input_ids"]}, labels(6, high=VOCABULARY)),
    "ViT": lambda lib: Case(lib.ViTForImageClassification(lib.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)), _pictures(16), labels()),
    "BERT with LoRA": _lora,
    "frozen BERT with a head": _frozen,
    "ConvNeXt": lambda lib: Case(lib.ConvNextForImageClassification(lib.ConvNextConfig(
        hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, num_labels=CLASSES)), _pictures(), labels()),
    "Swin": lambda lib: Case(lib.SwinForImageClassification(lib.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4, num_labels=CLASSES,
        drop_path_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)), _pictures(16), labels()),
    "ResNet": lambda lib: Case(_converted(lib.ResNetForImageClassification(lib.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=CLASSES))),
        _pictures(), labels()),
    "MobileNet": lambda lib: Case(_converted(lib.MobileNetV2ForImageClassification(lib.MobileNetV2Config(
        depth_multiplier=0.1, min_depth=4, image_size=32, num_labels=CLASSES, classifier_dropout_prob=0.0))),
        _pictures(), labels(), double=True),
    "RegNet": lambda lib: Case(_converted(lib.RegNetForImageClassification(lib.RegNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], groups_width=4, num_labels=CLASSES))),
        _pictures(), labels()),
    "T5": lambda lib: Case(lib.T5ForConditionalGeneration(lib.T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        use_cache=False)), {**text(), "decoder_input_ids": text()["input_ids"]}, labels(6, high=VOCABULARY)),
}  # fmt: skip


def made(name: str, lib: Any = None) -> Case:
    """The case of that name, weights of ordinary size."""
    torch.manual_seed(0)
    case = PLAIN[name]() if name in PLAIN else HUGGING[name](lib)
    shaken(case.model)
    if case.double:
        case.model.double()
        case.inputs = {name: value.double() for name, value in case.inputs.items()}
    return case
