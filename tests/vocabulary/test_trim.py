"""A vocabulary without the tokens that a corpus does not use, against the whole one."""

import copy
import json
import re
from pathlib import Path

import pytest
import tokenizers
import torch
from support.models import generative_tokenizer, llava, llava_processor, vit
from support.neurons import half
from support.vocabularies import TOKENIZERS, byte_level, pages, reader, unigram, wordpiece
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from hies_export import find_modules, prune_units
from hies_export.data.batches import PIECE_KEY
from hies_export.errors import DataError, RequestError, UnsupportedModelError
from hies_export.forms.gguf.vocabulary import find_vocabulary
from hies_export.vocabulary.kept import check_request
from hies_export.vocabulary.recut import Recut, compare_cuts, pieces_of
from hies_export.vocabulary.trim import Trimmed, trim_vocabulary

FIRST, OTHER = pages()[::8], pages()[1::8]
CLASSES = {
    "BertForMaskedLM": wordpiece,
    "BertForSequenceClassification": wordpiece,
    "LlamaForCausalLM": byte_level,
    "LlamaForSequenceClassification": byte_level,  # takes one text only, without a padding token
    "Qwen2ForCausalLM": byte_level,
    "GPT2LMHeadModel": byte_level,
    "XLMRobertaForMaskedLM": unigram,
    "XLMRobertaModel": unigram,
}


def ids(tokenizer: PreTrainedTokenizerFast, text: str, **options: object) -> list[int]:
    found: list[int] = tokenizer(text, **options)["input_ids"]
    return found


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def trimmed(tokenizer: PreTrainedTokenizerFast) -> Trimmed:
    return trim_vocabulary(decoder(tokenizer), tokenizer, FIRST)


def decoder(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return reader("LlamaForCausalLM", tokenizer, num_hidden_layers=1)


def same_cuts(tokenizer: PreTrainedTokenizerFast, trimmed: Trimmed) -> int:
    """Return of how many texts all tokens stayed, after comparing what both tokenizers make of them."""
    assert len(trimmed.processor) <= len(trimmed.kept.rows) < len(tokenizer)
    found = [text for text in (*FIRST, *OTHER) if {*tokenizer.tokenize(text)} <= trimmed.processor.get_vocab().keys()]
    for text in found:
        assert trimmed.processor.tokenize(text) == tokenizer.tokenize(text)
        assert [trimmed.kept.rows[token] for token in ids(trimmed.processor, text)] == ids(tokenizer, text)
    return len(found)


def test_texts_of_kept_tokens_are_cut_into_the_same(tokenizer: PreTrainedTokenizerFast, trimmed: Trimmed) -> None:
    assert same_cuts(tokenizer, trimmed) >= len(FIRST)


def test_the_smaller_tokenizer_is_the_tokenizer_with_the_other_tokens_struck_out(
    tokenizer: PreTrainedTokenizerFast, trimmed: Trimmed
) -> None:
    """What it makes of any text is right by another road: special tokens, and text that it gives back."""
    smaller = trimmed.processor
    assert smaller.all_special_tokens == tokenizer.all_special_tokens
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    gives_back = described["model"].get("byte_fallback") or described["decoder"]["type"] == "ByteLevel"
    for text in (*OTHER, "Ünïcødé 汉字 🙂 and <|tool|> zxqj"):
        before, after = ids(tokenizer, text), ids(smaller, text)
        assert not gives_back or smaller.decode(after) == tokenizer.decode(before)
        # No character is lost that was not lost before.
        assert after.count(smaller.unk_token_id) <= max(1, before.count(tokenizer.unk_token_id) * 2)
    assert ids(smaller, "") == [trimmed.kept.numbers[token] for token in ids(tokenizer, "")]


def test_what_is_unknown_stays_as_unlikely() -> None:
    """Without the least likely token, "a" as an unknown token and "bc" would be likelier than "ab" and "c"."""
    pieces = [("xyz", -2.0), ("zzz", -30.0), ("bc", -1.0), ("ab", -12.0), ("<unk>", 0.0), ("c", -12.0)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=4))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    trimmed = trim_vocabulary(reader("LlamaForCausalLM", tokenizer), tokenizer, ["abc"])
    assert tokenizer.tokenize("abc") == trimmed.processor.tokenize("abc") == ["ab", "c"]
    assert trimmed.processor.get_vocab().keys() == {"zzz", "ab", "<unk>", "c"}
    assert ids(trimmed.processor, "d") == [trimmed.processor.unk_token_id] == [2]


@pytest.mark.parametrize("name", CLASSES)
def test_outputs_are_those_of_the_dense_model_also_when_loaded(name: str, tmp_path: Path) -> None:
    options = {"tie_word_embeddings": name != "LlamaForCausalLM"}
    options |= {"pad_token_id": None} if name == "LlamaForSequenceClassification" else {}
    model = reader(name, CLASSES[name](), **options)
    # The tokenizer is loaded beside such a model, as some types have tokenizers of their own.
    model.config.save_pretrained(tmp_path)
    CLASSES[name]().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    trimmed = trim_vocabulary(model, tokenizer, FIRST)
    slim, rows = trimmed.model, list(trimmed.kept.rows)
    assert slim.config.vocab_size == len(rows) < model.config.vocab_size
    for text in FIRST[:5]:
        dense_inputs = {"input_ids": torch.tensor([ids(tokenizer, text)])}
        inputs = {"input_ids": torch.tensor([ids(trimmed.processor, text)])}
        with torch.no_grad():
            expected, found = (one.eval()(**given)[0] for one, given in ((model, dense_inputs), (slim, inputs)))
        expected = expected[..., rows] if expected.shape[-1] == model.config.vocab_size else expected
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for tensors in (slim.get_input_embeddings(), slim.get_output_embeddings()):
        if tensors is not None:
            assert getattr(tensors, "num_embeddings", getattr(tensors, "out_features", None)) == len(rows)
    if (pad := model.get_input_embeddings().padding_idx) is not None:
        assert slim.get_input_embeddings().padding_idx == trimmed.kept.numbers[pad]
    # The dense model is as it was, and tied weights are still one.
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    tied = model.get_output_embeddings()
    if tied is not None:
        assert (slim.get_output_embeddings().weight is slim.get_input_embeddings().weight) == (
            tied.weight is model.get_input_embeddings().weight
        )

    slim.save_pretrained(tmp_path)
    trimmed.processor.save_pretrained(tmp_path)
    loaded, info = type(slim).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    written = slim.state_dict()
    assert all(torch.equal(value, written[key]) for key, value in loaded.state_dict().items())
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert [ids(again, text) for text in pages()] == [ids(trimmed.processor, text) for text in pages()]
    assert loaded.get_input_embeddings().padding_idx in (None, again.pad_token_id)
    assert loaded.config.pad_token_id == (None if "pad_token_id" in options else again.pad_token_id)
    assert again.pad_token_id == trimmed.processor.pad_token_id
    assert loaded.config.eos_token_id == again.eos_token_id


def test_heads_that_were_cut_stay_cut() -> None:
    tokenizer = wordpiece()
    model = reader("BertForMaskedLM", tokenizer)
    batch = tokenizer(list(FIRST[:2]), return_tensors="pt", padding=True)
    modules = find_modules(model, batch, kinds=("attention", "mlp"))
    uneven = half(modules) | {modules[0].name: modules[0].kept(range(3))}
    slim = prune_units(model, uneven, modules)
    trimmed = trim_vocabulary(slim, tokenizer, FIRST)
    inputs = trimmed.processor(list(FIRST[:2]), return_tensors="pt", padding=True)
    with torch.no_grad():
        expected, found = slim.eval()(**batch).logits, trimmed.model.eval()(**inputs).logits
    torch.testing.assert_close(found, expected[..., list(trimmed.kept.rows)], rtol=1e-5, atol=1e-5)


def test_tokens_that_a_config_names_stay_and_are_renumbered() -> None:
    tokenizer = byte_level()
    last = len(tokenizer) + 6  # one that the tokenizer does not know
    model = reader("LlamaForCausalLM", tokenizer)
    names = tokenizer.convert_ids_to_tokens([700, 701])
    model.generation_config.suppress_tokens = [700]
    model.generation_config.bad_words_ids = [[701, 700]]
    model.generation_config.sequence_bias = [[[701, 700], 700.0]]
    model.config.eos_token_id = model.generation_config.eos_token_id = [0, last]
    model.config.image_newline_id = 700
    trimmed = trim_vocabulary(model, tokenizer, ["the the the"])
    generation, slim = trimmed.model.generation_config, trimmed.model.config
    assert generation.suppress_tokens == trimmed.processor.convert_tokens_to_ids(names[:1])
    assert generation.bad_words_ids == [trimmed.processor.convert_tokens_to_ids(names)[::-1]]
    assert generation.sequence_bias == [[generation.bad_words_ids[0], 700.0]]
    assert [slim.image_newline_id] == generation.suppress_tokens
    assert slim.eos_token_id == generation.eos_token_id == [0, slim.vocab_size - 1]
    assert model.generation_config.suppress_tokens == [700]
    model.generation_config.sequence_bias = {(701, 700): 2.0}
    as_keys = trim_vocabulary(model, tokenizer, ["the the the"]).model.generation_config
    assert as_keys.sequence_bias == {tuple(generation.bad_words_ids[0]): 2.0}


def test_a_padding_token_that_positions_are_counted_from_keeps_its_number() -> None:
    tokenizer = unigram()
    model = reader("XLMRobertaModel", tokenizer, pad_token_id=700, max_position_embeddings=900)
    trimmed = trim_vocabulary(model, tokenizer, FIRST[:5])
    assert trimmed.kept.rows[:701] == tuple(range(701))
    assert trimmed.model.embeddings.position_embeddings.padding_idx == 700


def test_blank_texts_are_left_out() -> None:
    tokenizer = byte_level()
    plain, blank = (
        trim_vocabulary(decoder(tokenizer), tokenizer, texts) for texts in (FIRST[:9], ["", *FIRST[:9], " \n"])
    )
    assert blank.kept == plain.kept


def test_a_processor_of_images_and_text_goes_on_reading() -> None:
    words = ["<pad>", "<unk>", "<s>", "</s>", "no", "maybe", *"abc", "yes", "<image>"]
    model, processor = llava(vocab_size=40), llava_processor(generative_tokenizer(words))
    model.config.image_token_id = 10
    trimmed = trim_vocabulary(model, processor, ["a b c", "yes"])
    assert trimmed.model.config.image_token_id == trimmed.processor.tokenizer.convert_tokens_to_ids("<image>")
    assert trimmed.processor.image_token_id == trimmed.model.config.image_token_id
    assert trimmed.model.config.text_config.vocab_size == len(trimmed.kept.rows) == 9
    assert (len(processor.tokenizer), processor.image_token_id, model.config.image_token_id) == (11, 10, 10)


@pytest.mark.parametrize("kind", ["BPE of bytes, words whole", "BPE with bytes for the unknown"])
def test_llama_cpp_gets_the_rows_that_stay(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    trimmed = trim_vocabulary(decoder(tokenizer), tokenizer, FIRST)
    whole = find_vocabulary(tokenizer, size=trimmed.kept.total)
    found = find_vocabulary(trimmed.processor, size=len(trimmed.kept.rows))
    for name in ("token_list", "token_types"):
        assert found[name] == [whole[name][row] for row in trimmed.kept.rows]
    special = {name for name in whole if name.endswith("_token_id")}
    assert {name: found[name] for name in special} == {name: trimmed.kept.numbers[whole[name]] for name in special}
    known = {*found["token_list"]}
    merges = [merge for merge in whole.get("token_merges", ()) if {*merge.split(), "".join(merge.split())} <= known]
    assert [*found.get("token_merges", ())] == merges


CHATS = {
    "roles": "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "spaces, and no system": "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
    "{{ ' [Q] ' + m['content'] + ' [A] ' if m['role'] == 'user' else m['content'] }}{% endfor %}",
    "tools": "{% if tools %}Call one of the tools: {{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ m['role'] }}: {% if m['tool_calls'] is defined %}"
    "{% for c in m['tool_calls'] %}calling {{ c['function']['name'] }};{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}",
}


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_is_read_in_the_same_tokens(chat: str) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = CHATS[chat]
    texts = [text for text in FIRST if re.match("[A-Z][a-z]+ ", text)][:20]
    smaller = trim_vocabulary(reader("LlamaForCausalLM", tokenizer), tokenizer, texts).processor
    for text in texts:
        name = text.split()[0]
        tool = {"type": "function", "function": {"name": name, "description": name, "parameters": {}}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": name}}]}
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        for more in ([], [call, {"role": "tool", "content": text}], [{"role": "system", "content": text}]):
            if more and chat == "spaces, and no system":
                continue
            rendered = tokenizer.apply_chat_template([*more, *turns], tools=[tool], tokenize=False)
            assert smaller.tokenize(rendered) == tokenizer.tokenize(rendered)


def test_pieces_of_tokens_that_went_have_their_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """What a batch is read as without the tokens that went, beside what the smaller tokenizer makes of its texts."""
    tokenizer = copy.deepcopy(tokenizer)
    trimmed = trim_vocabulary(decoder(tokenizer), tokenizer, FIRST[:20])
    tokenizer.pad_token_id = 3
    dense = [
        {name: tokenizer(text, return_tensors="pt")[name] for name in ("input_ids", "attention_mask")} for text in OTHER
    ]
    numbers = trimmed.kept.numbers
    cut = pieces_of(tokenizer, trimmed.processor, 0)
    recut = Recut(trimmed.kept, cut, tokenizer.decode, labels=True, shift=1, pad=0, limit=None)
    both = recut.batches(dense)
    counts = []
    for text, before, after in zip(OTHER, *both, strict=True):
        old, new = before["input_ids"][0].tolist(), after["input_ids"][0].tolist()
        assert (after[PIECE_KEY][0] <= 1).sum() == len(old)
        if numbers.keys() >= {*old}:
            assert new == [numbers[token] for token in old]
        counts.append((len(new), len(ids(trimmed.processor, text))))
    # Beside each other, pieces are rarely cut otherwise.
    assert sum(count for count, _ in counts) == pytest.approx(sum(count for _, count in counts), rel=0.05)
    found = compare_cuts(*both, trimmed.kept)
    went = sum(not numbers.keys() >= {*batch["input_ids"][0].tolist()} for batch in dense)
    assert (found.texts, found.otherwise) == (len(OTHER), went)
    assert found.dense_tokens == sum(len(ids(tokenizer, text)) for text in OTHER)
    assert 0 < found.share_otherwise <= 1 < found.tokens_ratio


def test_the_rest_of_a_word_is_cut_into_rests() -> None:
    tokenizer = wordpiece()
    smaller = trim_vocabulary(reader("BertModel", tokenizer), tokenizer, FIRST[:20]).processor
    cut = pieces_of(tokenizer, smaller, 0)
    went = [token for token in tokenizer.get_vocab().keys() - smaller.get_vocab().keys() if token.startswith("##")]
    assert len(went) > 10
    for token in went:
        pieces = smaller.convert_ids_to_tokens(cut(tokenizer.convert_tokens_to_ids(token)))
        assert all(piece.startswith("##") for piece in pieces)
        assert "".join(piece.removeprefix("##") for piece in pieces) == token.removeprefix("##")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"texts": []}, "there must be texts .*, got none"),
        ({"texts": "one text"}, "texts must be a list of texts, got 'one text'"),
        ({"texts": ["a", 3]}, "texts must be a list of texts, got 3"),
        ({"texts": [" "]}, "the texts must use some tokens, but none but special ones occurs in them"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, object], problem: str) -> None:
    tokenizer = wordpiece()
    texts = options.pop("texts", list(FIRST))
    model = reader("BertModel", tokenizer, spare=0)
    with pytest.raises((DataError, RequestError), match=problem):
        trim_vocabulary(model, tokenizer, texts, **options)  # type: ignore[arg-type]


def test_models_and_tokenizers_that_do_not_fit_are_refused() -> None:
    tokenizer, texts = wordpiece(), list(FIRST)
    with pytest.raises(UnsupportedModelError, match=r"one vocabulary to cut, but this ViTFor\w+ has none"):
        trim_vocabulary(vit(), tokenizer, texts)
    with pytest.raises(
        RequestError, match=r"must be the model's own, but it has token \d+, and the model has \d+ rows"
    ):
        trim_vocabulary(reader("BertModel", tokenizer, spare=-9, pad_token_id=0), tokenizer, texts)
    with pytest.raises(RequestError, match=r"a vocabulary is cut in a tokenizer.json, but a str has none"):
        check_request("slow", texts)
    dropping = byte_level()
    dropping.backend_tokenizer.model.dropout = 0.1
    with pytest.raises(RequestError, match=r"merges .* must be the same for every text .* dropout: 0.1"):
        trim_vocabulary(reader("LlamaForCausalLM", dropping), dropping, texts)
