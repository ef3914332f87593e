"""A cascade answers as its two models do, as one file in plain ONNX Runtime."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from support.exported import wide_bert
from support.models import cut_bert, word_tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from hies_export.errors import ParityError, RequestError
from hies_export.evaluate.predict import predict
from hies_export.forms.cascade import export as export_module
from hies_export.forms.cascade.export import CascadeForm
from hies_export.forms.cascade.join import join_graphs
from hies_export.forms.cascade.threshold import margins
from hies_export.forms.formats import Export
from hies_export.forms.onnx.export import export_onnx

Batches = list[dict[str, torch.Tensor]]


def texts(rows: int = 48, size: int = 8) -> Batches:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, 200, (rows, 14), generator=generator)
    lengths = torch.randint(3, 15, (rows, 1), generator=generator)
    mask = (torch.arange(14) < lengths).long()
    return [{"input_ids": (i * m), "attention_mask": m} for i, m in zip(ids.split(size), mask.split(size), strict=True)]


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The slim model has fewer heads."""
    return cut_bert(wide_bert(), [6]), wide_bert()


@pytest.fixture(scope="module")
def parts(models: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Export]:
    folder = tmp_path_factory.mktemp("parts")
    return [export_onnx(model, folder / name, batch=texts()[0]) for name, model in zip("sd", models, strict=True)]


def joined(models: Any, parts: list[Export], folder: Path, batches: Batches | None = None, **how: Any) -> Export:
    batches = batches or texts()
    answers = predict(models[1], batches).values
    return CascadeForm(disagreement=0.2, **how).join(*parts, folder, batches=batches, answers=answers)


@pytest.fixture(scope="module")
def exported(models: Any, parts: list[Export], tmp_path_factory: pytest.TempPathFactory) -> Export:
    return joined(models, parts, tmp_path_factory.mktemp("cascade") / "onnx")


def by_hand(models: Any, batch: dict[str, torch.Tensor], threshold: float) -> torch.Tensor:
    slim, dense = (predict(model, [batch]).values for model in models)
    return torch.where((margins(slim) <= threshold)[:, None], dense, slim)  # type: ignore[arg-type]


def between(margin: torch.Tensor) -> float:
    """Return a threshold in the widest gap of the middle half of margins.

    At a margin itself, rounding would decide where its row goes.
    """
    ordered = margin.sort().values[len(margin) // 4 : -(len(margin) // 4) or None]
    widest = int(ordered.diff().argmax())
    return (ordered[widest] + ordered[widest + 1]).item() / 2


def run(file: Path, batch: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """ONNX Runtime as its own users run it."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = {**batch, "token_type_ids": torch.zeros(next(iter(batch.values())).shape[:2], dtype=torch.int64)}
    names = [output.name for output in session.get_outputs()]
    fed = {node.name: given[node.name].numpy() for node in session.get_inputs()}
    return dict(zip(names, session.run(None, fed), strict=True))


def three_batches(models: Any, batches: Batches, threshold: float) -> dict[str, dict[str, torch.Tensor]]:
    """Batches of which no, some and all rows are passed on."""
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    found = margins(predict(models[0], batches).values)
    order, unsure = found.argsort(), int((found <= threshold).sum())
    assert 3 <= unsure <= len(order) - 3
    picked = {"none": order[-3:], "some": order[unsure - 2 : unsure + 3], "all": order[:3]}
    return {name: {key: value[index] for key, value in rows.items()} for name, index in picked.items()}


def test_one_file_answers_as_both_models(models: Any, exported: Export) -> None:
    threshold = exported.facts["promise"].threshold
    for name, batch in three_batches(models, texts(), threshold).items():
        found = run(exported.file, batch)
        np.testing.assert_allclose(found["logits"], by_hand(models, batch, threshold), atol=1e-4, err_msg=name)
        unsure = margins(predict(models[0], [batch]).values) <= threshold
        assert found["passed_on"].tolist() == unsure.tolist()
    assert exported.bytes == exported.file.stat().st_size
    # The embeddings, which both models read, are in the file once.
    assert exported.facts["shared_bytes"] >= 4 * (200 + 32) * 128


def test_weights_of_both_graphs_are_stored_once_whatever_their_names(
    models: Any, parts: list[Export], tmp_path: Path
) -> None:
    batch, files = texts()[0], [part.file for part in parts]
    weights = [
        {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(file).graph.initializer} for file in files
    ]
    both = sum(
        array.nbytes
        for array in weights[1].values()
        if any(array.dtype == other.dtype and np.array_equal(array, other) for other in weights[0].values())
    )
    slim, dense = (onnx_ir.load(file) for file in files)
    for number, value in enumerate(list(slim.graph.initializers.values())):
        value.name = f"renamed_{number}"
    threshold = between(margins(predict(models[0], [batch]).values))
    assert join_graphs(slim.graph, dense.graph, threshold) == both
    onnx_ir.save(slim, tmp_path / "joined.onnx")
    joined = onnx.load(tmp_path / "joined.onnx")
    onnx.checker.check_model(joined, full_check=True)
    stored = sum(onnx.numpy_helper.to_array(one).nbytes for one in joined.graph.initializer)
    alone = sum(array.nbytes for each in weights for array in each.values())
    assert abs(stored - (alone - both)) < 500  # the constants that join them
    names = [node.name for node in [*joined.graph.node, *inner_nodes(joined.graph)]]
    assert len(set(names)) == len(names)
    found = run(tmp_path / "joined.onnx", batch)["logits"]
    np.testing.assert_allclose(found, by_hand(models, batch, threshold), atol=1e-4)


def inner_nodes(graph: Any) -> list[Any]:
    """The nodes in the branches of a graph."""
    branches = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return [node for branch in branches for node in [*branch.node, *inner_nodes(branch)]]


def test_one_file_in_8_bits(models: Any, tmp_path: Path) -> None:
    how: dict[str, Any] = {"batch": texts()[0], "processor": word_tokenizer(["a"])}
    parts = [export_onnx(model, tmp_path / name, **how) for name, model in zip("sd", models, strict=True)]
    exported = joined(models, parts, tmp_path / "onnx", bits="int8")
    assert (exported.folder / "tokenizer.json").is_file()
    session = onnxruntime.InferenceSession(str(exported.file))
    assert session.get_modelmeta().custom_metadata_map["hies_export.forms.cascade"].startswith('{"disagreement": 0.2')
    answers = np.concatenate([run(exported.file, batch)["logits"] for batch in texts()]).argmax(-1)
    wanted = torch.cat([predict(models[1], [batch]).values for batch in texts()]).argmax(-1).numpy()
    assert (answers != wanted).sum() <= exported.facts["promise"].differ
    assert exported.how.quantize == "int8"


def test_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1}
    config = ViTConfig(**shape, image_size=16, patch_size=4, num_labels=4, initializer_range=0.2)
    dense = ViTForImageClassification(config).eval()
    slim = copy.deepcopy(dense)
    torch.manual_seed(1)
    for name, parameter in slim.named_parameters():
        if "embeddings" not in name:
            parameter.data += 0.6 * parameter.data.std().nan_to_num(0.0) * torch.randn_like(parameter)
    pair = slim, dense
    batches = [{"pixel_values": pixels} for pixels in torch.randn(40, 3, 16, 16).split(8)]
    parts = [export_onnx(model, tmp_path / name, batch=batches[0]) for name, model in zip("sd", pair, strict=True)]
    exported = joined(pair, parts, tmp_path / "onnx", batches)
    for name, batch in three_batches(pair, batches, exported.facts["promise"].threshold).items():
        wanted = by_hand(pair, batch, exported.facts["promise"].threshold)
        np.testing.assert_allclose(run(exported.file, batch)["logits"], wanted, atol=1e-4, err_msg=name)


@pytest.fixture
def threshold(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[float], float]], None]:
    """Let graphs be joined at another threshold than the one that was chosen."""
    join = export_module.join_graphs
    return lambda other: monkeypatch.setattr(
        export_module, "join_graphs", lambda slim, dense, chosen: join(slim, dense, other(chosen))
    )


def test_a_file_that_answers_otherwise_is_not_kept(
    models: Any, parts: list[Export], threshold: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threshold(lambda chosen: 1e9)
    with pytest.raises(ParityError, match="must agree with its two models to"):
        joined(models, parts, tmp_path / "onnx")
    threshold(lambda chosen: -1.0)
    monkeypatch.setitem(export_module.OTHER_PROGRAM, "float32", 1e9)
    with pytest.raises(ParityError, match=r"keep the promised disagreement of 0.2, but changes \d+ of 48"):
        joined(models, parts, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_near_the_threshold_either_answer_is_right(
    models: Any, parts: list[Export], threshold: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A margin may be another one in the joined graph."""
    # What a margin may move by is a share of the largest logit.
    largest = max(1.0, *(predict(model, texts()).values.abs().max().item() for model in models))
    monkeypatch.setattr(export_module, "RESOLUTION", 0.5 / largest)
    threshold(lambda chosen: chosen - 0.4)
    exported = joined(models, parts, tmp_path / "onnx")
    rows = torch.cat([torch.from_numpy(run(exported.file, batch)["passed_on"]) for batch in texts()])
    assert rows.double().mean() < exported.facts["promise"].passed_on
    assert exported.max_abs < 1e-4
    threshold(lambda chosen: chosen - 0.6)
    with pytest.raises(ParityError, match="must agree with its two models to"):
        joined(models, parts, tmp_path / "worse")


def test_what_cannot_be_a_cascade_is_refused() -> None:
    cascade = CascadeForm(disagreement=0.01)
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
    )
    several = wide_bert(num_labels=3, problem_type="multi_label_classification")
    for model in (wide_bert(num_labels=1), several, llama):
        with pytest.raises(RequestError, match=f"one class for each row, and {type(model).__name__} does not"):
            cascade.check(model, texts())
    with pytest.raises(RequestError, match=r"from 299 held-out rows or more, and there are 1; give more rows"):
        cascade.check(wide_bert(), texts(rows=1, size=1))
