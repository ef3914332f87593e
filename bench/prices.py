"""Minutes and memory that models of several sizes take by the formula of `pipeline/price.py`, as a table in Markdown.

    python bench/prices.py [--score 32] [--refit 240] [--length 256] [--flops 0.8]

Paces are billions of multiplications a second in a block's forward pass; see `docs/guides/size.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from hies_export.pipeline.price import DOUBLE, PASSED, Module, Size, in_words

# Name -> hidden size, width of the feed-forward blocks, number of blocks, width of keys, vocabulary, tied head.
SHAPES = {
    "SmolLM2-135M": (576, 1536, 30, 192, 49152, True),
    "Qwen2.5-0.5B": (896, 4864, 24, 128, 151936, True),
    "Llama-3.2-1B": (2048, 8192, 16, 512, 128256, True),
    "Llama-3.2-3B": (3072, 8192, 28, 1024, 128256, True),
    "Llama-3.1-8B": (4096, 14336, 32, 1024, 128256, False),
}
# Machine -> pace, what a multiplication in float64 weighs, and what passing over a number weighs. Only one thread was
# measured. For the cards: a third to half of the float32 of data sheets (35 to 80 TFLOPS; 67), a 64th of it or all of
# it in float64, and 24 bytes for each number that is passed over, at 0.9 and 3 TB/s.
MACHINES = {
    "one thread (AVX2)": (28e9, DOUBLE, PASSED),
    "a laptop of 8 cores": (150e9, DOUBLE, PASSED),
    "a card of 24 GB": (10e12, 64.0, 270.0),
    "a card of 80 GB": (15e12, 1.0, 120.0),
}
HELD_OUT = 16


def size_of(args: argparse.Namespace, name: str, itemsize: int) -> Size:
    """Return the size of a run on a model of a shape."""
    hidden, inner, blocks, keys, vocabulary, tied = SHAPES[name]
    of_block = 2 * hidden**2 + 2 * hidden * keys + 3 * hidden * inner
    share = hidden * vocabulary / (blocks * (of_block + 2 * args.length * hidden))
    return Size(
        scored=args.score * args.length,
        refitted=args.refit * args.length,
        judged=HELD_OUT * args.length,
        batch=4 * args.length,
        length=args.length,
        hidden=hidden,
        vocabulary=vocabulary,
        blocks=((Module(hidden, hidden, 0), Module(inner, hidden, 0.01)),) * blocks,
        parameters=blocks * of_block,
        weights=(blocks * of_block + (2 - tied) * hidden * vocabulary) * itemsize,
        itemsize=itemsize,
        widened=itemsize < 4,  # as on a processor that does not multiply bfloat16
        left=1 - (1 - args.flops) * (1 + share),
    )


def rows(args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the table."""
    yield ("", *MACHINES, "memory, float32", "bfloat16", "on the card")
    for name in SHAPES:
        size = size_of(args, name, 2)
        times = [in_words(sum(size.work(double, passed).values()) / pace) for pace, double, passed in MACHINES.values()]
        memory = [sum(size_of(args, name, itemsize).memory().values()) for itemsize in (4, 2)]
        held = size.memory()
        card = held["weights"] + held.get("block", 0) + held.get("batch", 0) + held.get("slim", 0)
        yield (name, *times, *(f"{number / 1e9:.1f} GB" for number in (*memory, card)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--score", type=int, default=32)
    parser.add_argument("--refit", type=int, default=240)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--flops", type=float, default=0.8)
    head, *others = rows(parser.parse_args())
    for line in (head, ("---",) * len(head), *others):
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
