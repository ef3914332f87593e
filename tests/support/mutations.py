"""Damage files as disks, editors and attackers do: bytes flipped or lost, values of another type, size or place."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import yaml

# What a value may become.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "1", "nan", "\0", "é\u202e", "../../x", "[bold]"),
    *("a" * 10_000, [], {}, [1], ["x"], [[]], {"x": 1}, [None], [1, 1, 1], "{{ 7 * 7 }}", "<script>", "\n", "1e999"),
)
# Fields that some configs, tokenizers, processors and generation configs have, and others do not.
FOREIGN = (
    *("num_labels", "problem_type", "id2label", "label2id", "pruned_heads", "quantization_config", "text_config"),
    *("rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window", "num_key_value_heads"),
    *("head_dim", "is_decoder", "add_cross_attention", "tie_word_embeddings", "torch_dtype", "dtype", "auto_map"),
    *("attn_implementation", "_attn_implementation", "output_attentions", "return_dict", "use_cache"),
    *("chunk_size_feed_forward", "pooler_output_size", "initializer_range", "sub_configs", "base_model_tp_plan"),
    *("attribute_map", "model_input_names", "padding_side", "truncation_side", "model_max_length", "max_length"),
    *("chat_template", "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens", "vocab_file"),
    *("processor_class", "image_processor_type", "feature_extractor_type", "do_pad", "crop_size", "size_divisor"),
    *("cache_implementation", "num_beams", "do_sample", "temperature", "top_k", "suppress_tokens", "watermark"),
    *("query_expansion", "tokenizer_name_or_path", "processor_kwargs", "model_kwargs", "config_kwargs", "backend"),
    *("use_residual", "module_output_name", "pooling_mode_cls_token", "keep_in_fp32_modules", "requirements"),
)
ODD_TEXT = (
    *(b"\0", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"1e999", b"NaN"),
    b'"\\ud800"',
    *(b"{", b"}", b"]", b",", b":", b'"', b"\\", b"-", b"\n", b"\r", b" ", b"\t", b"#", b"null"),
)
ODD_YAML = (
    *(b"&a ", b"*a", b"!!int x", b"!!python/name:os.system ", b"? ", b"- ", b"1: 2\n", b"x: 2020-99-99\n", b"<<: *a\n"),
    *(b"a: &a [x, x]\nb: &b [*a, *a, *a, *a]\nc: [*b, *b, *b, *b]\n", b"|\n", b"%", b"@", b"`", b"---\n"),
)


def damaged(data: bytes, kind: str, chance: random.Random) -> bytes:
    """Return a damaged copy of a "json", "lines" (of JSON), "safetensors", "yaml" or "bytes" file.

    Of a file of "fields", which is JSON too, only values and names of fields are damaged.
    """
    if kind == "fields":
        return _fields(data, chance)
    by_structure = {"json": _json, "lines": _lines, "safetensors": _safetensors, "yaml": _yaml}.get(kind)
    if by_structure is None or chance.random() < 0.35:
        extra = ODD_YAML if kind == "yaml" else ()
        return _bytes(data, chance, ODD_TEXT + extra)
    return by_structure(data, chance)


def _json(data: bytes, chance: random.Random) -> bytes:
    return json.dumps(_changed(json.loads(data), chance)).encode()


def _fields(data: bytes, chance: random.Random) -> bytes:
    """Return JSON with up to three fields changed, or with a field that other models and tokenizers have."""
    value = json.loads(data)
    if chance.random() < 0.25 and isinstance(value, dict):
        foreign = {chance.choice(FOREIGN): chance.choice(ODD)}
        return json.dumps(value | foreign).encode()
    owners = [owner for owner, _ in _nodes(value) if isinstance(owner, dict)]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if not any(owners):
            break
        owner = chance.choice([owner for owner in owners if owner])
        key = chance.choice(list(owner))
        if chance.random() < 0.2:
            del owner[key]
        else:
            owner[key] = chance.choice((*ODD, [owner[key]], str(owner[key]), {"x": owner[key]}))
    return json.dumps(value).encode()


def _yaml(data: bytes, chance: random.Random) -> bytes:
    try:
        return yaml.safe_dump(_changed(yaml.safe_load(data), chance), sort_keys=False).encode()
    except RecursionError:  # nested deeper than yaml writes
        return b"a: " + b"[" * 3000 + b"]" * 3000


def _lines(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    place = chance.randrange(len(lines))
    other = chance.randrange(4)
    if other == 0:
        lines.insert(chance.randrange(len(lines)), lines[place])
    elif other == 1:
        del lines[place]
    else:
        lines[place] = _json(lines[place], chance) + b"\n"
    return b"".join(lines)


def _safetensors(data: bytes, chance: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    header = _json(header, chance) if chance.random() < 0.8 else _bytes(header, chance, ODD_TEXT)
    length = len(header) if chance.random() < 0.9 else chance.choice((0, 1, 2**40, 2**63, len(header) + 1))
    return length.to_bytes(8, "little") + header + rest


def _bytes(data: bytes, chance: random.Random, odd: tuple[bytes, ...]) -> bytes:
    """Return data with up to three places changed."""
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((1, 1, 1, 4, 20, 200)))
        before, after, new = data[:start], data[end:], chance.choice(odd)
        data = chance.choice(
            (
                *(before, data[start:], before + after, data[:end] + data[start:], before + new + data[start:]),
                *(before + new + after, before + bytes([chance.randrange(256)]) + data[start + 1 :]),
                before + chance.randbytes(5) + after,
            )
        )
    return data


def _changed(value: Any, chance: random.Random) -> Any:
    """Return a copy of a JSON value with up to three nodes changed."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        nodes = list(_nodes(value))
        if not nodes or chance.random() < 0.02:
            return copy.deepcopy(chance.choice(ODD))
        owner, key = chance.choice(nodes)
        _change(owner, key, nodes, chance)
    return value


def _change(owner: Any, key: Any, nodes: list[tuple[Any, Any]], chance: random.Random) -> None:
    kind = chance.randrange(8)
    old = owner[key]
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, dict):
        owner[chance.choice(("x", "", "\0", "a" * 300, f"{key} ", str(key)[:-1]))] = owner.pop(key)
    elif kind == 1:
        owner.insert(key, copy.deepcopy(old))
    elif kind == 2:
        other, place = chance.choice(nodes)
        owner[key] = copy.deepcopy(other[place]) if place in _keys(other) else None
    elif kind == 3:
        owner[key] = chance.choice(([old], {"x": old}, str(old), [old, old]))
    elif kind == 4 and isinstance(old, (int, float)):
        owner[key] = chance.choice((-old, old + 1, old - 1, old * 1000, old / 3, old * 10**20))
    elif kind == 5:
        nested: Any = old
        for _ in range(chance.choice((3, 150, 300))):
            nested = [nested]
        owner[key] = nested
    else:
        owner[key] = copy.deepcopy(chance.choice(ODD))


def _keys(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else range(len(owner))


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield owner and key of every value inside a JSON value."""
    for key in _keys(value) if isinstance(value, (dict, list)) else ():
        yield value, key
        yield from _nodes(value[key])


def damaged_setting(chance: random.Random) -> str:
    """Return what somebody may type after `--set`."""
    names = ("prune.alpha", "prune.budget.heads", "model", "data", "data.files.train", "seed", "prune.x", "", "a.b.c")
    values = ("0.5", "[0.1", "{", "x", "!!int x", "&a [*a]", "2020-99-99", "null", "", "\0", "1e999", "'", "a: b: c")
    text = f"{chance.choice(names)}={chance.choice((*values, '[' * 300))}"
    if chance.random() < 0.5:
        return text
    return _bytes(text.encode(), chance, ODD_TEXT + ODD_YAML).decode(errors="replace")
