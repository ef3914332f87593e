"""Our GGUF files in a stock llama.cpp, compared with torch; and the runtime `llamacpp`.

`scripts/try llamacpp` installs it and runs this; `HIES_NODE_LLAMA_CPP` names the folder that has it.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gguf import (
    CASES,
    LLAMA_SPLIT,
    VOCABULARY,
    byte_level_tokenizer,
    cut,
    llama,
    qwen2,
    sentence_piece_tokenizer,
)
from support.runs import hies
from support.stories import stories
from support.tiers import table_of
from transformers import PreTrainedModel

from hies_export import export_gguf, load_runtime
from hies_export.errors import DataError, ExportError, MissingRuntimeError, ParityError
from hies_export.forms.gguf import parity
from hies_export.forms.gguf.vocabulary import _SPLITS
from hies_export.forms.machine import machine_facts
from hies_export.forms.runtimes import llamacpp
from hies_export.forms.runtimes.llamacpp import LlamaCppRuntime, is_installed

pytest.importorskip("gguf", reason='no gguf: pip install "hies-export[gguf]"')
pytestmark = pytest.mark.llamacpp
here = pytest.mark.skipif(not is_installed(), reason="no node-llama-cpp: run scripts/try llamacpp")

NEW_TOKENS = 64


table = table_of("HIES_LLAMACPP_TABLE", "model", "architecture", "dtype", "choices equal", "probabilities differ by")


def compare(model: PreTrainedModel, file: Path, prompt: list[int]) -> tuple[int, float, LlamaCppRuntime]:
    """Return in how many of torch's greedy steps both choose the same, and how far the first probabilities differ."""
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **options)
        wanted = model(tokens).logits[0].softmax(-1)
    runtime = LlamaCppRuntime(file, threads=1)
    found = runtime.prediction({"input_ids": tokens})[0].exp()
    last = len(prompt) - 1
    equal = (found[last:-1].argmax(-1) == tokens[0, len(prompt) :]).sum()
    return int(equal), float((found - wanted)[last].abs().max()), runtime


@here
@pytest.mark.parametrize(("how", "architecture"), [("dense", "llama"), ("uniform", "llama"), ("uneven", "deci")])
@pytest.mark.parametrize("dtype", ["float32", "q8_0", "q4_0"])
def test_the_real_llama_writes_what_torch_writes(
    how: str, architecture: str, dtype: str, tmp_path: Path, table: list[tuple[str, ...]]
) -> None:
    model, tokenizer = stories(how)
    exported = export_gguf(model, tmp_path / "out", tokenizer=tokenizer, dtype=dtype)
    equal, difference, runtime = compare(model, exported.file, tokenizer("Once upon a time")["input_ids"])
    table.append((f"stories260K, {how}", runtime.architecture, runtime.dtype, f"{equal} of 64", f"{difference:.1e}"))
    assert (runtime.architecture, runtime.dtype) == (architecture, dtype)
    assert exported.max_abs is not None
    if dtype == "float32":
        assert (equal, exported.facts["parity"]["tokens"]) == (NEW_TOKENS, 64)
        assert difference < 2e-3
        assert exported.max_abs < 1e-5


ROPE: dict[str, Any] = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTATED: dict[str, Any] = {
    "llama, scaled as LLaMA 3.1, uneven": (lambda: cut(llama(rope_parameters=LLAMA3)), "deci"),
    "llama, yarn, uneven": (lambda: cut(llama(rope_parameters={**ROPE, "rope_type": "yarn"})), "deci"),
    "llama, linear": (lambda: llama(rope_parameters={**ROPE, "rope_type": "linear"}), "llama"),
}


@here
@pytest.mark.parametrize("case", CASES | ROTATED)
def test_every_architecture_computes_what_torch_does(case: str, tmp_path: Path, table: list[tuple[str, ...]]) -> None:
    make, architecture = (CASES | ROTATED)[case]
    model = make()
    tokenizer = byte_level_tokenizer() if "qwen" in case else sentence_piece_tokenizer()
    exported = export_gguf(model, tmp_path / "out", tokenizer=tokenizer)
    found = exported.facts["parity"]
    assert found is not None
    table.append((f"tiny {case}", architecture, "float32", "", f"{found['max_abs']:.1e}"))
    assert (exported.facts["architecture"], found["tokens"]) == (architecture, 64)
    assert found["share"] < 1e-4


@here
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_logits_of_every_token_are_torchs(side: str, tmp_path: Path) -> None:
    model = cut(llama())
    exported = export_gguf(model, tmp_path / "out", tokenizer=sentence_piece_tokenizer())
    mask = torch.ones(3, 11, dtype=torch.int64)
    for row, padding in enumerate((0, 4, 9)):
        mask[row, slice(padding) if side == "left" else slice(11 - padding, 11)] = 0
    batch = {"input_ids": torch.randint(3, 100, (3, 11)), "attention_mask": mask}
    with closing(LlamaCppRuntime(exported.file, threads=1, exact=True)) as runtime:
        found = runtime.prediction(batch)
    for row, ids in enumerate(batch["input_ids"]):
        with torch.no_grad():
            wanted = model(ids[mask[row].bool()][None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(found[row][mask[row].bool()], wanted, atol=1e-4, rtol=1e-4)
    assert found[mask == 0].abs().sum() == 0


@here
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0", "q4_0"])
def test_other_dtypes_run(dtype: str, tmp_path: Path, table: list[tuple[str, ...]]) -> None:
    found = export_gguf(cut(qwen2()), tmp_path / "out", tokenizer=byte_level_tokenizer(), dtype=dtype).facts["parity"]
    assert found is not None
    table.append(("tiny qwen2, uneven", "deci", dtype, "", f"{found['max_abs']:.1e}"))
    assert LlamaCppRuntime(tmp_path / "out", threads=1).dtype == dtype


SPLITS: dict[str, Any] = {
    "gpt-2": lambda: byte_level_tokenizer(None),
    "smollm": lambda: byte_level_tokenizer(None, digits=True),
    "llama-bpe": lambda: byte_level_tokenizer(LLAMA_SPLIT, ignore_merges=True),
    "smaug-bpe": lambda: byte_level_tokenizer(LLAMA_SPLIT),
    "qwen2": byte_level_tokenizer,
    "tekken": lambda: byte_level_tokenizer(_SPLITS["tekken"][0], ignore_merges=True),
    "default": sentence_piece_tokenizer,
}


@here
@pytest.mark.parametrize("name", SPLITS)
def test_llama_cpp_splits_texts_as_the_tokenizer_does(name: str, tmp_path: Path) -> None:
    tokenizer = SPLITS[name]()
    export_gguf(llama(num_hidden_layers=1), tmp_path / "out", tokenizer=tokenizer)
    texts = [*parity.TEXTS, " ", "  x", "HTTPServer's camelCase ABCs", "3.14159 1e10 ²", "tab\tand \n\n\nlines  "]
    found = LlamaCppRuntime(tmp_path / "out", threads=1).tokenize(texts)
    assert found == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@here
def test_a_wrong_file_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, tokenizer = "hies_export.forms.gguf", byte_level_tokenizer()
    with monkeypatch.context() as patch:
        patch.setattr(f"{parts}.vocabulary._pre_tokenizer", lambda described: "gpt-2")
        with pytest.raises(ParityError, match="llama.cpp's tokenizer must split texts as the model's does, but splits"):
            export_gguf(llama(), tmp_path / "out", tokenizer=tokenizer)
    monkeypatch.setattr(f"{parts}.export.check_same_function", lambda *_: None)
    monkeypatch.setattr(f"{parts}.tensors.interleave_halves", lambda rows, heads: rows)
    with pytest.raises(ParityError, match=r"next-token probabilities in llama.cpp must be torch's within 0.001"):
        export_gguf(cut(llama()), tmp_path / "out", tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


@here
def test_the_runtime_computes_prompts_and_steps_of_a_padded_batch(tmp_path: Path) -> None:
    model = cut(llama())
    export_gguf(model, tmp_path / "out", tokenizer=sentence_piece_tokenizer())
    ids = torch.randint(3, VOCABULARY, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    rows = [row[real.bool()][None] for row, real in zip(ids, mask, strict=True)]
    with torch.no_grad():
        wanted = np.stack([model(row).logits[0, -1].softmax(-1) for row in rows])
    runtime = load_runtime("llamacpp", tmp_path / "out", threads=1)
    assert (runtime.provider, runtime.dtype, runtime.threads, runtime.decodes) == ("cpu", "float32", 1, True)
    batch = {"input_ids": ids, "attention_mask": mask}
    prompt, step = runtime.prepare(batch), runtime.prepare_step(batch)
    for feed in (prompt, step, prompt, step):
        assert runtime.time_ns(feed) > 0
        found = runtime.fetch(runtime.run(feed))["probabilities"]
        assert found.shape == (3, VOCABULARY)
        np.testing.assert_allclose(found, wanted, atol=2e-3)


@here
def test_a_process_that_ends_is_an_error_and_a_closed_one_leaves_none(tmp_path: Path) -> None:
    file = export_gguf(llama(), tmp_path / "out", tokenizer=sentence_piece_tokenizer()).file
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:20000])
    with pytest.raises(ExportError, match="llama.cpp must run the file, and refused: Failed to load model"):
        LlamaCppRuntime(tmp_path / "cut.gguf", threads=1)
    for begin in (b"GGML", b"GGUF\x09\0\0\0"):
        (tmp_path / "none.gguf").write_bytes(begin + b"\0" * 40)
        with pytest.raises(DataError, match="a GGUF file must begin with its magic number and version 2 or 3, and"):
            LlamaCppRuntime(tmp_path / "none.gguf", threads=1)
    runtime = LlamaCppRuntime(tmp_path / "out", threads=1)
    runtime._process.kill()
    with pytest.raises(ExportError, match="and stopped"):
        runtime.tokenize(["a"])
    runtime.close()
    assert runtime._process.poll() is not None
    assert machine_facts()["node_llama_cpp"] == llamacpp.installed_version()


@here
@pytest.mark.slow
def test_bench_times_checkpoints_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {name: tmp_path / f"{name}-gguf" for name in ("dense", "slim")}
    for (name, out), model in zip(folders.items(), (llama(), cut(llama())), strict=True):
        model.save_pretrained(tmp_path / name)
        sentence_piece_tokenizer().save_pretrained(tmp_path / name)
        assert hies("export", tmp_path / name, "--format", "gguf", "-o", out) == 0
    capsys.readouterr()
    timing = ("--shape", "2x16", "--repeats", 1, "--json")
    pairs = [(tmp_path / "dense", tmp_path / "slim", "--runtime", "llamacpp"), (*folders.values(),)]
    pairs.append((folders["dense"] / "model.gguf", folders["slim"] / "model.gguf"))
    for pair in pairs:
        assert hies("bench", *pair, *timing) == 0
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["latency"]
        assert [(row["runtime"], row["phase"], row["provider"], row["dtype"]) for row in rows] == [
            ("llamacpp", phase, "cpu", "float32") for phase in ("prefill", "decode")
        ]
        assert all(row["tokens_per_second"]["slim"] > 0 and row["control_low"] > 0 for row in rows)
    for options, message in (
        (("--runtime", "torch"), "runtime torch needs a checkpoint, but"),
        (("--runtime", "onnxruntime-cpu"), "runtime onnxruntime-cpu needs an ONNX folder, but"),
        (("--dtype", "q8_0"), "a dtype can be chosen for checkpoints, but"),
    ):
        assert hies("bench", folders["dense"], *options) == 2
        assert message in capsys.readouterr().err
    (folders["dense"] / "config.json").unlink()
    assert hies("bench", folders["dense"]) == 2
    assert "must have the config.json beside it" in capsys.readouterr().err


@here
@pytest.mark.slow
def test_a_recipe_exports_and_times_in_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path / "model")
    sentence_piece_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.txt").write_text("Once upon a time there was a cat who sat on the mat.\n" * 40)
    fields = {
        "model": "model",
        "task": "text-generation",
        "data": {"files": {"train": "rows.txt", "validation": "rows.txt"}, "text": "text", "max_length": 16},
        "calibration": {"samples": 4},
        "evaluation": {"samples": 4},
        "prune": {"budget": {"heads": 0.25}},
        "export": {"format": "gguf"},
        "measure": {"runtimes": ["torch", "llamacpp"], "shapes": [[1, 8]], "repeats": 2},
        "output": "out",
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(fields))
    assert hies("run", tmp_path / "recipe.yaml", "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    size = (tmp_path / "out" / "gguf" / "model.gguf").stat().st_size
    assert (summary["bytes"]["gguf"], summary["bytes"]["onnx"], summary["onnx_max_abs"]) == (size, None, None)
    assert summary["gguf_max_abs"] < 1e-5
    assert {row["runtime"] for row in summary["latency"]} == {"torch", "llamacpp"}
    assert not (tmp_path / "out" / "onnx").exists()
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| next-token probabilities in llama.cpp against torch |" in report
    assert "| GGUF file |" in report


def test_without_it_the_message_is_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(llamacpp.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: "node")
    command = "npm i --omit=optional --ignore-scripts node-llama-cpp@3.22 @node-llama-cpp/PLATFORM@3.22"
    with pytest.raises(MissingRuntimeError, match=f"no node_modules/node-llama-cpp in {tmp_path}; .*: {command}, with"):
        load_runtime("llamacpp", tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(MissingRuntimeError, match=r"Node \(20 or newer\) is not installed"):
        load_runtime("llamacpp", tmp_path)


def test_without_it_a_file_is_written_and_said_not_to_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hies_export.forms.gguf.export.is_installed", lambda: False)
    llama().save_pretrained(tmp_path / "model")
    sentence_piece_tokenizer().save_pretrained(tmp_path / "model")
    assert hies("export", tmp_path / "model", "--format", "gguf", "-o", tmp_path / "out") == 0
    assert "not compared with llama.cpp, which is not installed" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "out" / "model.gguf").is_file()


@here
def test_vocabularies_of_today_are_compared(tmp_path: Path) -> None:
    # More tokens than a function of Node takes arguments; LLaMA 3 has 128,256 and Qwen2 151,936.
    model = qwen2(vocab_size=130_000, num_hidden_layers=1)
    exported = export_gguf(model, tmp_path / "out", tokenizer=byte_level_tokenizer())
    assert exported.max_abs is not None
    assert exported.max_abs < 1e-4
