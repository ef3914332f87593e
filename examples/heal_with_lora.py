"""Train LoRA adapters on a slim language model with PEFT, and merge them into a slim checkpoint.

    python examples/heal_with_lora.py
    python examples/heal_with_lora.py --slim runs/NAME/slim --train train.txt --judge test.txt --output healed

Without arguments it makes and cuts a tiny LLaMA. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, get_cosine_schedule_with_warmup

from hies_export import PruningRecipe, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slim", type=Path, help="slim folder of a run; by default a tiny one is made")
    parser.add_argument("--train", type=Path, help="text file to train on")
    parser.add_argument("--judge", type=Path, help="text file whose perplexity is printed, before and after")
    parser.add_argument("--output", type=Path, help="where the merged checkpoint is saved")
    parser.add_argument("--length", type=int, default=24, help="tokens in a row (default: 24)")
    parser.add_argument("--rows", type=int, default=8, help="rows in a step (default: 8)")
    parser.add_argument("--steps", type=int, default=60, help="steps of training (default: 60)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (default: 8)")
    parser.add_argument("--rate", type=float, default=5e-3, help="highest learning rate (default: 5e-3)")
    options = parser.parse_args()
    with own_or_tiny(options):
        torch.manual_seed(0)
        slim, tokenizer = load(options.slim), AutoTokenizer.from_pretrained(options.slim)
        train, judge = (blocks(path, tokenizer, options.length) for path in (options.train, options.judge))
        print(f"cut: perplexity {perplexity(slim, judge):.2f}", flush=True)

        adapted = get_peft_model(
            slim, LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
        )
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=options.rate)
        schedule = get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
        adapted.train()
        for _ in range(options.steps):
            rows = train[torch.randint(len(train), (options.rows,))]
            adapted(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        healed = adapted.merge_and_unload().eval()
        healed.save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)
        print(f"healed: perplexity {perplexity(load(options.output), judge):.2f}")


@contextmanager
def own_or_tiny(options: argparse.Namespace) -> Iterator[None]:
    """Fill in the folders and files that were not given: a tiny LLaMA without half of its neurons, and its text."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options.output = options.output or folder / "healed"
        if options.slim is None:
            model, text = tiny.story(folder), folder / "text.txt"
            PruningRecipe(
                model=str(model),
                task="text-generation",
                data={"files": {"train": text}, "text": "text", "max_length": options.length},
                calibration={"split": "train[:60%]", "samples": 16, "batch_size": 8},
                evaluation={"split": "train[60%:]"},
                prune={"criterion": "random", "modules": ["attention", "mlp"], "budget": {"flops": 0.7}},
                measure={"runtimes": ["torch"], "shapes": [[2, 16]], "repeats": 6},
                output=folder / "run",
            ).run()
            options.slim, options.train, options.judge = folder / "run" / "slim", text, text
        yield


def blocks(path: Path, tokenizer: object, length: int) -> torch.Tensor:
    """Return the tokens of a file in rows of one length, (rows, length) int64; the rest is left out."""
    ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    return ids[: len(ids) // length * length].view(-1, length)


@torch.no_grad()
def perplexity(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """Return e to the mean loss of a row's tokens after its first."""
    losses = [model(input_ids=row[None], labels=row[None]).loss for row in rows]
    return torch.stack(losses).mean().exp().item()


if __name__ == "__main__":
    main()
