"""Minutes and memory that models of several sizes take by the formula of `pipeline/price.py`, as a table in Markdown.

    python bench/prices.py [--score 32] [--refit 240] [--length 256] [--flops 0.8]

Paces are billions of multiplications a second in forward passes; see `docs/guides/size.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from hies_export.pipeline.price import Size, in_words

# Name -> hidden size, width of the feed-forward blocks, number of blocks, width of keys, vocabulary, tied head.
SHAPES = {
    "SmolLM2-135M": (576, 1536, 30, 192, 49152, True),
    "Qwen2.5-0.5B": (896, 4864, 24, 128, 151936, True),
    "Llama-3.2-1B": (2048, 8192, 16, 512, 128256, True),
    "Llama-3.2-3B": (3072, 8192, 28, 1024, 128256, True),
    "Llama-3.1-8B": (4096, 14336, 32, 1024, 128256, False),
}
# Machine -> multiplications a second. Only one thread was measured.
MACHINES = {"one thread (AVX2)": 28e9, "a laptop of 8 cores": 150e9}
HELD_OUT = 16


def size_of(args: argparse.Namespace, name: str, itemsize: int) -> Size:
    """Return the size of a run on a model of a shape."""
    hidden, inner, blocks, keys, vocabulary, tied = SHAPES[name]
    of_block = 2 * hidden**2 + 2 * hidden * keys + 3 * hidden * inner
    return Size(
        scored=args.score * args.length,
        refitted=args.refit * args.length,
        judged=HELD_OUT * args.length,
        batch=4 * args.length,
        hidden=hidden,
        widest=inner,
        vocabulary=vocabulary,
        blocks=blocks,
        parameters=blocks * of_block,
        weights=(blocks * of_block + (2 - tied) * hidden * vocabulary) * itemsize,
        itemsize=itemsize,
        left=args.flops,
    )


def rows(args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the table."""
    yield ("", *MACHINES, "memory, float32", "bfloat16")
    for name in SHAPES:
        sizes = [size_of(args, name, itemsize) for itemsize in (4, 2)]
        seconds = sum(sizes[0].work.values()) * sizes[0].parameters
        times = [in_words(seconds / pace) for pace in MACHINES.values()]
        yield (name, *times, *(f"{size.memory / 1e9:.0f} GB" for size in sizes))


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
