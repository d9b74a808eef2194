"""Hugging Face Trainer with a LoRA adapter, private. Lines marked "private" are all that differs from the usual script.

A tiny BERT stands for a pretrained one, and short sequences of numbers for sentences, so that nothing is downloaded.
Run it with ``python examples/hf_trainer.py`` (needs transformers and peft).
"""

from __future__ import annotations

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
from torch.utils.data import Dataset
from transformers import (  # pyright: ignore[reportMissingImports]
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
)

from weightclip.integrations import Privacy, PrivateTrainer  # private


class Sentences(Dataset):
    """Sequences of one public length; the class says whether small words are more frequent."""

    def __init__(self, n: int, seed: int) -> None:
        self.ids = torch.randint(3, 100, (n, 12), generator=torch.Generator().manual_seed(seed))
        self.labels = ((self.ids < 50).sum(1) > 6).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i]), "labels": self.labels[i]}


records = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
torch.manual_seed(0)
config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
model = get_peft_model(BertForSequenceClassification(config), lora)

arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), num_train_epochs=3, per_device_train_batch_size=64, gradient_accumulation_steps=4,
    learning_rate=5e-3, use_cpu=True, save_strategy="no", report_to=[], logging_steps=5,
)  # fmt: skip
trainer = PrivateTrainer(  # private
    model=model,  # type: ignore[arg-type]
    args=arguments,
    train_dataset=Sentences(records, seed=0),
    eval_dataset=Sentences(200, seed=1),  # public records
    privacy=Privacy(epsilon=3.0, delta=1e-5),  # private
)
trainer.train()
print("loss on public records", round(trainer.evaluate()["eval_loss"], 3))
print("epsilon", round(trainer.engine.get_epsilon(1e-5), 3))  # type: ignore[union-attr]  # private
merged = model.merge_and_unload()  # an ordinary BERT
