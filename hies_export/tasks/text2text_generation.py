"""Text made of text or of speech, by encoder-decoders such as T5, BART, Marian and Whisper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..errors import DataError, refusing
from .late import data, torch
from .text_generation import TextGeneration

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..data import Batch
    from ..recipe.sections import Columns


class Text2TextGeneration(TextGeneration):
    """Encoder-decoders that make text of text, such as translators and summarisers.

    Every token of a target is predicted from the source and the target's tokens before it (teacher forcing): from
    logits, (batch, target tokens, vocabulary), at the place of the label.
    """

    name = "text2text-generation"
    auto_class = "AutoModelForSeq2SeqLM"
    reads = ()
    needs = "batches, in memory only"
    inputs: ClassVar[str] = "input_ids, attention_mask and labels"
    in_parts = True  # an encoder, and a decoder that takes a cache
    decodes_text = False
    only_encoder_decoders = True
    on_hub = False  # its pipeline is gone, from the Hub and from transformers 5

    metrics = ("perplexity", "token_accuracy")
    word = "target token"
    shift = 0

    @classmethod
    def refusal(cls, columns: Any) -> str:
        """Return that recipes cannot name it."""
        return (
            f"{cls.name} is pruned in memory only, from batches: encoder-decoders are not exported; call "
            "hies_export.prune, and save what it returns"
        )

    @classmethod
    def usual_columns(cls, features: Mapping[str, Any]) -> NoReturn:
        """Refuse a data set whose columns are not the model's inputs."""
        raise DataError(f"{cls.name} needs batches, or a data set, with {cls.inputs}, got {', '.join(features)}")

    def to_read(self, columns: Columns, processor: Any = None) -> NoReturn:
        """Refuse to read rows: its batches come from the user."""
        raise DataError(f"{self.name} needs batches with {self.inputs}, and no columns=; leave it out")

    def canonical(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return a batch with the decoder's inputs, and a mask of those up to the last label.

        Without labels, the model's own answers are the target.
        """
        if "labels" not in batch:
            batch = answered(model, batch)
        labels = batch["labels"]
        inputs = batch["decoder_input_ids"] if "decoder_input_ids" in batch else shift_right(model, labels)
        later = (labels != data.IGNORED).flip(-1).cumsum(-1).flip(-1)  # labels from here on
        mask = (later > 0).to(torch.int64)
        return {"decoder_attention_mask": mask, **batch, "decoder_input_ids": inputs}

    def own_labels(self, model: PreTrainedModel, batch: Batch, output: Tensor) -> Tensor:
        """Return the likeliest token at every real place of the target, (batch, target tokens)."""
        likeliest = output.argmax(-1)
        mask = batch.get("decoder_attention_mask")
        return likeliest if mask is None else likeliest.where(mask.to(output.device) != 0, data.IGNORED)


class AutomaticSpeechRecognition(Text2TextGeneration):
    """Encoder-decoders that write down speech."""

    name = "automatic-speech-recognition"
    auto_class = "AutoModelForSpeechSeq2Seq"
    inputs = "input_features (or the model's other input) and labels"
    text = False
    on_hub = True


def shift_right(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """Return the decoder's inputs for labels: the labels shifted right by one, after the start token."""
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    must = f"a {type(model).__name__} must make the decoder's inputs of labels, but does not"
    tokens = "decoder_start_token_id and pad_token_id"
    with refusing(must, f"set {tokens} in its config, or give batches with decoder_input_ids"):
        if make is not None:
            own: Tensor = make(labels=labels)
            return own
        found = labels.roll(1, -1)
        found[:, 0] = start = model.config.decoder_start_token_id
    pad = model.config.get_text_config().pad_token_id
    return found.masked_fill(found == data.IGNORED, start if pad is None else pad)


def answered(model: Any, batch: Batch) -> Batch:
    """Return a batch with the model's own answers, decoded greedily, as labels up to the first end of text."""
    from ..model.modes import evaluating

    if "decoder_input_ids" in batch:
        raise DataError(
            "a batch must have labels, the target's tokens, beside decoder_input_ids, but one has none; without "
            "either, the model's own answers are the target"
        )
    must = f"a {type(model).__name__} must answer batches without labels, but does not"
    with refusing(must, "give labels, the tokens of the target"), evaluating(model):
        inputs = {key: value.to(model.device) for key, value in batch.items()}
        found = model.generate(**inputs, do_sample=False, num_beams=1, return_dict_in_generate=True)
        tokens = found.sequences.cpu()  # with the prompt, which Whisper leaves out of what it returns otherwise
    labels, ends = tokens[:, 1:], torch.tensor(model.generation_config.eos_token_id)
    ended = torch.isin(labels, ends).long()
    labels = labels.masked_fill(ended.cumsum(-1) - ended > 0, data.IGNORED)
    own = torch.ones(len(labels), dtype=torch.bool)
    return {**batch, "decoder_input_ids": tokens[:, :-1], "labels": labels, data.OWN_KEY: own}
