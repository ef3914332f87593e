"""Text that goes on from text."""

from __future__ import annotations

import logging
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from ..errors import DataError, refusing
from ..late import PreTrainedModel, Tensor, datasets, np, torch
from . import prompts
from .conversations import check_conversations, columns_of_chats, tokenize_conversation
from .late import Batch, data
from .prompts import Choices, template_fields
from .registry import register_task
from .task import AnyTask, Predictions, Task, Use, batched

logger = logging.getLogger(__name__)

# Default tokens of a block of plain text, if the model takes as many.
BLOCK_LENGTH = 512
# Stands for a token that is read in pieces, all of which are predicted.
WHOLE = -1
# The one column of samples that are packed blocks.
BLOCK = "input_ids"
# Texts that are tokenised at once.
TEXTS = 1000
# Most bytes of float32 logits that one forward pass of several samples gives, and that are copied at once.
LOGITS_BYTES = 128 << 20
COPIED_BYTES = 64 << 20
# The tokens of a sample, and which of them are labels.
Tokens = tuple[list[int], list[bool]]


@register_task
class TextGeneration(Task):
    """Language models: decoders of text alone.

    Every next token is predicted, from logits, (batch, tokens, vocabulary). Rows are plain text, conversations, or
    prompts with answers. With several choices, the right one becomes the answer (`right_choice`), or every choice is
    read (`in_full`).

    Batches have `labels` (batch, longest), the tokens themselves, not shifted: all of a plain text, only the answer's
    after a prompt or the assistant's of a conversation, -100 elsewhere.
    """

    name = "text-generation"
    auto_class = "AutoModelForCausalLM"
    reads: ClassVar[tuple[str, ...]] = ("text", "messages", "prompt answer", "prompt answer label")
    needs = "data.text (one column), data.messages, or data.prompt and data.answer"
    a_row_is_a_sample = False
    generative = decodes_text = places_by_labels = True

    predicts = "tokens"
    metrics: tuple[str, ...] = ("perplexity",)
    word = "next token"
    shift = 1
    # Whether every choice becomes a row of a batch to judge, without the end-of-text token. Such batches describe their
    # rows (`CHOICE_KEYS`), and predictions are those of choices.
    every_choice = False

    # How rows are read.

    @classmethod
    def usual_columns(cls, features: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the columns on which chat models are tuned, see `columns_of_chats`; None if there are none."""
        return columns_of_chats(features) if "messages" in cls.reads else None

    def in_full(self: AnyTask) -> AnyTask:
        """Return a copy of the task that reads every choice, and is judged by their likelihoods."""
        return self._changed(every_choice=True)

    def tokens(self, samples: datasets.Dataset) -> Iterator[Tensor]:
        """Yield the tokens, (tokens,) int64, of each block, or of each row without a limit on its length."""
        if samples.column_names == [BLOCK]:
            yield from map(torch.tensor, data.column_values(samples, BLOCK))
        else:
            yield from (torch.tensor(ids) for ids, _ in self._rows(samples, "judge", None)[0])

    @property
    def template(self) -> dict[str, str]:
        """The prompt's template and the column of answers."""
        return {"prompt": str(self.columns.prompt), "answer": str(self.columns.answer)}

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse conversations and prompts without an answer, or without the number of the right choice."""
        if self.columns.messages:
            check_conversations(rows, self.columns.messages, self.processor)
        if not self.columns.prompt:
            return
        prompts.check_prompt(rows, **self.template)
        if self.columns.label:
            prompts.right_choice(rows, answer=self.template["answer"], label=self.columns.label)

    def samples(self, rows: datasets.Dataset) -> datasets.Dataset:
        """Return packed blocks of plain text; of other rows, each is a sample."""
        if self.columns.prompt or self.columns.messages or not self.columns.packing:
            return rows
        length = self._limit() or BLOCK_LENGTH
        if self.columns.max_length is None:
            length = min(length, BLOCK_LENGTH)
        return pack_text(rows, column=self.columns.text[0], tokenizer=self.processor, length=length - len(self._begin))

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of blocks or of plain texts, or of prompts with answers or conversations, cut on the left."""
        if samples.column_names == [BLOCK]:
            yield from (self._batch_of_blocks(samples, part) for part in batched(range(len(samples)), size))
            return
        counted, choices = self._rows(samples, use, self._limit())
        for part in batched(range(len(counted)), size):
            batch = self._labelled([counted[row] for row in part])
            if self.columns.messages:
                batch[data.CHAT_KEY] = torch.ones(len(part), dtype=torch.bool)
            yield batch if choices is None else batch | choices.of(part)

    def _rows(self, samples: datasets.Dataset, use: Use, limit: int | None) -> tuple[list[Tokens], Choices | None]:
        """Return the tokens of each row, at most `limit`, and the description of choices; None without choices."""
        tokenizer = data.tokenizer_of(self.processor)
        if not self.columns.prompt:
            read = self._conversations if self.columns.messages else self._plain_texts
            return read(samples, tokenizer, limit), None
        samples, choices = self.with_one_answer(samples, use)
        read_texts = self.tokenized(samples, enumerate(self.texts(samples)), choices, limit)
        return [cut_on_the_left(ids, judged, limit, tokenizer) for _, ids, judged in read_texts], choices

    def with_one_answer(self, samples: datasets.Dataset, use: Use) -> tuple[datasets.Dataset, Choices | None]:
        """Return the samples with one answer each, and None; or each once for every choice, and their description."""
        if not self.columns.label:
            return samples, None
        columns = {"answer": self.template["answer"], "label": self.columns.label}
        if self.every_choice and use in ("judge", "time"):
            return prompts.one_row_per_choice(samples, **columns)
        return prompts.right_choice(samples, **columns), None

    def texts(self, samples: datasets.Dataset) -> datasets.Dataset:
        """Return only the columns that prompts and answers need, because reading a row decodes its images."""
        return samples.select_columns(list({*template_fields(self.template["prompt"]), self.template["answer"]}))

    def prompt_and_answer(self, row: dict[str, Any], choice: str | None = None) -> tuple[str, str]:
        """Return the prompt of a row, and its answer or the given choice."""
        return prompts.filled(row if choice is None else {**row, self.template["answer"]: choice}, **self.template)

    def _limit(self) -> int | None:
        """Return how many tokens a sample may have; None for no limit."""
        return data.token_limit(data.tokenizer_of(self.processor), self.config, self.columns.max_length)

    @cached_property
    def _begin(self) -> list[int]:
        """What every block begins with: the begin-of-text token if it is asked for, or by default added; or nothing."""
        token, asked = self.processor.bos_token_id, self.columns.bos
        if asked is True and token is None:
            raise DataError("data.bos must be false or auto for a tokenizer without begin-of-text token, got true")
        added = asked == "auto" and self.processor("a", verbose=False)["input_ids"][:1] == [token]
        return [token] if asked is True or added else []

    def _batch_of_blocks(self, samples: datasets.Dataset, part: list[int]) -> Batch:
        """Return the packed blocks with the numbers in `part` as a batch, (blocks, tokens), without padding.

        All tokens are labels but the begin-of-text token that may be put in front of each block.
        """
        ids = torch.tensor([self._begin + block for block in samples[part][BLOCK]])
        data.check_vocabulary(ids, self.config)
        labels = ids.clone()
        labels[:, : len(self._begin)] = data.IGNORED
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def _plain_texts(self, samples: datasets.Dataset, tokenizer: Any, limit: int | None) -> list[Tokens]:
        """Return the tokens of each text, cut on the right, all of which are labels. Blank rows are left out."""
        column, found = self.columns.text[0], []
        for row, text in enumerate(samples[column][:]):
            if not text.strip():
                continue
            ids = tokenizer(text, truncation=limit is not None, max_length=limit, verbose=False)["input_ids"]
            if len(ids) < 2:
                raise DataError(
                    "a text must have at least two tokens to predict one from the other, but "
                    f"{data.row_name(samples, row)} has {len(ids)} in {column!r}; remove it, raise max_length or pack "
                    "the texts into blocks"
                )
            found.append((ids, [True] * len(ids)))
        if len(found) < len(samples):
            blank = len(samples) - len(found)
            logger.warning("%d of %d rows are blank in %r and left out", blank, len(samples), column)
        return found

    def tokenized(
        self,
        samples: datasets.Dataset,
        texts: Iterable[tuple[int, dict[str, Any]]],
        choices: Choices | None,
        limit: int | None,
    ) -> Iterator[tuple[str, list[int], list[bool]]]:
        """Yield prompt and answer of rows as one text, its token ids, and a mask of the answer's.

        `texts` are rows of `texts(samples)` with their numbers. Nothing is cut, and a DataError refuses rows without a
        prompt or an answer, or with an answer of `limit` tokens or more.
        """
        tokenizer = data.tokenizer_of(self.processor)
        end = prompts.end_of_text(tokenizer) if choices is None else ""
        for number, row in texts:
            prompt, answer = self.prompt_and_answer(row, None if choices is None else choices.text[number])
            text = prompt + prompts.answer_text(prompt, answer, end)
            ids, judged = prompts.tokenize_spans(text, [(len(prompt), len(text))], tokenizer)
            name, count = data.row_name(samples, number), sum(judged)
            if count in (0, len(judged)):
                what = "an answer" if count == 0 else "a prompt"
                raise DataError(f"every row must have {what} of at least one token, but {name} has none")
            if limit is not None and count >= limit:
                raise DataError(
                    f"answers are never cut and need a token before them, but {name} has {count} answer tokens and "
                    f"at most {limit} tokens are read; leave such rows out, or raise max_length if it is given and the "
                    "model takes more"
                )
            yield text, ids, judged

    def _conversations(self, samples: datasets.Dataset, tokenizer: Any, limit: int | None) -> list[Tokens]:
        """Return the tokens of each conversation, cut on the left; the assistant's are labels."""
        found, unclear, end = [], 0, prompts.end_of_text(tokenizer)
        for number, row in enumerate(samples.select_columns(list(self.columns.messages))):
            name = data.row_name(samples, number)
            with refusing(f"the chat template must render every conversation, but fails on {name}", kind=DataError):
                parts = [row[column] for column in self.columns.messages]
                ids, judged, clear = tokenize_conversation(parts, tokenizer, end)
            if not any(judged[1:]):
                raise DataError(f"every conversation must have a token of the assistant's, but {name} has none")
            unclear += not clear
            found.append(cut_on_the_left(ids, judged, limit, tokenizer))
        if unclear:
            logger.warning(
                "the chat template does not tell which tokens of %d of %d conversations are the assistant's, so all of "
                "them count; give it {%% generation %%} around these",
                unclear,
                len(samples),
            )
        return found

    def _labelled(self, samples: Sequence[Tokens]) -> Batch:
        """Return samples as a padded batch, (samples, longest), whose labels are `IGNORED` but at judged tokens."""
        found = {
            "input_ids": [ids for ids, _ in samples],
            "attention_mask": [[1] * len(ids) for ids, _ in samples],
            "labels": [[t if is_judged else data.IGNORED for t, is_judged in zip(*of, strict=True)] for of in samples],
        }
        return data.as_batch(found, data.tokenizer_of(self.processor), self.config)

    def parts(self, batch: Batch) -> list[Batch]:
        """Return a batch divided so that the float32 logits of several samples take at most `LOGITS_BYTES`."""
        vocabulary = getattr(self.config.get_text_config(), "vocab_size", None)
        if vocabulary is None or "input_ids" not in batch:
            return super().parts(batch)
        return data.in_rows(batch, max(1, LOGITS_BYTES // (4 * vocabulary * batch["input_ids"].shape[1])))

    def canonical(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return a batch with labels: by default the text itself, as in training on plain text."""
        return {**batch, "labels": text_labels(model, batch)}

    # How units are scored.

    def own_labels(self, model: PreTrainedModel, batch: Batch, output: Tensor) -> Tensor:
        """Return the likeliest token at each of the `judged_tokens`, (batch, tokens)."""
        from ..model.tokens import judged_tokens

        predicted = output.argmax(-1)
        labels = predicted.roll(self.shift, -1)
        labels[:, : self.shift] = data.IGNORED
        return labels.where(judged_tokens(model, batch, labels), data.IGNORED)

    def losses(self, labels: Tensor) -> Tensor:
        """Return the number of label tokens of each sample, (batch,)."""
        return self.predicting(labels).sum(-1)

    def predicting(self, labels: Tensor) -> Tensor:
        """Return which outputs predict a label, (batch, tokens - shift) bool.

        `labels` are (batch, tokens), not shifted, as models take them; -100 means no loss.
        """
        return labels[:, self.shift :] != data.IGNORED

    def next_tokens(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return which outputs predict a token of the text: those in front of its labels, by default of all of it."""
        return self.predicting(text_labels(model, batch))

    def effect(self, model: PreTrainedModel, batch: Batch, output: Tensor, number: int) -> Tensor:
        """Return the log-probability of tokens that the model would write, summed over each sample, (batch,), in nats.

        One token is drawn from the prediction at the place of each label, so the squared gradient is half of the change
        of the KL divergence on average (Martens 2020, https://arxiv.org/abs/1412.1193, section 5). That of the labels
        is not: those that the model does not expect have by far the largest gradients. Nor is that of the likeliest
        tokens, which is small where the model is certain.
        """
        of_text = self.shift > 0 or "labels" in batch
        labels = text_labels(model, batch) if of_text else self.own_labels(model, batch, output)
        where = self.predicting(labels.to(output.device)).nonzero().unbind(-1)
        found = output[where].float().log_softmax(-1)  # (label tokens, vocabulary)
        generator = torch.Generator(found.device).manual_seed(number)
        found = found.gather(-1, found.detach().exp().multinomial(1, generator=generator))[:, 0]
        return found.new_zeros(len(output)).index_add(0, where[0], found)

    # How predictions are judged.

    def check_batches(self, batches: Sequence[Batch]) -> None:
        """Refuse samples without a label token to compute a loss from."""
        for index, labels in enumerate(batch["labels"] for batch in batches if "labels" in batch):
            if not self.predicting(labels).any(-1).all():
                raise DataError(
                    f"every sample must have a label token{' after its first token' * self.shift}, but one of batch "
                    f"{index} (from 0) has none; leave such samples out or raise max_length"
                )

    def keep(self, output: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Return the likeliest tokens and the label tokens' negative log-likelihoods, (label tokens,) each, in nats."""
        where = self.predicting(batch["labels"]).nonzero().unbind(-1)
        wanted = batch["labels"][:, self.shift :][where]
        tokens, nll, size = [], [], max(1, COPIED_BYTES // (4 * output.shape[-1]))
        for row, position, label in zip(*(part.split(size) for part in (*where, wanted)), strict=True):
            part = output[row.to(output.device), position.to(output.device)].float()  # (rows, vocabulary)
            tokens.append(part.argmax(-1).cpu())
            nll.append(torch.nn.functional.cross_entropy(part, label.to(part.device), reduction="none").cpu())
        return torch.cat(tokens), torch.cat(nll)

    def join(self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Batch]) -> Predictions:
        """Return the predictions of all label tokens, teacher-forced; or of choices, if every row is one."""
        tokens, nll = (torch.cat(values) for values in zip(*kept, strict=True))
        counts = torch.cat([self.losses(batch["labels"]) for batch in batches]).cpu()
        sample, characters = torch.arange(len(counts)).repeat_interleave(counts), None
        if "characters" in batches[0]:
            characters = torch.cat([batch["characters"] for batch in batches]).double()
        if data.PIECE_KEY in batches[0] and "choice" not in batches[0]:
            pieces = self._at_labels(batches, data.PIECE_KEY)
            tokens, sample = of_pieces(pieces, tokens, self._at_labels(batches, "labels")), sample[pieces <= 1]
            nll = nll.new_zeros(len(tokens)).index_add(0, (pieces <= 1).cumsum(0) - 1, nll)
        joint = self._are_answers(batches)
        found = Predictions(self.predicts, tokens, sample, joint=joint, nll=nll, characters=characters)
        return choice_likelihoods(found, batches) if "choice" in batches[0] else found

    def _at_labels(self, batches: Sequence[Batch], key: str) -> Tensor:
        """Return the values of a key of batches at the label tokens, (label tokens,)."""
        found = [batch[key][:, self.shift :][self.predicting(batch["labels"])] for batch in batches]
        return torch.cat(found).cpu()

    def _are_answers(self, batches: Sequence[Batch]) -> bool:
        """Return whether the label tokens of a sample are one answer to a prompt, judged as a whole.

        In plain text and conversations, and where labels stand at the places of their tokens, each is a prediction of
        its own. A prompt is known by real tokens after the first that have no label, so one of a single token is not.
        Tokens that end or pad a text tell nothing: collators that pad with the end of text take its label away
        everywhere, and may leave out the mask.
        """
        from ..model.tokens import token_ids

        config = self.config.get_text_config()
        ends = [token for name in ("eos_token_id", "pad_token_id") for token in token_ids(getattr(config, name, None))]
        for batch in batches if self.shift else ():
            if data.CHAT_KEY in batch:
                return False
            labels = batch["labels"]
            own = {name: given for name, given in batch.items() if given.shape == labels.shape}
            mask, ids = own.get("attention_mask", torch.ones_like(labels)), own.get("input_ids", labels)
            tells = (mask != 0) & ~torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))
            if bool((tells & (mask.cumsum(-1) > 1) & (labels == data.IGNORED)).any()):
                return True
        return False

    def references(self, batches: Sequence[Batch]) -> Tensor:
        """Return the label tokens, (label tokens,) int64, or the right choices, (questions,) int64."""
        if "choice" in batches[0]:
            question, right = (torch.cat([batch[key] for batch in batches]).cpu() for key in ("question", "right"))
            questions, place = question.unique(return_inverse=True)
            return torch.zeros(len(questions), dtype=torch.int64).scatter(0, place, right)
        labels = self._at_labels(batches, "labels")
        pieces = self._at_labels(batches, data.PIECE_KEY) if data.PIECE_KEY in batches[0] else None
        return labels if pieces is None else of_pieces(pieces, labels, labels)

    def decide(self, predictions: Predictions) -> Tensor:
        """Return the likeliest tokens, (label tokens,), or the likeliest choice of each question, (questions,)."""
        return first_largest(predictions.values) if predictions.kind == "choices" else predictions.values

    def table(self, predictions: Predictions, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return what metrics of "tokens" or "choices" take: two arrays, by samples or by questions.

        Of tokens, the first array has a sample's sums of `nll` and of `right` tokens, and the `characters` of its
        labels, 0 if unknown; the second has its number of label tokens. With sums, a bootstrap costs the same for any
        number of tokens. Of choices, the first array has the `likeliest` one and the likeliest `per_character`, which
        does not favour short choices; the second has the right one.
        """
        if predictions.kind == "choices":
            assert predictions.characters is not None
            rows = np.empty(len(predictions), dtype=[("likeliest", np.int64), ("per_character", np.int64)])
            rows["likeliest"] = first_largest(predictions.values)
            rows["per_character"] = first_largest(predictions.values / predictions.characters)
            return rows, references.numpy()
        assert predictions.nll is not None
        rows = np.zeros(len(predictions), dtype=[("nll", np.float64), ("right", np.int64), ("characters", np.float64)])
        rows["nll"] = predictions.per_sample(predictions.nll)
        rows["right"] = predictions.per_sample(predictions.values == references)
        if predictions.characters is not None:
            rows["characters"] = predictions.characters
        label_tokens = predictions.per_sample(torch.ones_like(predictions.nll)).long()
        return rows, label_tokens.numpy()

    def usual_metrics(
        self, *, rows: str | None = None, answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return perplexity; of answers also how many are exact; of choices how many are right."""
        if choices:
            return ("choice_accuracy", "choice_accuracy_norm")
        return ("exact_match", "perplexity") if answers else self.metrics


def text_labels(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the labels of a language model's batch, (batch, tokens): by default its own `judged_tokens`."""
    from ..model.tokens import judged_tokens

    if "labels" in batch:
        return batch["labels"]
    if "input_ids" not in batch:
        raise DataError(f"a language model's batch must have labels or input_ids, got {', '.join(batch)}")
    ids = batch["input_ids"]
    return ids.where(judged_tokens(model, batch, ids), data.IGNORED)


def choice_likelihoods(tokens: Predictions, batches: Sequence[Batch]) -> Predictions:
    """Return the log-likelihoods of choices, (questions, choices), from the predictions of their tokens, in nats.

    They are -inf where a question has fewer choices than others.
    """
    assert tokens.nll is not None
    columns = {key: torch.cat([batch[key] for batch in batches]).cpu() for key in data.CHOICE_KEYS}
    questions, place = columns["question"].unique(return_inverse=True)
    shape = len(questions), int(columns["choice"].max()) + 1
    likelihoods, characters = (torch.full(shape, fill, dtype=torch.float64) for fill in (-torch.inf, 1.0))
    likelihoods[place, columns["choice"]] = -tokens.per_sample(tokens.nll)
    characters[place, columns["choice"]] = columns["characters"].double()
    return Predictions("choices", likelihoods, characters=characters)


def of_pieces(pieces: Tensor, predicted: Tensor, labels: Tensor) -> Tensor:
    """Return one prediction for each token, (tokens,), where some tokens are read in pieces, see `PIECE_KEY`.

    `pieces`, `predicted` and `labels` are those of all pieces, (pieces,). For a token in pieces it is `WHOLE` if all of
    them are right, else what is predicted for the first one.
    """
    first = pieces <= 1
    wrong = torch.zeros(int(first.sum())).index_add(0, first.cumsum(0) - 1, (predicted != labels).float())
    return predicted[first].masked_fill((pieces[first] == 1) & (wrong == 0), WHOLE)


def first_largest(values: Tensor) -> Tensor:
    """Return the index of the largest value in each row, the first of equal ones: torch does not say which it takes."""
    return torch.from_numpy(np.argmax(values.numpy(), axis=-1))


def cut_on_the_left(ids: list[int], judged: list[bool], limit: int | None, tokenizer: Any) -> Tokens:
    """Return the last `limit` tokens of a sample up to its last label, which `judged` marks; all if they fit.

    A begin-of-text token takes the place of the first one, unless a label follows that directly.
    """
    if limit is None or len(ids) <= limit:
        return ids, judged
    end = len(judged) - judged[::-1].index(True)
    first = max(end - limit, 0)
    kept = [*range(first, end)]
    if ids[0] == tokenizer.bos_token_id and first and not judged[first + 1]:
        kept[0] = 0
    return [ids[place] for place in kept], [judged[place] for place in kept]


def pack_text(rows: datasets.Dataset, *, column: str, tokenizer: Any, length: int) -> datasets.Dataset:
    """Tokenise all texts, join them, and cut them into blocks: one row each, of `length` tokens in the column `BLOCK`.

    Tokens go to a temporary file, so that memory does not grow with the number of rows, except for a running text,
    which is tokenised in one piece. An incomplete last block is dropped, unless it is the only one.

    Each row is a separate text, and the tokenizer's end-of-text (or else begin-of-text) token separates them. Rows from
    a txt file, or rows of which some are blank (as in WikiText), are instead the lines of one running text, joined by
    line breaks: a blank row is the empty line between paragraphs or stories.
    """
    import pyarrow as pa

    running = rows.info.builder_name == "text" or not all(text.strip() for text in data.column_values(rows, column))
    between = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if between is None and len(rows) > 1 and not running:
        raise DataError(
            "texts are joined by the tokenizer's end-of-text or begin-of-text token, but it has neither; set "
            "tokenizer.eos_token and save it with the model, or set packing to false"
        )
    texts = data.column_values(rows, column)
    if running:
        texts = iter(["".join(text if text.endswith("\n") else text + "\n" for text in texts)])
    count = 0
    with tempfile.TemporaryFile() as file:
        for part in batched(texts, TEXTS):
            encoded = tokenizer(part, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids in encoded["input_ids"]:
                ids = [between, *ids] if count else ids
                array("q", ids).tofile(file)
                count += len(ids)
        if count < 2:
            raise DataError(
                f"text must have at least two tokens to predict one from the other, but {column!r} has fewer"
            )
        file.flush()
        tokens = np.memmap(file, dtype=np.int64, mode="r", shape=(count,))
    length = min(length, count)
    starts = np.arange(0, count - count % length + 1, length, dtype=np.int64)
    # Blocks are views of the mapped tokens.
    blocks = pa.LargeListArray.from_arrays(pa.array(starts), pa.array(tokens[: starts[-1]]))
    return datasets.Dataset(datasets.table.InMemoryTable(pa.table({BLOCK: blocks})))
