"""Write a decoder as one GGUF file, and keep it only if llama.cpp computes with it what torch computes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...checkpoint.beside import copy_documents, write_config
from ...checkpoint.folders import Contents, new_folder, refuse_existing
from ...errors import RecipeError, require_package
from ...model.tokens import synthetic_batch
from ..formats import FORMATS, Export, Format, export_options
from ..runtimes.llamacpp import GGUF_FILE, LlamaCppRuntime, is_installed
from .architecture import Layout, find_layout
from .parity import check_parity, check_same_function
from .tensors import IN_BLOCKS, STORED_AS, named_tensors, rounded_by_rows, stored_bytes, stored_type
from .vocabulary import find_vocabulary

# Tokens of the text on which the model is compared with llama.cpp's computation before anything is written.
CHECKED_TOKENS = 16


def export_gguf(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    tokenizer: Any,
    dtype: str = "float32",
    rows: Sequence[Mapping[str, Any]] = (),
    overwrite: bool = False,
) -> Export:
    """Write a decoder as `folder/model.gguf`, for stock llama.cpp and programs built on it.

    Before anything is written, the logits of llama.cpp's architecture are compared with the model's, both in torch.
    Afterwards, if llama.cpp is installed (see `runtimes/llamacpp.py`), next-token probabilities and the tokens of some
    texts are compared with it. The GPU is not used.

    Args:
        model: A decoder with LLaMA's modules; layers may differ in heads and neurons. It is not changed.
        folder: Where to write; must not exist, unless `overwrite`.
        tokenizer: A tokenizer of transformers with a fast backend. It is not changed.
        dtype: Dtype that matrices are stored in: `float32`, `float16`, `bfloat16`, or blocks of 32 numbers with a
            scale, in 8 bits (`q8_0`) or 4 bits (`q4_0`, with the embedding and the head in `q8_0`). Norms and biases
            stay in float32. A matrix with a row length that is not a multiple of 32 is stored in float16 instead of
            blocks.
        rows: Batches of calibration rows, for `q4_0`: matrices are rounded so that their products on these change
            least; without, to nearest.
        overwrite: Replace an existing folder.

    Returns:
        The file, and the results of the comparison.

    Raises:
        RecipeError: Unknown dtype.
        OutputExistsError: `folder` already exists.
        MissingRuntimeError: The package gguf is not installed.
        UnsupportedModelError: No architecture of llama.cpp computes the same as the model.
        RequestError: llama.cpp does not know the tokenizer.
        NonFiniteError: A weight does not fit into float16.
        ParityError: llama.cpp's outputs differ from torch's beyond the tolerance.
    """
    target = Path(folder)
    if dtype not in STORED_AS:
        raise RecipeError(f"the dtype of a GGUF file must be one of {', '.join(STORED_AS)}, got {dtype!r}")
    refuse_existing(target, overwrite=overwrite)
    require_gguf()
    tokenizer = copy.deepcopy(tokenizer)  # a call changes how it cuts and pads
    layout, vocabulary = _find_header(model, tokenizer)
    if dtype == "q4_0" and rows:
        model = rounded_by_rows(model, rows)
    with new_folder(target, overwrite=overwrite) as staging:
        file = staging / GGUF_FILE
        types = _write(file, model, layout, vocabulary, dtype)
        parity = check_parity(file, model, tokenizer, dtype=dtype) if is_installed() else None
        parity_facts = None if parity is None else asdict(parity)
        size = file.stat().st_size
        write_config(model, staging)  # which tells `bench` what the file computes
        copy_documents(model, staging)
    return Export(
        format="gguf",
        folder=target,
        file=target / GGUF_FILE,
        files=(GGUF_FILE,),
        bytes=size,
        how=export_options("gguf", dtype=dtype),
        max_abs=None if parity is None else parity.max_abs,
        checked_on=None if parity is None else LlamaCppRuntime.name,
        facts={"architecture": layout.architecture, "types": types, "parity": parity_facts},
    )


def check_exportable(model: PreTrainedModel, tokenizer: Any, *, uneven: bool) -> None:
    """Refuse a model or tokenizer that no GGUF file can hold; `uneven` says whether layer sizes may come to differ."""
    require_gguf()
    _find_header(model, copy.deepcopy(tokenizer), uneven=uneven)


def _find_header(model: PreTrainedModel, tokenizer: Any, *, uneven: bool = False) -> tuple[Layout, dict[str, Any]]:
    """Return a model's layout and vocabulary in llama.cpp; refuse a model that llama.cpp computes differently."""
    layout = find_layout(model, uneven=uneven)
    embedding: Any = model.get_input_embeddings()
    vocabulary = find_vocabulary(tokenizer, size=len(embedding.weight))
    ids = synthetic_batch(model, batch=1, sequence=min(CHECKED_TOKENS, layout.positions))["input_ids"].cpu()
    check_same_function(model, layout, ids)
    return layout, vocabulary


def require_gguf() -> None:
    """Refuse, by a MissingRuntimeError, to go on without the package that writes GGUF files."""
    require_package("gguf", who="a GGUF file needs", package="gguf", extra="gguf")


def _write(
    file: Path, model: PreTrainedModel, layout: Layout, vocabulary: Mapping[str, Any], dtype: str
) -> dict[str, int]:
    """Write a GGUF file, with few tensors in memory at a time; return how many tensors are stored in each type."""
    import gguf

    writer = gguf.GGUFWriter(file, layout.architecture, use_temp_file=True)
    types: Counter[str] = Counter()
    try:
        _write_sizes(writer, model, layout, dtype)
        for field, value in vocabulary.items():
            getattr(writer, f"add_{field}")(value)
        for name, tensor in named_tensors(model, layout):
            kind = stored_type(name, tensor, dtype)
            types[kind] += 1
            writer.add_tensor(name, stored_bytes(tensor, kind, name), raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
        if writer.temp_file is not None:
            writer.temp_file.close()
    return dict(types)


def _write_sizes(writer: Any, model: PreTrainedModel, layout: Layout, dtype: str) -> None:
    """Write the sizes of a model: of heads and neurons one number if all layers agree, else one for each layer."""
    import gguf

    embedding: Any = model.get_input_embeddings()
    rows, width = embedding.weight.shape
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if dtype == 'float32' else 'MOSTLY'}_{STORED_AS[dtype]}"])
    if dtype in IN_BLOCKS:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(rows)
    writer.add_context_length(layout.positions)
    writer.add_embedding_length(width)
    writer.add_block_count(len(layout.sizes))
    uniform = len(set(layout.sizes)) == 1
    for add, field in (
        (writer.add_head_count, "heads"),
        (writer.add_head_count_kv, "key_value_heads"),
        (writer.add_feed_forward_length, "neurons"),
    ):
        values = [getattr(sizes, field) for sizes in layout.sizes]
        add(values[0] if uniform else values)
    writer.add_key_length(layout.head_dim)
    writer.add_value_length(layout.head_dim)
    writer.add_rope_dimension_count(layout.head_dim)
    writer.add_rope_freq_base(layout.theta)
    if layout.rope_scale != 1:
        writer.add_rope_scaling_attn_factors(layout.rope_scale)
    writer.add_layer_norm_rms_eps(layout.epsilon)


FORMATS["gguf"] = Format(
    title=Contents.GGUF.value,
    require=require_gguf,
    check=lambda model, how, given, **may: check_exportable(model, given.processor, **may),
    write=lambda model, folder, how, given, **options: export_gguf(
        model, folder, tokenizer=given.processor, dtype=how.dtype, rows=given.rows, **options
    ),
    dtypes=tuple(STORED_AS),
)
