"""Make a reranker to prune, and its rows: a cross-encoder on questions and passages that an embedding model found.

python bench/reranker.py --model FOLDER --data DIR --out DIR [--start FOLDER] [--seed 0] [--minutes 8]

FOLDER is a sentence-transformers folder. Its encoder becomes the cross-encoder, with a new head of one logit, unless
`--start` names a checkpoint that already has one, which learns faster. DIR has `boolq/validation.jsonl.gz`. One half of
the questions is trained on, by the cross-entropy of the right passage among
itself and hard negatives (of the embedding model's first 20); the other half is kept apart, and shares no passage with
the first. Writes `model/`, and `rows/train.jsonl` and `rows/validation.jsonl`: a line for each candidate, with `query`,
`document`, `group` (the question's number) and `label` (1 for the right passage). The candidates of a question are the
embedding model's first ten, in a random order, with the right passage in the last one's place if it is not among them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from embedding_data import Split, boolq_halves
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

MAX_LENGTH = 192
TRAIN_LENGTH = 128
POOL = 20  # passages that negatives are drawn from
NEGATIVES = 3
CANDIDATES = 10
GROUPS = {"train": 200, "validation": 600}
QUESTIONS = 4  # in a training step
LEARNING_RATE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a checkpoint for pairs with one logit")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8.0, help="of training at most")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    halves = dict(zip(GROUPS, boolq_halves(options.data, options.seed), strict=True))
    embedder = AutoModel.from_pretrained(options.model, dtype=torch.float32).eval()
    found = {name: nearest(embedder, tokenizer, half) for name, half in halves.items()}
    model = AutoModelForSequenceClassification.from_pretrained(
        options.start or options.model, num_labels=1, dtype=torch.float32
    )
    model.config.problem_type = None  # of the checkpoint it started from
    train(model, tokenizer, halves["train"], found["train"], options)
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")
    (options.out / "rows").mkdir(parents=True, exist_ok=True)
    for name, half in halves.items():
        groups = list(candidates(half, found[name], random.Random(options.seed), GROUPS[name]))
        lines = [json.dumps(row) for group in groups for row in group]
        (options.out / "rows" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        right = sum(half.right[number] in found[name][number, :CANDIDATES].tolist() for number in range(len(groups)))
        print(f"{name}: {len(groups)} groups, {len(lines)} rows, right passage among the first ten of {right}")
    judge(model, tokenizer, halves["validation"], groups[:150], found["validation"])


def encoded(tokenizer: Any, *texts: list[str], length: int = MAX_LENGTH) -> Any:
    return tokenizer(*texts, padding=True, truncation=True, max_length=length, return_tensors="pt")


@torch.inference_mode()
def nearest(embedder: Any, tokenizer: Any, half: Split) -> Tensor:
    """Return the numbers of the `POOL` nearest passages of every question, (questions, POOL), nearest first."""

    def embed(texts: list[str]) -> Tensor:
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        result = torch.empty(len(texts), embedder.config.hidden_size)
        for start in range(0, len(order), 32):
            some = order[start : start + 32]
            batch = encoded(tokenizer, [texts[number] for number in some])
            with torch.autocast("cpu", torch.bfloat16):
                tokens = embedder(**batch).last_hidden_state.float()
            mask = batch["attention_mask"].unsqueeze(-1)
            result[some] = torch.nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)
        return result

    return (embed(half.queries) @ embed(half.documents).T).topk(POOL).indices


def train(model: Any, tokenizer: Any, half: Split, found: Tensor, options: argparse.Namespace) -> None:
    """Fine-tune; every step takes `QUESTIONS` questions, each with its right passage and `NEGATIVES` others."""
    draw, began = random.Random(options.seed), time.perf_counter()
    steps = options.epochs * (len(half.queries) // QUESTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    model.train()
    for step, some in zip(range(steps), epochs(len(half.queries), draw), strict=False):
        spent = (time.perf_counter() - began) / (60 * options.minutes)
        if spent >= 1:
            break
        # Warms up for a tenth, then falls to zero by whichever ends first, the steps or the minutes.
        done = max(step / steps, spent)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(done / 0.1 + 0.02, (1 - done) / 0.9, 1.0)
        documents = []
        for number in some:
            others = [place for place in found[number].tolist() if place != half.right[number]]
            documents += [half.right[number], *draw.sample(others, NEGATIVES)]
        queries = [half.queries[number] for number in some for _ in range(1 + NEGATIVES)]
        batch = encoded(tokenizer, queries, [half.documents[place] for place in documents], length=TRAIN_LENGTH)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**batch).logits
        # The right passage stands first.
        groups = logits.float().view(len(some), 1 + NEGATIVES)
        loss = torch.nn.functional.cross_entropy(groups, torch.zeros(len(some), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    model.eval()


def epochs(count: int, draw: random.Random) -> Iterator[list[int]]:
    """Yield numbers below `count` in batches, in a new order in every epoch."""
    while True:
        order = draw.sample(range(count), count)
        yield from (order[start : start + QUESTIONS] for start in range(0, count - QUESTIONS + 1, QUESTIONS))


def candidates(half: Split, found: Tensor, draw: random.Random, groups: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of the candidates of each of the first questions."""
    for number in range(min(groups, len(half.queries))):
        first, right = found[number, :CANDIDATES].tolist(), half.right[number]
        first = first if right in first else [*first[:-1], right]
        draw.shuffle(first)
        query = half.queries[number]
        yield [
            {"query": query, "document": half.documents[place], "group": number, "label": int(place == right)}
            for place in first
        ]


@torch.inference_mode()
def judge(model: Any, tokenizer: Any, half: Split, groups: list[list[dict[str, Any]]], found: Tensor) -> None:
    """Print how often the right passage comes first: by this model, by the embedding model, and by chance."""
    first = 0
    for group in groups:
        batch = encoded(tokenizer, [row["query"] for row in group], [row["document"] for row in group])
        first += group[int(model(**batch).logits[:, 0].argmax())]["label"]
    embedded = sum(half.right[number] == int(found[number, 0]) for number in range(len(groups)))
    print(
        f"right passage first, of {len(groups)} questions: reranker {first / len(groups):.3f}, "
        f"embeddings {embedded / len(groups):.3f}, chance {1 / CANDIDATES}"
    )


if __name__ == "__main__":
    main()
