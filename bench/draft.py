"""Time greedy decoding with a slim model as the draft of its dense model, beside the dense model alone, in torch.

python bench/draft.py DENSE SLIM... --text FILE [--prompts 8] [--tokens 64]

DENSE is a checkpoint, each SLIM a checkpoint that `hies-export prune` made of it, and FILE has a text a line, gzipped,
whose last lines are the prompts: rows that no model should have been cut on. Decoding is transformers' assisted
generation, past end-of-text tokens. Every prompt is a round that all ways run, in turns.
The first table runs on one thread, the second on all.
  time      of a way, relative to two runs of the dense model alone, with a 95 % interval
  control   one of these two relative to the other
  equal     prompts whose tokens are those of the dense model alone
  accepted  drafted tokens that stay, on average for each run of the dense model
  a         share of the dense model's tokens that are also the slim model's most likely ones
  c         time of a token of the slim model alone, relative to the dense model
  bound     least time that a and c allow for any number of drafted tokens, if the dense model checks them all in the
            time of one (Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding, theorem 3.8)

A second table takes a LLaMA of 56 million random weights, cut like each SLIM. What any of the cuts removes is zero in
the dense model too, so that every drafted token stays: the least time that a draft of this size can take. `time at a`
is that for as many tokens a run of the dense model as the same SLIM gave in the first table. Only fixed numbers of
tokens are drafted there, as the low probabilities of random weights stop a draft at once.
"""

from __future__ import annotations

import argparse
import gzip
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from models import LLAMA_SMALL, cut_like, llama
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from hies_export import PruningPlan
from hies_export.checkpoint.load import load
from hies_export.forms.measure.counts import count_parameters
from hies_export.forms.measure.machine import machine_facts
from hies_export.forms.time import balanced_order, ratio_with_interval

# Tokens that the draft proposes at most, and the probability below which it stops: fixed numbers, and what transformers
# does by itself.
DRAFTED = {"2": (2, 0.0), "4": (4, 0.0), "5": (5, 0.0), "up to 20": (20, 0.4)}
PROMPT_TOKENS = 32


@dataclass
class Way:
    """A way to continue a prompt, and what was measured of it: seconds of every round, and tokens."""

    model: PreTrainedModel
    tokens: int
    draft: PreTrainedModel | None = None
    drafted: tuple[int, float] = (0, 0.0)
    seconds: list[float] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    runs: int = 0

    def __call__(self, prompt: Tensor) -> Tensor:
        """Return the new tokens of a prompt, (1, sequence)."""
        if self.draft is not None:
            settings = self.draft.generation_config
            settings.num_assistant_tokens, settings.assistant_confidence_threshold = self.drafted
            settings.num_assistant_tokens_schedule = "constant"
        mask = torch.ones_like(prompt)
        made = self.model.generate(
            prompt, attention_mask=mask, max_new_tokens=self.tokens, do_sample=False, assistant_model=self.draft
        )
        return made[:, prompt.shape[1] :]

    def measure(self, prompt: Tensor) -> None:
        """Continue a prompt, and keep the seconds, the tokens, and how many runs of the model they took."""

        def count(*_: object) -> None:
            self.runs += 1

        hook = self.model.register_forward_pre_hook(count)
        started = time.perf_counter()
        self.made.append(self(prompt))
        self.seconds.append(time.perf_counter() - started)
        hook.remove()

    @property
    def tokens_a_run(self) -> float:
        return sum(made.shape[1] for made in self.made) / self.runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", type=Path)
    parser.add_argument("slim", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    slim = {folder.name: load(folder) for folder in options.slim}
    prompts = read_prompts(options.dense, options.text, options.prompts)
    kept = measure(options.dense.name, load(options.dense), slim, prompts, options.tokens)
    torch.set_num_threads(threads)
    shape = llama("a LLaMA of random weights", **LLAMA_SMALL)
    torch.manual_seed(0)
    dense = shape.build(device="cpu", dtype=torch.float32)
    batches = [shape.batch(dense, 1, PROMPT_TOKENS) for _ in prompts]
    plans = {folder.name: PruningPlan.from_file(folder / "hies_plan.json") for folder in options.slim}
    for plan in plans.values():
        zero_what_is_cut(dense, cut_like(dense, plan, batches[0]))
    slim = {name: cut_like(dense, plan, batches[0]) for name, plan in plans.items()}
    measure(shape.name, dense, slim, [batch["input_ids"] for batch in batches], options.tokens // 2, kept)
    facts = machine_facts()
    print("\n" + ", ".join(f"{key} {facts[key]}" for key in ("cpu", "threads", "torch", "transformers")))


def read_prompts(folder: Path, file: Path, count: int) -> list[Tensor]:
    """Return the first tokens of the last texts that have so many, each (1, PROMPT_TOKENS)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        texts = [tokenizer(line.strip(), return_tensors="pt")["input_ids"] for line in list(lines)[-20 * count :]]
    return [ids[:, :PROMPT_TOKENS] for ids in texts if ids.shape[1] >= PROMPT_TOKENS][-count:]


def zero_what_is_cut(dense: PreTrainedModel, slim: PreTrainedModel) -> None:
    """Set to zero what the dense model adds by units after the first ones, which a slim model has."""
    for wide, narrow in zip(dense.model.layers, slim.model.layers, strict=True):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            wide.get_submodule(name).weight[:, narrow.get_submodule(name).weight.shape[1] :] = 0


@torch.inference_mode()
def measure(
    name: str,
    dense: PreTrainedModel,
    slim: Mapping[str, PreTrainedModel],
    prompts: Sequence[Tensor],
    tokens: int,
    kept: Mapping[tuple[str, str], float] | None = None,
) -> dict[tuple[str, str], float]:
    """Print the table of a dense model, and return the tokens for each of its runs by slim model and drafted tokens.

    `kept`, as another call returned it, adds the column `time at a`.
    """
    for model in (dense, *slim.values()):
        model.generation_config.eos_token_id = None
    alone, control = Way(dense, tokens), Way(dense, tokens)
    lone = {of: Way(model, tokens) for of, model in slim.items()}
    drafts = {
        (of, how): Way(dense, tokens, model, settings)
        for of, model in slim.items()
        for how, settings in DRAFTED.items()
        if not (kept and settings[1])
    }
    ways = [alone, control, *lone.values(), *drafts.values()]
    for way in ways:
        way(prompts[0])
    for number, prompt in enumerate(prompts):
        for index in balanced_order(len(ways), number):
            ways[index].measure(prompt)

    def ratio(way: Way) -> tuple[float, float, float]:
        return ratio_with_interval([np.array([alone.seconds, control.seconds]).T], [np.array(way.seconds)])

    speed = sum(made.shape[1] for made in alone.made) / sum(alone.seconds)
    again = ratio_with_interval([np.array([alone.seconds]).T], [np.array(control.seconds)])
    print(
        f"\n## {name}, {count_parameters(dense) / 1e6:.2f} M parameters, {len(prompts)} prompts, {tokens} tokens each\n"
    )
    print(f"dense alone {speed:.0f} tokens/s; control {again[0]:.3f} ({again[1]:.3f} to {again[2]:.3f})\n")
    print(
        "| draft | parameters | a | c | bound | drafted | accepted | equal | time |" + (" time at a |" if kept else "")
    )
    print("| --- |" + " --- |" * (9 if kept else 8))
    for of, model in slim.items():
        agreement = np.mean([agreed(model, prompt, made) for prompt, made in zip(prompts, alone.made, strict=True)])
        cost, *_ = ratio(lone[of])
        for how in [how for name, how in drafts if name == of]:
            way = drafts[of, how]
            equal = sum(torch.equal(one, other) for one, other in zip(way.made, alone.made, strict=True))
            found, low, high = ratio(way)
            cells = [
                of,
                f"{count_parameters(model) / count_parameters(dense):.2f}",
                f"{agreement:.2f}",
                f"{cost:.2f}",
                f"{bound(agreement, cost):.2f}",
                how,
                f"{way.tokens_a_run - 1:.2f}",
                f"{equal} of {len(prompts)}",
                f"{found:.2f} ({low:.2f} to {high:.2f})",
            ]
            if kept:
                cells.append(f"{found * way.tokens_a_run / kept[of, how]:.2f}")
            print(f"| {' | '.join(cells)} |")
    return {key: way.tokens_a_run for key, way in drafts.items()}


def agreed(model: PreTrainedModel, prompt: Tensor, made: Tensor) -> float:
    """Return the share of the tokens made after a prompt that are a model's most likely ones."""
    likely = model(torch.cat([prompt, made], dim=1)).logits.argmax(dim=-1)  # (1, sequence)
    return float((likely[:, prompt.shape[1] - 1 : -1] == made).double().mean())


def bound(agreement: float, cost: float, most: int = 20) -> float:
    """Return the least expected time of a token, with the best number of drafted tokens, at most `most`."""
    return min(
        (1 + drafted * cost) / sum(agreement**accepted for accepted in range(drafted + 1))
        for drafted in range(1, most + 1)
    )


if __name__ == "__main__":
    main()
