"""Remove the tokens that a corpus does not use: what that saves, and what it does to rows with words not all seen.

    python bench/vocabulary.py embedder --model DIR --data ../shared/data   # BoolQ: half of the rows give the tokens
    python bench/vocabulary.py pairs --model ../shared/models/minilm-stsb --data ../shared/data
    python bench/vocabulary.py decoder --model DIR --data ../shared/data [--times]
    python bench/vocabulary.py languages --data ../shared/data [--second TEXT.gz] [--tokenizer DIR]

`languages` cuts a tokenizer of two languages to each of them: one of --tokenizer, or a Unigram trained on both. The
second language is that of the lines of --second. The data has English alone, so it is English in Greek letters by
default, each letter another: a language with the same statistics and no text in common.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scipy.stats
import tokenizers
import torch
from embedding_data import read
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
)

from hies_export import count_flops, count_parameters, export_onnx, trim_vocabulary
from hies_export.checkpoint.sentence import load_sentence
from hies_export.forms.form import Form
from hies_export.forms.time import time
from hies_export.model.copies import parameter_bytes
from hies_export.vocabulary.tokenizer import CutBeside

GREEK = str.maketrans("abcdefghijklmnopqrstuvwxyz", "αβψδεφγηιξκλμνοπχρστθωςχυζ")
BLOCK = 512


def main() -> None:
    """Print one line for each number of a study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=64, help="blocks of 512 tokens that perplexity is of")
    parser.add_argument("--second", type=Path, help="gzipped lines of a second language")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to cut to one language")
    parser.add_argument("--times", action="store_true", help="time decoding in ONNX Runtime, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    STUDIES[options.study](options)


def lines_of(file: Path) -> list[str]:
    """Return the lines of a gzipped text file that are not blank."""
    with gzip.open(file, "rt") as lines:
        return [line.strip() for line in lines if line.strip()]


def compare_cuts(tokenizer: Any, smaller: Any, texts: Sequence[str], kept: Any) -> CutBeside:
    """Compare how two tokenizers cut texts."""
    dense, slim = ([one(text)["input_ids"] for text in texts] for one in (tokenizer, smaller))
    otherwise = sum([kept.rows[token] for token in new] != old for old, new in zip(dense, slim, strict=True))
    return CutBeside(len(texts), otherwise, sum(map(len, dense)), sum(map(len, slim)))


def trimmed(model: Any, tokenizer: Any, texts: Sequence[str], other: Sequence[str]) -> Any:
    """Trim a vocabulary, and print what that saves and how other texts are cut; return the result."""
    found = trim_vocabulary(model, tokenizer, texts)
    own = compare_cuts(tokenizer, found.processor, texts, found.kept)
    cut = compare_cuts(tokenizer, found.processor, other, found.kept)
    sizes = [parameter_bytes(one) / 1e6 for one in (model, found.model)]
    print(f"tokens {found.kept.total:,} -> {len(found.kept.rows):,}; {sizes[0]:.1f} -> {sizes[1]:.1f} MB in memory")
    print(f"its own {own.texts:,} texts: {own.otherwise} cut otherwise; outputs differ by {found.max_abs:.1e} at most")
    print(
        f"other {cut.texts:,} texts: {100 * cut.share_otherwise:.1f} % cut otherwise, "
        f"{100 * (cut.tokens_ratio - 1):.2f} % more tokens"
    )
    return found


def cut_otherwise(tokenizer: Any, smaller: Any, text: str) -> bool:
    """Return whether a text is cut into other tokens."""
    return bool(tokenizer.tokenize(text) != smaller.tokenize(text))


def embedder(options: argparse.Namespace) -> None:
    """Print nDCG@10 of questions that search passages, of all and of those with words that were not all seen."""
    rows = read(options.data / "boolq" / "validation.jsonl.gz")
    seen, judged = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    given = load_sentence(options.model, dtype=torch.float32)
    model, tokenizer = given.model, given.processor
    texts, others = ([row[key] for row in some for key in ("question", "passage")] for some in (seen, judged))
    found = trimmed(model, tokenizer, texts, others)
    questions, passages = [row["question"] for row in judged], list(dict.fromkeys(row["passage"] for row in judged))
    wanted = torch.tensor([passages.index(row["passage"]) for row in judged])
    pairs = ((model, tokenizer), (found.model, found.processor))
    (dense_q, dense_p), (slim_q, slim_p) = ((embed(*one, questions), embed(*one, passages)) for one in pairs)
    unseen = torch.tensor(
        [any(cut_otherwise(tokenizer, found.processor, row[key]) for key in row if key != "label") for row in judged]
    )
    for name, which in (("all rows", torch.ones_like(unseen)), ("rows with unseen words", unseen)):
        before = ndcg(dense_q[which] @ dense_p.T, wanted[which])
        for index, passages_of in (("all re-embedded", slim_p), ("on the old index", dense_p)):
            after = ndcg(slim_q[which] @ passages_of.T, wanted[which])
            print(f"{name} ({int(which.sum()):,}), {index}: nDCG@10 {before:.4f} -> {after:.4f}")
    print(f"cosine of questions with unseen words: {(dense_q * slim_q).sum(-1)[unseen].mean():.4f}")
    german = ["Der Bahnhof ist heute geschlossen.", "Wo kann ich morgen eine Fahrkarte kaufen?"]
    before, after = (embed(*one, german) for one in pairs)
    for text, cosine in zip(german, (before * after).sum(-1).tolist(), strict=True):
        for reads in (tokenizer, found.processor):
            print(f"{text}: {' '.join(reads.tokenize(text))}")
        print(f"cosine of both embeddings: {cosine:.3f}")


def embed(model: Any, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """Embed texts, (texts, width), of length 1."""
    found = []
    with torch.inference_mode():
        for start in range(0, len(texts), 32):
            batch = tokenizer(
                list(texts[start : start + 32]), return_tensors="pt", padding=True, truncation=True, max_length=256
            )
            found.append(model.eval()(**batch).sentence_embedding)
    return torch.nn.functional.normalize(torch.cat(found))


def ndcg(similarity: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the mean nDCG@10 of queries that should find one document each."""
    place = (similarity > similarity.gather(1, wanted[:, None])).sum(-1)
    return (1 / torch.log2(place + 2.0)).where(place < 10, torch.zeros(())).mean().item()


def pairs(options: argparse.Namespace) -> None:
    """Print Spearman of STS-B's test pairs, of all and of those with words that were not all seen in training."""
    seen, judged = (read(options.data / "stsb" / f"{split}.jsonl.gz") for split in ("train", "test"))
    model = AutoModelForSequenceClassification.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts, others = ([row[key] for row in some for key in ("sentence1", "sentence2")] for some in (seen, judged))
    found = trimmed(model, tokenizer, texts, others)
    scores = [score(*one, judged) for one in ((model, tokenizer), (found.model, found.processor))]
    labels = torch.tensor([row["label"] for row in judged])
    unseen = torch.tensor(
        [any(cut_otherwise(tokenizer, found.processor, row[f"sentence{n}"]) for n in (1, 2)) for row in judged]
    )
    for name, which in (("all pairs", torch.ones_like(unseen)), ("pairs with unseen words", unseen)):
        before, after = (100 * scipy.stats.spearmanr(one[which], labels[which]).statistic for one in scores)
        print(f"{name} ({int(which.sum()):,}): Spearman {before:.2f} -> {after:.2f}")


def score(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Return the similarity of each pair, (pairs,)."""
    with torch.inference_mode():
        parts = []
        for start in range(0, len(rows), 32):
            both = ([row[key] for row in rows[start : start + 32]] for key in ("sentence1", "sentence2"))
            parts.append(model.eval()(**tokenizer(*both, return_tensors="pt", padding=True, truncation=True)).logits)
    return torch.cat(parts)[:, 0]


def decoder(options: argparse.Namespace) -> None:
    """Print perplexity per character of WikiText-2, as tokens differ, FLOPs, and decode time in ONNX Runtime."""
    wiki = options.data / "wikitext2"
    texts = [*lines_of(wiki / "validation.txt.gz"), *lines_of(options.data / "gutenberg" / "train.txt.gz")[:60_000]]
    judged = lines_of(wiki / "test.txt.gz")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    found = trimmed(model, tokenizer, texts, judged)
    batch = {"input_ids": torch.zeros(1, 128, dtype=torch.int64)}
    flops = [count_flops(one, batch) for one in (model, found.model)]
    print(f"FLOPs at 1 x 128: {flops[0]:.4g} -> {flops[1]:.4g}, {flops[1] / flops[0]:.3f}")
    counts = [count_parameters(one) for one in (model, found.model)]
    print(f"parameters: {counts[0]:,} -> {counts[1]:,}")
    text = "\n".join(judged)[: 4 * BLOCK * options.blocks]
    for name, one, reads in (("dense", model, tokenizer), ("slim", found.model, found.processor)):
        nats, tokens = nll(one, reads, text)
        print(
            f"{name}: {tokens:,} tokens of {len(text):,} characters, perplexity per token "
            f"{torch.tensor(nats / tokens).exp():.2f}, per character {torch.tensor(nats / len(text)).exp():.4f}"
        )
    if options.times:
        read_by = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
        with tempfile.TemporaryDirectory() as folder:
            forms = [
                Form(name, "onnxruntime-cpu", export_onnx(one, f"{folder}/{name}", batch=read_by).folder)
                for name, one in (("dense", model), ("slim", found.model))
            ]
            timed = time(forms, {(1, 128): [read_by]}, repeats=30, decode=True)
            for slim in timed[1]:
                times = f"{slim.dense_ms:.1f} -> {slim.slim_ms:.1f} ms, {slim.ratio:.3f} of the time"
                print(f"{slim.phase} at 1 x 128: {times}")


def nll(model: Any, tokenizer: Any, text: str) -> tuple[float, int]:
    """Return the nats of a text in blocks, each of which begins anew, and its tokens; a block's first one is given."""
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    total = 0.0
    with torch.inference_mode():
        for block in ids.split(BLOCK):
            if len(block) > 1:
                logits = model.eval()(input_ids=block[None]).logits[0, :-1]
                total += torch.nn.functional.cross_entropy(logits, block[1:], reduction="sum").item()
    return total, len(ids)


def languages(options: argparse.Namespace) -> None:
    """Print what a tokenizer of two languages loses when it is cut to one, and how the other one is read then."""
    english, judged = (lines_of(options.data / "wikitext2" / f"{split}.txt.gz") for split in ("validation", "test"))
    if options.second is None:
        second, other = ([line.lower().translate(GREEK) for line in lines] for lines in (english, judged))
    else:
        lines = lines_of(options.second)
        second, other = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    if options.tokenizer is None:
        tokenizer = unigram([*english, *second])
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    model = BertModel(
        BertConfig(vocab_size=len(tokenizer), hidden_size=384, num_hidden_layers=2, num_attention_heads=6)
    )
    for name, stays, judged_on, goes in (("first", english, judged, other), ("second", second, other, judged)):
        print(f"the {name} language stays:")
        found = trimmed(model, tokenizer, stays, judged_on)
        cut = compare_cuts(tokenizer, found.processor, goes, found.kept)
        print(
            f"the language that went: {100 * cut.share_otherwise:.1f} % of {cut.texts:,} texts cut otherwise, "
            f"{cut.tokens_ratio:.2f} times the tokens"
        )
        text = next(line for line in goes if 30 < len(line) < 60)
        for reads in (tokenizer, found.processor):
            print(f"{text!r}: {' '.join(reads.tokenize(text))}")
        one, two = (
            m.eval()(**t(text, return_tensors="pt", return_token_type_ids=False)).last_hidden_state[0].mean(0)
            for m, t in ((model, tokenizer), (found.model, found.processor))
        )
        print(f"cosine of both mean embeddings of it (random weights): {torch.cosine_similarity(one, two, dim=0):.3f}")
        with tempfile.TemporaryDirectory() as folder:
            found.processor.save_pretrained(folder)
            again = AutoTokenizer.from_pretrained(folder)
            print(f"reloaded alike: {all(again(t) == found.processor(t) for t in judged_on[:200])}")


def unigram(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a Unigram tokenizer of 16,000 tokens."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=16_000, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(texts, trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


STUDIES = {"embedder": embedder, "pairs": pairs, "decoder": decoder, "languages": languages}

if __name__ == "__main__":
    main()
