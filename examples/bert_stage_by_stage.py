"""Prune a BERT in Python, one stage at a time.

    python examples/bert_stage_by_stage.py
    python examples/bert_stage_by_stage.py --model DIR --data rows.jsonl     # your own, with columns sentence and label

Without arguments it trains a tiny model on made-up sentences. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import tiny
import torch
from transformers import AutoTokenizer

from hies_export import (
    PruningPlan,
    collect_statistics,
    compare_cut,
    compensate,
    count_flops,
    count_parameters,
    export_onnx,
    find_attention,
    load,
    prune_units,
    save_slim,
    score_units,
    select_units,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or Hub id of a fine-tuned classifier")
    parser.add_argument("--data", type=Path, help="JSON lines with the columns sentence and label")
    parser.add_argument("--heads", type=float, default=0.3, help="share to remove (default: 0.3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = options.model or tiny.sentiment(folder)
        model, tokenizer = load(path), AutoTokenizer.from_pretrained(path)
        lines = (options.data or folder / "train.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines[:256]]
        batches = []
        for start in range(0, len(rows), 32):
            part = rows[start : start + 32]
            batch = tokenizer([row["sentence"] for row in part], padding=True, truncation=True, return_tensors="pt")
            batches.append({**batch, "labels": torch.tensor([row["label"] for row in part])})

        modules = find_attention(model, batches[0])
        statistics = collect_statistics(model, batches[:2], modules)  # one forward and one backward pass per batch
        scores = score_units(statistics, criterion="hies", alpha=0.5)
        selection = select_units(scores, modules, heads=options.heads)
        for name, kept in selection.items():
            print(f"{name}: keeps {list(kept.units)} of {kept.total}")

        plan = PruningPlan(criterion="hies", alpha=0.5, kept=selection)
        slim = prune_units(model, plan, modules)
        print(f"cut against masked: {compare_cut(model, slim, plan, modules, batches[0]):.1e}")
        compensate(model, slim, plan, modules, batches)  # closed form, no labels, no training
        save_slim(slim, folder / "slim", plan=plan, batch=batches[0], processor=tokenizer)
        exported = export_onnx(load(folder / "slim"), folder / "onnx", batch=batches[0], processor=tokenizer)
        print(f"ONNX against torch: {exported.max_abs:.1e}")
        for what, count in {"parameters": count_parameters, "FLOPs": lambda m: count_flops(m, batches[0])}.items():
            print(f"{what}: {count(model):,} -> {count(slim):,}")


if __name__ == "__main__":
    main()
