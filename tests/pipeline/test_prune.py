"""prune() on objects in memory: it leaves the model alone, chooses as a run does, saves, exports, and refuses early."""

import copy
import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support.checkpoints import llava_batch
from support.exported import run_onnx
from support.generative import padded, with_images
from support.loading import load_pruning
from support.models import (
    WORDS,
    bert,
    causal_lm,
    generative_tokenizer,
    image_batch,
    llama,
    llava,
    save_project,
    save_text_model,
    text_batch,
    vit,
)
from support.runs import registries_restored, without_tracing
from support.tolerance import assert_near
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BertForSequenceClassification, BertModel, PreTrainedModel, pipeline
from transformers.utils import logging

import hies_export
from hies_export import HiesError, PruningPlan, PruningRecipe, flops_table, prune
from hies_export.evaluate.metrics import register_metric
from hies_export.pipeline import in_memory, stages
from hies_export.pipeline import prune as prune_file
from hies_export.pipeline.choose import choose
from hies_export.pipeline.options import PruneSection

BOTH = ["attention", "mlp"]
REFIT = {"method": "least_squares", "samples": 64}
ONE_LABEL = partial(bert, num_labels=1)
HALF: dict[str, Any] = {"criterion": "his", "budget": {"heads": 0.5}}

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


def texts() -> list[dict[str, torch.Tensor]]:
    return [text_batch(4, 10 + i) for i in range(8)]


def unlabelled() -> list[dict[str, torch.Tensor]]:
    return [text_batch(labels=False) for _ in range(8)]


def unpadded() -> list[dict[str, torch.Tensor]]:
    return [text_batch(8, padding=False) for _ in range(2)]


def images() -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader([{k: v[0] for k, v in image_batch(1).items()} for _ in range(24)], batch_size=6)


def stories() -> datasets.Dataset:
    words = [*"abcdefghijkl", "yes", "no"]
    rows = [" ".join(words[(i * 5 + j * 3) % 14] for j in range(12)) for i in range(60)]
    return datasets.Dataset.from_dict({"text": rows})


@pytest.fixture
def unharmed() -> Iterator[Callable[[PreTrainedModel], PreTrainedModel]]:
    """Give models that must be as they were in the end: weights to the bit, modes, gradients, config."""
    seen = []

    def remember(model: PreTrainedModel) -> PreTrainedModel:
        seen.append((model, copy.deepcopy(model)))
        return model

    yield remember
    for model, before in seen:
        assert {n: m.training for n, m in model.named_modules()} == {n: m.training for n, m in before.named_modules()}
        assert model.config.to_dict() == before.config.to_dict()
        assert model.config._attn_implementation == before.config._attn_implementation
        for (name, parameter), (_, known) in zip(model.named_parameters(), before.named_parameters(), strict=True):
            assert torch.equal(parameter, known), name
            assert (parameter.requires_grad, parameter.grad) == (known.requires_grad, None)
        assert hooks(model) == hooks(before)


def hooks(model: PreTrainedModel) -> list[int]:
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


CASES: dict[str, tuple[Callable[..., PreTrainedModel], Callable[[], Any], dict[str, Any]]] = {
    "BERT, a list": (bert, texts, {}),
    "ViT, a DataLoader": (vit, images, {}),
    "LLaMA, a Dataset": (causal_lm, stories, {"processor": generative_tokenizer()}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_pruned_saved_loaded_and_exported(name: str, tmp_path: Path, unharmed: Any) -> None:
    build, batches, how = CASES[name]
    model = unharmed(build(num_hidden_layers=1).train())
    result = prune(model, batches(), modules=BOTH, criterion="fisher", budget={"flops": 0.7}, compensation=REFIT, **how)
    assert type(result.model).__name__ == type(model).__name__
    assert result.flops.ratio <= 0.7
    result.save_pretrained(tmp_path / "slim")
    sample = result.pruning.sample
    inputs = {key: value for key, value in sample.items() if key != "labels"}
    with torch.no_grad():
        expected = result.model(**inputs).logits
        loaded = hies_export.load(tmp_path / "slim")(**inputs).logits
    torch.testing.assert_close(loaded, expected)
    assert PruningPlan.from_file(tmp_path / "slim" / "hies_plan.json").kept == result.plan.kept
    assert (tmp_path / "slim" / "refit.safetensors").is_file()
    assert (tmp_path / "slim" / "tokenizer.json").is_file() is ("processor" in how)
    # Graphs of images and of decoders are compared in tests/onnx.
    traced = build is bert
    with nullcontext() if traced else without_tracing():
        exported = result.export_onnx(tmp_path / "onnx")
    assert (tmp_path / "onnx" / "tokenizer.json").is_file() is ("processor" in how)
    if traced:
        logits = run_onnx(tmp_path / "onnx" / "model.onnx", inputs)["logits"]
        torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-4, rtol=1e-4)
    assert exported.max_abs < 1e-3
    text = str(result)
    for shown in ("attention heads", "feed-forward neurons", "parameters", "FLOPs at 1 x", "same prediction", "■"):
        assert shown in text


PRUNE: list[dict[str, Any]] = [
    {"budget": {"heads": 0.4}, "alpha": "auto", "normalize": "layer", "compensation": {"samples": 40}},
    {"budget": {"heads": 0.5}, "criterion": "random", "min_heads": 2},
    {"budget": {"flops": 0.6}, "modules": BOTH, "criterion": "fisher", "compensation": {"method": "bias"}},
    {"budget": {"keep": 0.5}, "modules": BOTH, "criterion": "auto", "compensation": {"samples": 40}},
]


@pytest.mark.parametrize("section", PRUNE, ids=lambda s: "-".join([*s["budget"], s.get("criterion", "hies")]))
def test_a_recipe_and_a_call_choose_the_same(section: dict[str, Any], tmp_path: Path) -> None:
    calibration = {"samples": 12, "batch_size": 4, "seed": 3}
    sections = {"calibration": calibration, "measure": {"shapes": [[2, 16]]}, "prune": section}
    save_project(tmp_path, train=80, validation=8, **sections)
    save_text_model(tmp_path / "model", num_hidden_layers=2)
    asked = load_pruning(PruningRecipe.from_yaml(tmp_path / "recipe.yaml"))
    rows, slim = asked.rows, stages.cut(asked, choose(asked, stages.calibrate(asked)))
    model = BertForSequenceClassification.from_pretrained(tmp_path / "model")
    how = {"held_out": rows.held_out, "compensation_batches": rows.refit or None, "seed": 3, "shape": (2, 16)}
    result = prune(model, rows.score, **how, **section)
    for name in ("kept", "criterion", "alpha", "seed", "calibration"):
        assert getattr(result.plan, name) == getattr(slim.plan, name), name
    assert_near(result.model.state_dict(), slim.model.state_dict())


def test_drawn_batches_are_held_out_unless_others_are_given(unharmed: Any) -> None:
    model, batches = unharmed(bert()), texts()
    own = prune(model, batches, budget={"heads": 0.5})
    lengths = {batch["input_ids"].shape[1] for batch in own.pruning.rows.held_out}
    assert len(lengths) == 2
    assert lengths != {16, 17}  # the last ones
    apart = [batch for batch in batches if batch["input_ids"].shape[1] in lengths]
    scored = [batch for batch in batches if batch["input_ids"].shape[1] not in lengths]
    given = prune(model, scored, held_out=apart, budget={"heads": 0.5})
    assert (given.plan, str(given)) == (own.plan, str(own))
    alone = prune(model, scored, held_out=[], budget={"heads": 0.5})
    assert (alone.plan, alone.held_out) == (own.plan, None)


def test_of_a_single_batch_a_quarter_of_the_rows_is_held_out() -> None:
    found = prune(bert(), [text_batch(4, 12)], budget={"heads": 0.5})
    assert [len(batch["labels"]) for batch in found.pruning.rows.held_out] == [1]
    assert "same prediction, 1 held-out row  " in str(found)


def test_of_rows_that_are_sorted_by_their_label_all_classes_are_held_out(tmp_path: Path) -> None:
    save_text_model(tmp_path, num_labels=4)
    model, tokenizer = (of.from_pretrained(tmp_path) for of in (BertForSequenceClassification, AutoTokenizer))
    columns = {"text": [WORDS[n % 7] for n in range(80)], "label": [n // 20 for n in range(80)]}
    found = prune(model, datasets.Dataset.from_dict(columns), processor=tokenizer, budget={"heads": 0.5}).pruning.rows
    for part, count in ((found.score, 60), (found.held_out, 20)):
        labels = torch.cat([batch["labels"] for batch in part]).tolist()
        assert (set(labels), len(labels)) == ({0, 1, 2, 3}, count)


def test_a_metric_fails_on_the_dense_model_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_shares(predictions: Any, references: Any) -> float:
        if references.max() > 1:
            raise ValueError("shares must be in [0, 1]")
        return 0.5

    monkeypatch.setattr(prune_file, "calibrate", lambda *_: pytest.fail("calibrated"))
    batches = [{**text_batch(4, 10, labels=False), "labels": 5 * torch.rand(4)} for _ in range(8)]
    with registries_restored():
        register_metric("shares", of="numbers")(of_shares)
        with pytest.raises(HiesError, match=r"'shares' must give .* these predictions: ValueError: shares must be in"):
            prune(bert(num_labels=1), batches, **HALF, evaluation={"metrics": ["shares"]})


@pytest.mark.parametrize("criterion", ["hies", "compensated"])
def test_a_regression_is_pruned_without_labels(criterion: str) -> None:
    batches = [text_batch(4, 10, labels=False) for _ in range(4)]
    result = prune(bert(num_labels=1), batches, criterion=criterion, budget={"heads": 0.5}, compensation=REFIT)
    assert (result.plan.removed, result.plan.calibration["labels"]) == (9, "predictions")


def test_a_given_plan_is_cut_and_refitted(unharmed: Any) -> None:
    model, batches = unharmed(bert()), texts()
    plan = prune(model, batches, modules=BOTH, criterion="fisher", budget={"flops": 0.7}).plan
    again = prune(model, batches, plan=plan)
    assert (again.plan.kept, again.scores, again.slim.fits) == (plan.kept, None, [])
    refitted = prune(model, batches, plan=plan, compensation=REFIT)
    assert refitted.plan.kept == plan.kept
    assert refitted.plan.compensation["method"] == "least_squares"
    assert len(refitted.slim.fits) == sum(bool(kept.removed) for kept in plan.kept.values())
    with pytest.raises(hies_export.RequestError, match="with plan=, of the options only compensation applies, got bu"):
        prune(model, batches, plan=plan, budget={"heads": 0.5})


def test_a_model_of_images_and_text(unharmed: Any) -> None:
    model = llava()
    model(**llava_batch())  # where transformers leaves hooks of its own
    unharmed(model)
    batches = [with_images(padded([9, 12], "left", answers=[3, 4])) for _ in range(4)]
    result = prune(model, batches, modules=BOTH, criterion="fisher", budget={"flops": 0.8}, compensation=REFIT)
    assert set(result.model(**llava_batch())) >= {"logits"}
    assert all("vision" not in name for name, kept in result.plan.kept.items() if kept.removed)
    moments, collected = stages.moments_of(result.pruning), list[str]()
    moments.each(lambda modules, _: collected.extend(module.name for module in modules))
    assert sorted(collected) == sorted(module.name for module in result.pruning.scored)
    assert all("vision" not in name for name in collected)
    outcome = prune(model, batches, criterion="his", budget={"heads": 0.5}).slim.outcome
    assert outcome is not None
    assert outcome.found is not None
    assert outcome.found.value == 0.5  # of the heads that may go
    how = {"criterion": "fisher", "budget": {"flops": 0.9}, "compensation": {"sequential": False}}
    with pytest.raises(hies_export.DataError, match="vision_tower.* reads none"):
        prune(model, batches, towers=("vision",), compensation_batches=tokens(), **how)


def tokens() -> list[dict[str, torch.Tensor]]:
    return [padded([9, 12, 7], "right") for _ in range(6)]


@pytest.mark.parametrize(
    ("make", "batches", "how", "sequential"),
    [
        (causal_lm, tokens, {}, True),
        (causal_lm, tokens, {"sequential": False}, False),
        (causal_lm, tokens, {"token_weights": 0.5}, False),
        (bert, texts, {"sequential": True}, True),
        (llama, unpadded, {}, False),
    ],
    ids=["decoder", "as asked", "weighted", "an encoder as asked", "decoder of classes"],
)
def test_layers_of_a_model_that_generates_are_refitted_one_after_the_other(
    make: Any, batches: Any, how: dict[str, Any], sequential: bool, unharmed: Any
) -> None:
    options = {"modules": ["mlp"], "criterion": "l2", "budget": {"flops": 0.8}}
    model, rows = unharmed(make(num_hidden_layers=2)), batches()
    result = prune(model, rows, compensation={**REFIT, **how}, **options)
    assert result.pruning.options.compensation.sequential is sequential
    if sequential:
        other = prune(model, rows, compensation={**REFIT, "sequential": False}, **options)
        last = f"{result.pruning.modules[-1].consumer}.weight"
        assert not torch.allclose(result.model.get_parameter(last), other.model.get_parameter(last), rtol=1e-4)


@pytest.mark.parametrize("compensation", [None, REFIT])
def test_a_slim_model_shares_what_was_not_cut(compensation: Any, unharmed: Any) -> None:
    model = unharmed(causal_lm().train())
    result = prune(model, tokens(), budget={"heads": 0.5}, compensation=compensation)
    dense, slim = dict(model.named_parameters()), dict(result.model.named_parameters())
    own = {name for name, parameter in slim.items() if parameter.data_ptr() != dense[name].data_ptr()}
    cut = {
        layer for module in result.pruning.modules for layer in module.layers if result.plan.kept[module.name].removed
    }
    scaled = {"model.norm.weight"} if compensation else set[str]()
    assert own == {f"{layer}.weight" for layer in cut} | scaled
    assert len(cut) > 3


def test_rows_of_a_data_set_become_batches_by_their_columns(tmp_path: Path) -> None:
    save_text_model(tmp_path / "model")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [{"premise": "good fine", "note": "x", "label": i % 2, "length": i} for i in range(20)]
    rows += [{"premise": "bad dull poor", "note": "y", "label": i % 2, "length": i} for i in range(20)]
    data = datasets.Dataset.from_list(rows)
    columns = {"text": "premise", "label": "label", "max_length": 8}
    named = prune(model, data, processor=tokenizer, columns=columns, budget={"heads": 0.5})
    assert named.plan.calibration["labels"] == "data"
    # Two columns of text or fewer leave no choice.
    taken = prune(model, data.remove_columns("note"), processor=tokenizer, budget={"heads": 0.5})
    assert taken.plan == named.plan
    # A data set that was tokenised is padded by the tokenizer, and takes no columns.
    ready = data.map(lambda row: tokenizer(row["premise"]), remove_columns=["premise", "note", "length"])
    assert prune(model, ready, processor=tokenizer, budget={"heads": 0.5}).plan.kept == named.plan.kept


@pytest.mark.parametrize(("tokenised", "text"), [(False, True), (True, False)], ids=["text", "class labels"])
def test_rows_are_judged_by_the_names_that_pipelines_give(
    tokenised: bool, text: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_text_model(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    names = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 1, "good": 0}}
    config.write_text(json.dumps(json.loads(config.read_text()) | names))
    classify = pipeline("text-classification", str(tmp_path / "model"), device="cpu")
    lines = [" ".join(WORDS[j % 10] for j in range(i, i + 1 + i % 5)) for i in range(40)]
    said = [found["label"] for found in classify(lines)]
    assert set(said) == {"bad", "good"}
    data = datasets.Dataset.from_dict({"text": lines, "label": said})
    if not text:
        data = data.cast_column("label", datasets.ClassLabel(names=["good", "bad"]))
    if tokenised:
        data = data.map(lambda row: classify.tokenizer(row["text"]), remove_columns=["text"])
    result = prune(classify.model, data, processor=classify.tokenizer, criterion="l2", budget={"heads": 0.5})
    assert result.held_out.metrics["accuracy"].dense == 1


def test_saving_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = prune(vit(), images(), budget={"heads": 0.5})
    logging.enable_progress_bar()
    try:
        capfd.readouterr()
        result.save_pretrained(tmp_path / "slim")
        assert capfd.readouterr() == ("", "")
        vit().save_pretrained(tmp_path / "dense")  # after it, transformers speaks again
        assert "model shards" in capfd.readouterr().err
    finally:
        logging.disable_progress_bar()


def configured(make: Callable[..., PreTrainedModel], **fields: Any) -> Callable[[], PreTrainedModel]:
    """Return what makes a model and then changes its config, also to what transformers refuses to load."""

    def model() -> PreTrainedModel:
        made = make()
        for name, value in fields.items():
            setattr(made.config, name, value)
        return made

    return model


def quantised_by_torch() -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own function deprecated
        return torch.ao.quantization.quantize_dynamic(bert(), {torch.nn.Linear})


# Arguments in place of a BERT, batches of text and a budget of half the heads, and what is said of them. What is
# refused of batches stands in tests/data.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": configured(vit, id2label=dict(enumerate("abcd"))), "batches": images}, "names 4 .* ViTForIm.* gives 3"),
    ({"model": configured(bert, id2label={1: "a", 2: "b", 3: "c"}), "batches": unlabelled}, "from 0 without a gap"),
    (
        {"batches": lambda: [text_batch() | {"labels": torch.zeros(4, 1, dtype=torch.int64)}]},
        r"labels must be one class for each sample, but a batch has torch.int64 of shape \(4, 1\)",
    ),
    ({"budget": None}, "budget must be given"),
    ({"budget": {"heads": 1.5}, "alpha": 2}, "(?s)2 problems:.*alpha must be .*got 2.*heads must be less than 1"),
    (
        {"model": llama, "batches": unpadded, "budget": {"flops": 0.8}, "compensation": {"method": "bias"}},
        "compensation.method bias needs .*, but model.layers.0.self_attn.o_proj has none; use least_squares",
    ),
    ({"alpha": "auto", "held_out": []}, "alpha: auto is chosen on held-out rows, and there are none; pass held_out="),
    ({"model": configured(bert, quantization_config={"quant_method": "bitsandbytes"})}, "is quantised; load it with"),
    ({"model": quantised_by_torch}, "is quantised; load it with"),
    ({"model": lambda: torch.nn.Linear(2, 2)}, "PreTrainedModel of transformers, got Linear; pass the one inside it"),
    ({"model": lambda: BertModel(bert().config)}, "AutoModelForSequenceClassification, .* got"),
    ({"model": configured(ONE_LABEL, problem_type="single_label_classification")}, "two labels or more, .* has 1"),
    ({"model": configured(vit, problem_type="regression")}, "a regression must have one label, but the model has 3"),
    ({"model": configured(bert, problem_type="multilabel")}, "problem_type must be regression, .*, got 'multilabel'"),
    ({"evaluation": {"stability_tolerance": 0}}, "evaluation.stability_tolerance must be .* above 0|greater than 0"),
    ({"evaluation": {"split": "test"}}, "evaluation.split is not a field"),
    ({"model": causal_lm, "batches": stories}, "needs processor="),
    ({"shape": (-1, 8)}, r"a shape must have at least 1 row and 1 token, got \[-1, 8\]"),
]


def test_inference_mode_is_refused_and_no_grad_is_not() -> None:
    with torch.inference_mode(), pytest.raises(HiesError, match=r"takes gradients, .* inside of torch.no_grad"):
        prune(bert(), texts(), **HALF)
    model, batches = bert(), texts()
    with torch.no_grad():
        found = prune(model, batches, **HALF)
    assert found.plan.kept == prune(model, batches, **HALF).plan.kept


def test_keywords_are_the_fields_of_a_recipe_with_their_defaults() -> None:
    parameters = inspect.signature(prune).parameters
    for name, field in PruneSection.model_fields.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        if name in ("modules", "criterion", "compensation"):  # the budget says
            assert parameters[name].default in (None, "usual")
        elif name != "budget":
            section = PruneSection(budget={"heads": 0.5}, **{name: parameters[name].default})
            assert getattr(section, name) == field.default
    assert all(
        parameter.annotation is not Any for name, parameter in parameters.items() if name in PruneSection.model_fields
    )


def test_batches_of_tensors_from_an_iterable_data_set_are_taken() -> None:
    model, ids = bert(), torch.randint(5, 100, (16, 6)).tolist()
    rows = datasets.Dataset.from_dict({"input_ids": ids}).to_iterable_dataset().with_format("torch").batch(4)
    result = prune(model, rows, **HALF)
    alone = prune(model, [{"input_ids": torch.tensor(ids[at : at + 4])} for at in range(0, 16, 4)], **HALF)
    assert result.plan.kept == alone.plan.kept


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_pruned_as_the_one_it_was_compiled_from(in_place: bool) -> None:
    """A model that was compiled in place ignores hooks that come after its first run, until it is compiled anew."""
    model, batches = bert(), texts()
    wanted = prune(model, batches, **HALF)
    compiled: Any = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    compiled(**batches[0])
    found = prune(compiled, batches, **HALF)
    assert type(found.model) is type(wanted.model)
    assert found.plan.kept == wanted.plan.kept
    for one, other in zip(found.model.parameters(), wanted.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (model._compiled_call_impl is not None) == in_place
    assert found.model._compiled_call_impl is None


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_refused_in_one_sentence(arguments: dict[str, Any], message: str, unharmed: Any) -> None:
    given = {"model": bert, "batches": texts, "budget": {"heads": 0.5}} | arguments
    given = {name: value for name, value in given.items() if value is not None}
    model, batches = given.pop("model")(), given.pop("batches")()
    if isinstance(model, PreTrainedModel):
        unharmed(model)
    with pytest.raises(HiesError, match=message) as refused:
        prune(model, batches, **given)
    assert "\n" not in str(refused.value) or "problems:" in str(refused.value)


def test_what_delivers_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It remembers the graphs that further cuts are made of."""
    made, make = [], in_memory.delivery_of
    monkeypatch.setattr(in_memory, "delivery_of", lambda *given: made.append(given) or make(*given))
    monkeypatch.setattr(
        "hies_export.pipeline.delivery.latency_table",
        lambda model, modules, where, **_: flops_table(model, modules, batch=where.batch),
    )
    timed = {"ratio": 0.9, "runtime": "torch", "batch": 1, "sequence": 8}
    prune(bert(num_hidden_layers=2), [text_batch() for _ in range(4)], budget={"latency": timed}, criterion="l2")
    assert len(made) == 1


@pytest.mark.parametrize(("criterion", "collected"), [("compensated", set()), ("fisher", {"his", "fisher"})])
def test_statistics_are_collected_only_for_criteria_that_read_them(criterion: str, collected: set[str]) -> None:
    result = prune(bert(), texts(), budget={"flops": 0.8}, criterion=criterion, compensation=None)
    assert result.choice.statistics is not None
    assert collected <= set(result.choice.statistics.values)
    assert bool(result.choice.statistics.values) == bool(collected)
