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
    check_cut,
    collect_statistics,
    compensate_heads,
    count_flops,
    count_parameters,
    export_onnx,
    find_attention,
    load,
    prune_heads,
    save_slim,
    score_heads,
    select_heads,
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

        sites = find_attention(model, batches[0])
        statistics = collect_statistics(model, batches[:2], sites)  # one forward and one backward pass per batch
        scores = score_heads(statistics, criterion="hies", alpha=0.5)
        plan = select_heads(scores, sites, heads=options.heads)
        for name, kept in plan.kept.items():
            print(f"{name}: keeps {list(kept.query)} of {kept.heads}")

        slim = prune_heads(model, plan, sites)
        print(f"cut against masked: {check_cut(model, slim, plan, batches[0]):.1e}")
        compensate_heads(model, slim, plan, sites, batches)  # closed form, no labels, no training
        save_slim(slim, folder / "slim", plan=plan, batch=batches[0], processor=tokenizer)
        exported = export_onnx(load(folder / "slim"), folder / "onnx", batch=batches[0], processor=tokenizer)
        print(f"ONNX against torch: {exported.max_abs:.1e}")
        for what, count in {"parameters": count_parameters, "FLOPs": lambda m: count_flops(m, batches[0])}.items():
            print(f"{what}: {count(model):,} -> {count(slim):,}")


if __name__ == "__main__":
    main()
