"""Hugging Face Trainer, and PEFT models in it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.integrations.kit import DELTA, PRIVACY, Tokens, weights
from torch import nn

import weightclip as wc

lib = pytest.importorskip("transformers", reason="transformers is missing: pip install weightclip[test-stock]")
pytest.importorskip("accelerate", reason="accelerate is missing: pip install weightclip[test-stock]")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, which warn of each other's releases


def bert() -> nn.Module:
    torch.manual_seed(0)
    return lib.BertForSequenceClassification(lib.BertConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=10, num_labels=2))  # fmt: skip


def trainer(model, tmp_path, privacy=PRIVACY, more=None, **options):
    from weightclip.integrations import PrivateTrainer

    arguments = {"num_train_epochs": 2, "per_device_train_batch_size": 12, "learning_rate": 0.01, "use_cpu": True,
                 "logging_steps": 2, "save_strategy": "no", "report_to": [], "disable_tqdm": True}  # fmt: skip
    arguments = lib.TrainingArguments(output_dir=str(tmp_path), **{**arguments, **(more or {})})
    return PrivateTrainer(model, arguments, train_dataset=Tokens(), privacy=privacy, **options)


def test_train(tmp_path):
    run = trainer(bert(), tmp_path, eval_dataset=Tokens(8))
    start = weights(run.model)
    result = run.train()
    assert run.engine.steps == 8 == run.state.global_step and not torch.equal(weights(run.model), start)
    assert 1.9 < run.engine.get_epsilon(DELTA) <= 2.0
    assert math.isnan(result.training_loss) and "train_loss" not in result.metrics
    logs = [row for row in run.state.log_history if "learning_rate" in row]
    assert len(logs) == 4 and not [
        row for row in run.state.log_history if {"loss", "grad_norm", "train_loss"} & set(row)
    ]
    assert [row["epsilon"] for row in logs] == sorted({row["epsilon"] for row in logs})
    assert logs[-1]["learning_rate"] < logs[0]["learning_rate"]  # one step of the scheduler for each release
    assert run.evaluate()["eval_loss"] > 0  # of records that are public
    run.save_model(str(tmp_path / "saved"))
    again = lib.BertForSequenceClassification.from_pretrained(str(tmp_path / "saved"))
    assert torch.equal(weights(again), weights(run.model))
    with pytest.raises(wc.ContractError, match="trained already"):
        run.train()


def test_accumulated_gradients_are_pieces_of_one_draw(tmp_path):
    run = trainer(bert(), tmp_path, more={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3})
    run.train()
    engine = run.engine
    assert engine.expected_batch_size == 12 and engine.loader.piece_size == 4 and engine.loader.pieces > 3
    assert engine.steps == 8 == run.state.global_step


def test_causal_language_models_and_shown_losses(tmp_path):
    torch.manual_seed(0)
    model = lib.GPT2LMHeadModel(lib.GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=10,
                                               bos_token_id=1, eos_token_id=2))  # fmt: skip

    class Language(Tokens):
        def __getitem__(self, i):
            return {"input_ids": self.ids[i], "labels": self.ids[i]}

    from weightclip.integrations import PrivateTrainer

    arguments = lib.TrainingArguments(output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=12,
                                      logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
                                      use_cpu=True)  # fmt: skip
    run = PrivateTrainer(model, arguments, train_dataset=Language(),
                         privacy=dataclasses.replace(PRIVACY, show_losses=True))  # fmt: skip
    run.train()
    assert isinstance(run.criterion, wc.losses.CausalLM) and run.engine.steps == 2
    assert 1 < run.state.log_history[0]["loss"] < 10


def test_a_merged_adapter_is_the_trained_model(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is missing: pip install weightclip[test-stock]")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"])
    run = trainer(peft.get_peft_model(bert(), config), tmp_path, more={"learning_rate": 0.3})
    start = {n: p.clone() for n, p in run.model.named_parameters()}
    run.train()
    run.engine.detach()
    model = run.model.eval()
    moved = {n.split(".")[-3] for n, p in model.named_parameters() if not torch.equal(p, start[n])}
    assert {"lora_A", "lora_B"} <= moved  # and nothing of the body
    batch = {k: v for k, v in Tokens()[slice(0, 5)].items() if k != "labels"}
    with torch.no_grad():
        want = model(**batch).logits
        with model.disable_adapter():
            assert float((model(**batch).logits - want).abs().max()) > 1e-3
        got = model.merge_and_unload()(**batch).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_not_private_is_refused(tmp_path):
    with pytest.raises(wc.ContractError, match="longest sequence"):
        trainer(bert(), tmp_path, data_collator=lib.DataCollatorWithPadding(tokenizer=None))
    with pytest.raises(wc.ContractError, match="how often it was released"):
        trainer(bert(), tmp_path).train(resume_from_checkpoint=str(tmp_path))
    with pytest.raises(wc.WeightclipError, match="pass criterion="):
        trainer(lib.BertModel(bert().config), tmp_path)
