"""Walks through a model block by block against plain forward passes, masks and autograd."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support.architectures import tiny
from support.contract import labelled
from support.generative import padded, with_images
from support.models import bert, causal_lm, image_batch, llava, text_batch, vit, word_tokenizer
from support.references import naive_statistics
from support.sentences import WORDS, bert_encoder, embedder, t5_encoder
from support.tolerance import assert_near
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export import NonFiniteError, UnsupportedModelError, collect_statistics, find_modules
from hies_export.calibrate.readings import Gradients, Read, Reading, read_forward
from hies_export.calibrate.walk import WHOLE, Walk, blocks_of
from hies_export.data.batches import inputs_of
from hies_export.kinds import ATTENTION, BOTH, MLP
from hies_export.model import modes
from hies_export.model.modes import output_alone
from hies_export.tasks import task_of
from hies_export.tasks.task import random_projection

Batch = dict[str, Tensor]
CONSUMERS = ["attention.output.dense", "output.dense"]
LAYERS = [f"bert.encoder.layer.{number}" for number in range(3)]


def names_of(model: PreTrainedModel, batch: Batch, *kinds: str) -> dict[str, list[str]]:
    """Return the consumers in every block."""
    found = blocks_of(model, find_modules(model, batch, kinds=kinds or BOTH), batch)
    return {
        block: [module.consumer.removeprefix(f"{block}.") for module in modules] for block, modules in found.items()
    }


def walk_of(model: PreTrainedModel, batches: Sequence[Batch], ends: dict[int, Tensor]) -> Walk:
    """Return a walk whose runs leave the logits of every batch in `ends`."""

    def run(number: int, batch: Batch) -> None:
        with torch.no_grad():
            ends[number] = model(**inputs_of(batch)).logits

    blocks = blocks_of(model, find_modules(model, batches[0]), batches[0])
    return Walk(model, dict(enumerate(batches)), [*blocks], run)


def walk_on(walk: Walk) -> None:
    """Compute all blocks."""
    for _, calls in walk.forward():
        for call in calls:
            call.output = walk.compute(call)


def outputs(model: PreTrainedModel, batches: Sequence[Batch]) -> dict[int, Tensor]:
    """Return the logits of every batch after a walk."""
    ends: dict[int, Tensor] = {}
    walk_on(walk_of(model, batches, ends))
    return ends


def plain(model: PreTrainedModel, batches: Sequence[Batch]) -> dict[int, Tensor]:
    with torch.no_grad():
        return {number: model(**inputs_of(batch)).logits for number, batch in enumerate(batches)}


@contextmanager
def unharmed(model: PreTrainedModel) -> Iterator[None]:
    """Assert that the block leaves weights, methods, hooks and modes as they were."""

    def state() -> list[Any]:
        forwards = [vars(module).get("forward") for module in model.modules()]
        modes = [module.training for module in model.modules()]
        grads = [(p.requires_grad, p.grad, p.data_ptr()) for p in model.parameters()]
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        return [forwards, modes, grads, hooks, torch.is_grad_enabled(), getattr(model.config, "problem_type", None)]

    before, weights = state(), {name: value.clone() for name, value in model.state_dict().items()}
    yield
    assert state() == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def with_text() -> list[Batch]:
    return [with_images(padded([5, 7, 6], "right")), padded([6, 4], "right")]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], list[Batch]]]] = {
    "bert": (bert, lambda: [text_batch(), text_batch(2, 7)]),
    "vit": (vit, lambda: [image_batch(3), image_batch(1)]),
    "decoder": (causal_lm, lambda: [padded([9, 4, 6], "left")]),
    "llava": (llava, with_text),
    "llava, text first": (llava, lambda: with_text()[::-1]),
}


@pytest.mark.parametrize("case", MODELS)
def test_after_all_blocks_the_outputs_are_those_of_a_plain_forward(case: str) -> None:
    make, make_batches = MODELS[case]
    model, batches = make(), make_batches()
    expected = plain(model, batches)  # the first time, transformers puts hooks of its own into some models
    with unharmed(model):
        assert_near(outputs(model, batches), expected)


@pytest.mark.parametrize("model_type", ["swin", "modernbert"])
def test_statistics_are_those_of_masks_for_other_layouts(model_type: str) -> None:
    model, batch = tiny(model_type)
    batches = [labelled(model, batch)]
    modules = find_modules(model, batch, kinds=BOTH)
    found, expected = collect_statistics(model, batches, modules), naive_statistics(model, batches, modules)
    for what in ("his", "fisher"):
        assert_near(dict(found[what]), expected[what], within=1e-3, where=what)


def test_layers_that_share_what_the_first_one_makes_are_scored_too() -> None:
    """T5 makes its positions in the first layer and hands them on; what is scored is an embedding, by four losses."""
    model, batch = embedder(t5_encoder("T5"), word_tokenizer(WORDS)).eval(), text_batch(2, 8, labels=False)
    batches = [{name: value[[row]] for name, value in batch.items()} for row in range(2)]
    modules = find_modules(model, batch, kinds=BOTH)
    found = collect_statistics(model, batches, modules)["his"]
    for module in modules:
        expected = []
        for number, one in enumerate(batches):
            four = {name: value.repeat(4, 1) for name, value in one.items()}
            mask = torch.ones(4, 1, module.units, requires_grad=True)

            def times(_: nn.Module, args: tuple[Tensor], mask: Tensor = mask, module: Any = module) -> Tensor:
                return args[0] * mask.repeat_interleave(module.unit_width, -1)

            with model.get_submodule(module.consumer).register_forward_pre_hook(times), output_alone(model):
                loss = random_projection(task_of(model).output(model, four), number)
            expected.append(torch.autograd.grad(loss.sum(), mask)[0][:, 0].abs().double())
        assert_near(found[module.name], torch.cat(expected).mean(0), within=1e-3)


def test_a_block_is_an_element_of_a_list() -> None:
    model, batch = bert(), text_batch()
    assert names_of(model, batch) == {name: CONSUMERS for name in LAYERS}
    # Elements without modules are blocks as well.
    modules = find_modules(model, batch, kinds=(MLP,))
    found = blocks_of(model, modules[1:2], batch)
    assert found == {LAYERS[0]: [], LAYERS[1]: [modules[1]], LAYERS[2]: []}
    assert list(found) == LAYERS


@pytest.mark.parametrize("encoder", [bert_encoder, lambda: t5_encoder("T5")], ids=["bert", "t5"])
def test_what_comes_after_the_encoder_is_no_reason_for_one_block(encoder: Callable[[], PreTrainedModel]) -> None:
    model, batch = embedder(encoder(), word_tokenizer(WORDS)), text_batch(2, 8, labels=False)
    found = names_of(model, batch)
    assert [name for name in found if name.startswith("auto_model.encoder.")]
    assert max(map(len, found.values())) <= 2


def test_a_list_inside_of_a_block_is_part_of_it() -> None:
    model, batch = tiny("mobilebert")
    found = names_of(model, batch)
    assert list(found) == ["mobilebert.encoder.layer.0", "mobilebert.encoder.layer.1"]
    assert all("attention.output.dense" in names and "ffn.0.output.dense" in names for names in found.values())


class Backwards(nn.ModuleList):
    def __iter__(self) -> Iterator[nn.Module]:
        return reversed([self[number] for number in range(len(self))])


def of_no_list(layers: nn.ModuleList) -> nn.Module:
    return nn.Sequential(*layers)


@pytest.mark.parametrize("make_list", [of_no_list, Backwards], ids=["no list", "another order"])
def test_a_model_need_not_name_its_blocks_in_order(make_list: Callable[[nn.ModuleList], nn.Module]) -> None:
    model, batch = bert(), text_batch()
    model.bert.encoder.layer = make_list(model.bert.encoder.layer)
    if make_list is of_no_list:
        assert list(names_of(model, batch, ATTENTION)) == [WHOLE]
    assert_near(outputs(model, [batch]), plain(model, [batch]))
    modules = find_modules(model, batch)
    expected = naive_statistics(model, [batch], modules)["his"]
    assert_near(dict(collect_statistics(model, [batch], modules)["his"]), expected, within=1e-3)


def test_a_block_that_is_called_several_times_is_in_one_whole() -> None:
    model, batch = tiny("albert")
    assert list(names_of(model, batch)) == [WHOLE]
    assert len(names_of(model, batch)[WHOLE]) == 2


def test_the_tower_comes_before_the_language_model() -> None:
    tower = [f"model.vision_tower.encoder.layers.{number}" for number in range(3)]
    layers = [f"model.language_model.layers.{number}" for number in range(2)]
    model, batches = llava(), with_text()
    assert list(names_of(model, batches[0])) == list(names_of(model, batches[0], MLP)) == tower + layers
    modules = find_modules(model, batches[0], kinds=BOTH)
    assert list(blocks_of(model, modules, batches[1])) == tower + layers


def test_a_layer_that_is_called_out_of_order_is_said() -> None:
    model, batch = bert(), text_batch(labels=False)
    walk = Walk(model, {0: batch}, LAYERS[::-1], lambda _, batch: model(**batch))
    with unharmed(model), pytest.raises(UnsupportedModelError, match=f"{LAYERS[1]} is called after {LAYERS[0]}"):
        walk_on(walk)


def test_what_comes_after_the_last_block_that_is_read_is_not_run() -> None:
    model, batches, ran = causal_lm(), [padded([9, 4], "right"), padded([3, 7], "right")], list[str]()
    modules = find_modules(model, batches[0])
    for name, layer in (("last block", model.model.layers[1]), ("head", model.lm_head)):
        layer.register_forward_hook(lambda *_, name=name: ran.append(name))
    read_forward(model, batches, modules[:1], lambda _, read: [read(number) for number in range(2)] and None)
    assert ran == ["last block", "head"]  # to find the order of the blocks


@pytest.mark.parametrize("how", ["closed", "raises", "raises in a block", "fails at the end"])
@pytest.mark.parametrize(("own", "gradients"), [(False, False), (True, True)])
def test_an_abandoned_walk_leaves_the_model_as_it_was(how: str, own: bool, gradients: bool) -> None:
    model, batches = bert().train(), [text_batch(), text_batch(2, 7)]
    if own:  # as accelerate's hooks
        for layer in model.bert.encoder.layer:
            layer.forward = partial(type(layer).forward, layer)
    walk = walk_of(model, batches, {})

    def body() -> None:
        with closing(walk.forward(gradients=gradients)) as steps:
            for number, (_, calls) in enumerate(steps):
                if number == 1 and how == "closed":
                    return
                if number == 1 and how == "raises":
                    raise RuntimeError("stopped")
                for call in calls:
                    call.output = walk.compute(call)

    broken = {"raises in a block": model.bert.encoder.layer[1].output, "fails at the end": model.classifier}

    def fail(*_: object) -> None:
        raise RuntimeError("stopped")

    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            hook = broken[how].register_forward_hook(fail) if how in broken else None
            with unharmed(model):
                if how == "closed":
                    body()
                else:
                    with pytest.raises(RuntimeError, match="stopped"):
                        body()
            if hook is not None:
                hook.remove()
    model.eval()
    assert_near(outputs(model, batches), plain(model, batches))


def test_whoever_calls_the_model_on_the_way_gets_what_it_computes() -> None:
    model, batches, other = bert(), [text_batch(labels=False)], text_batch(3, 8, labels=False)
    (expected,) = plain(model, [other]).values()
    ends: dict[int, Tensor] = {}
    walk = walk_of(model, batches, ends)
    for _, calls in walk.forward():
        with torch.no_grad():
            assert_near(model(**other).logits, expected)
        for call in calls:
            call.output = walk.compute(call)
    assert_near(ends, plain(model, batches))


@pytest.mark.parametrize(
    ("dtype", "multiplies", "computes"),
    [
        (torch.float16, True, torch.float32),
        (torch.bfloat16, False, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
    ],
)
def test_a_block_in_half_precision_computes_where_it_is_fast_and_a_change_in_it_is_rounded(
    dtype: torch.dtype, multiplies: bool, computes: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes, "multiplies_bfloat16", lambda: multiplies)
    model, batch = bert().to(dtype), text_batch(labels=False)
    layer = model.bert.encoder.layer[1].output.dense
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    changed = (layer.weight.detach().float() * 1.37).to(dtype)
    walk, seen = walk_of(model, [batch], {}), list[torch.dtype]()
    with layer.register_forward_hook(lambda _, x, y: seen.extend([x[0].dtype, y.dtype])):
        for block, calls in walk.forward():
            if block == LAYERS[1]:
                layer.weight.data.mul_(1.37)
            for call in calls:
                call.output = walk.compute(call)
                assert (call.args[0].dtype, call.output.dtype) == (dtype, dtype)
            assert {p.dtype for p in model.get_submodule(block).parameters()} == {computes}
            assert model.classifier.weight.dtype == dtype
    assert seen == [computes] * 2
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    weights["bert.encoder.layer.1.output.dense.weight"] = changed
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("case", "dtype"), [("bert", torch.bfloat16), ("decoder", torch.float16), ("llava", torch.bfloat16)]
)
def test_statistics_in_half_precision_are_those_of_its_float32_copy(case: str, dtype: torch.dtype) -> None:
    make, make_batches = MODELS[case]
    model, batches = make().to(dtype), make_batches()
    same = make()
    same.load_state_dict(model.state_dict())
    modules = find_modules(same, batches[0], kinds=BOTH)
    expected = collect_statistics(same, batches, modules)
    plain(model, batches)
    with unharmed(model):
        found = collect_statistics(model, batches, modules)
    for what in ("his", "entropy"):
        largest = max(values.abs().max() for values in expected[what].values())
        for name, values in expected[what].items():
            assert (found[what][name] - values).abs().max() <= 0.05 * largest


def by_block(into: dict[str, list[list[Reading]]], count: int) -> Callable[[Any, Read], None]:
    """Return work that keeps all readings by the first module of a block."""

    def work(modules: Any, read: Read) -> None:
        into[modules[0].name] = [read(number) for number in range(count)]

    return work


@pytest.mark.parametrize(("case", "target"), [("bert", "effect"), ("llava", "loss")])
def test_a_block_can_be_read_again(case: str, target: Any) -> None:
    make, make_batches = MODELS[case]
    model, batches = make(), make_batches()
    modules = find_modules(model, batches[0], kinds=BOTH)
    gradients = Gradients(model, batches, modules, target)
    first: dict[str, list[list[Reading]]] = {}
    again: dict[str, list[list[Reading]]] = {}
    gradients.collect(by_block(first, len(batches)), keep=gradients.blocks)
    with unharmed(model):
        for block in gradients.blocks:  # the other way round
            gradients.collect_again(block, by_block(again, len(batches)))
    assert first.keys() == again.keys()
    for name, of_batches in first.items():
        for ones, others in zip(of_batches, again[name], strict=True):
            for one, other in zip(ones, others, strict=True):
                assert one.name == other.name
                assert torch.equal(one.real, other.real)
                for what in ("inputs", "gradients"):
                    assert_near(getattr(one, what), getattr(other, what))


def test_a_hidden_state_that_is_no_number_is_said_by_the_batch() -> None:
    model, batches = bert().train(), [text_batch(4), text_batch(5, 11)]
    modules = find_modules(model, batches[0], kinds=BOTH)

    def break_row(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.index_fill(0, torch.tensor([3]), float("nan")) if output.shape[:2] == (5, 11) else output

    with model.bert.encoder.layer[1].register_forward_hook(break_row), unharmed(model):
        with pytest.raises(NonFiniteError, match="batch 1 gave nan"):
            collect_statistics(model, batches, modules)
        for target, said in (("loss", "batch 1 gave nan"), ("effect", "predictions of batch 1 have NaN or infinity")):
            with pytest.raises(NonFiniteError, match=said):
                Gradients(model, batches, modules, target).collect()  # type: ignore[arg-type]


def test_calls_keep_what_they_were_made_with_and_no_graph() -> None:
    """Neither the readings nor what `collect_again` needs hold the graph that they come from."""
    model, batches = bert(), [text_batch()]
    modules = find_modules(model, batches[0], kinds=BOTH)
    gradients, seen = Gradients(model, batches, modules, "loss"), list[Mapping[str, Any]]()

    def work(inside: Any, read: Read) -> None:
        seen.extend(vars(one) for one in read(0))

    gradients.collect(work, keep=gradients.blocks)
    for block in gradients.blocks:
        gradients.collect_again(block, work)
    tensors = [value for one in seen for value in one.values() if isinstance(value, Tensor)]
    assert len(tensors) == 3 * 12
    assert not any(value.requires_grad or value.grad_fn for value in tensors)
