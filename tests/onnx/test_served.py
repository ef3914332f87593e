"""Exports of embedding models, as folders that sentence-transformers runs; with it in test_sentence_transformers.py."""

import json
from pathlib import Path

import onnxruntime
import pytest
import torch
from support.models import text_batch
from support.runs import hies
from support.sentences import WIDTH, bert_encoder, dense, load_embedder, sentence_folder

from hies_export import RequestError
from hies_export.checkpoint.sentence import SERVED_FILE, read_served


def test_the_graph_embeds_texts_and_the_folder_names_the_module(tmp_path: Path) -> None:
    options = {"prompts": {"query": "q: "}, "default_prompt_name": None, "similarity_fn_name": "dot"}
    layers, encoder = [dense(WIDTH, 12), ("Normalize", {}, {})], bert_encoder(num_hidden_layers=1)
    source = sentence_folder(tmp_path / "dense", layers, options=options, encoder=encoder)
    assert hies("export", source, "-o", tmp_path / "served") == 0
    served = tmp_path / "served"
    session = onnxruntime.InferenceSession(served / "model.onnx")
    assert [output.name for output in session.get_outputs()] == ["last_hidden_state", "sentence_embedding"]
    model, batch = load_embedder(source), text_batch(labels=False)
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    found = session.run(None, {node.name: batch[node.name].numpy() for node in session.get_inputs()})
    with torch.no_grad():
        expected = model(**batch)
    torch.testing.assert_close(torch.tensor(found[1]), expected.sentence_embedding, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(found[0]), expected.last_hidden_state, atol=1e-4, rtol=1e-4)
    assert json.loads((served / "modules.json").read_text()) == [
        {"idx": 0, "name": "0", "path": "", "type": "hies_export.served.OnnxEncoder"}
    ]
    assert read_served(served).model_dump() == {
        **{"file": "model.onnx", "dimension": 12, "runtime": "onnxruntime-cpu", "dtype": None, "threads": None},
    }
    written = json.loads((served / "config_sentence_transformers.json").read_text())
    assert (written["prompts"]["query"], written["similarity_fn_name"]) == ("q: ", "dot")
    assert json.loads((served / "config.json").read_text())["architectures"] == ["BertModel"]
    assert (served / "tokenizer.json").is_file()
    assert not (served / "graph").exists()


@pytest.mark.parametrize("file", ["../model.onnx", "..", ""])
def test_settings_that_name_a_file_elsewhere_are_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / SERVED_FILE).write_text(json.dumps({"file": file, "dimension": 3}))
    with pytest.raises(RequestError, match="which is not in its folder; export the model again"):
        read_served(tmp_path)
