"""Remove 70 % of a classifier's heads, then recover the lost accuracy by one epoch with transformers' Trainer.

    python examples/recover_with_trainer.py

For your own model, load it with `hies_export.load("runs/bert-sst2/slim")` and give Trainer your data set and arguments.
Trainer saves a slim checkpoint again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import tiny
from datasets import load_dataset
from transformers import AutoTokenizer, EvalPrediction, Trainer, TrainingArguments

from hies_export import PruningRecipe, load


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of rows whose class is right."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = tiny.sentiment(folder)
        files = {split: str(folder / f"{split}.jsonl") for split in ("train", "validation")}
        report = PruningRecipe(
            model=str(model),
            task="text-classification",
            data={"files": files, "text": "sentence", "label": "label"},
            prune={"criterion": "hies", "alpha": 0.5, "budget": {"heads": 0.7}},
            measure={"runtimes": ["torch"], "shapes": [[8, 16]], "repeats": 6},
            output=folder / "run",
        ).run()
        print(f"accuracy: dense {report.quality['dense']:.3f}, without 70 % of the heads {report.quality['slim']:.3f}")

        slim, tokenizer = load(folder / "run" / "slim"), AutoTokenizer.from_pretrained(folder / "run" / "slim")
        rows = load_dataset("json", data_files=files, cache_dir=str(folder / "cache"))
        rows = rows.map(lambda row: tokenizer(row["sentence"]), remove_columns="sentence")
        arguments = TrainingArguments(
            output_dir=str(folder / "checkpoints"),
            num_train_epochs=1,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        trainer = Trainer(
            slim,
            arguments,
            train_dataset=rows["train"],
            eval_dataset=rows["validation"],
            processing_class=tokenizer,
            compute_metrics=accuracy,
        )
        trainer.train()
        trainer.save_model(str(folder / "recovered"))
        heads = sum(len(module) for module in report.details.head_map.values()) - report.heads["removed"]
        print(f"after one epoch: {trainer.evaluate()['eval_accuracy']:.3f}, with {heads} heads")
        assert type(load(folder / "recovered")) is type(slim)


if __name__ == "__main__":
    main()
