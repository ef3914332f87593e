"""Text that goes on from text."""

from __future__ import annotations

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
from .prompts import Choices, Tokens, template_fields
from .registry import register_task
from .task import Predictions, Task, Use, batched

# Default tokens of a block of plain text, if the model takes as many.
BLOCK_LENGTH = 512
# In place of the prediction of a token that is read in pieces, all of which are predicted right.
WHOLE = -1
# The one column of samples that are packed blocks.
BLOCK = "input_ids"
# Texts that are tokenised at once.
TEXTS = 1000
# Most bytes of float32 logits that one forward pass of several samples gives, and that are copied at once.
LOGITS_BYTES, COPIED_BYTES = 128 << 20, 64 << 20


@register_task
class TextGeneration(Task):
    """Language models: decoders of text alone.

    Every next token is predicted, from logits, (batch, tokens, vocabulary). Rows are plain text, conversations, or
    prompts with answers. With several choices, the right one becomes the answer to score by (`right_choice`), and every
    one is read to judge, without the end-of-text token. Such batches describe their rows (`CHOICE_KEYS`), and
    predictions are those of choices.

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

    @classmethod
    def usual_columns(cls, features: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the columns on which chat models are tuned, see `columns_of_chats`; None if there are none."""
        return columns_of_chats(features) if "messages" in cls.reads else None

    def tokens(self, samples: datasets.Dataset) -> Iterator[Tensor]:
        """Yield the tokens, (tokens,) int64, of each block, or of each row without a limit on its length."""
        if self._packs:
            yield from map(torch.tensor, data.column_values(samples, BLOCK))
        else:
            yield from (torch.tensor(tokens.ids) for tokens in self._tokens(samples, "judge", None)[0])

    @property
    def _packs(self) -> bool:
        """Whether rows are plain text, whose samples are packed blocks."""
        return not (self.columns.prompt or self.columns.messages)

    @property
    def template(self) -> dict[str, str]:
        """The prompt's template and the column of answers, as functions of `prompts` take them."""
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
        if not self._packs:
            return rows
        length = self._limit() or BLOCK_LENGTH
        if self.columns.max_length is None:
            length = min(length, BLOCK_LENGTH)
        return pack_text(rows, column=self.columns.text[0], tokenizer=self.processor, length=length - len(self._begin))

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of blocks, or of prompts with answers or conversations, cut on the left."""
        if self._packs:
            yield from (self._batch_of_blocks(samples, rows) for rows in batched(range(len(samples)), size))
            return
        tokens_of_rows, choices = self._tokens(samples, use, self._limit())
        for rows in batched(range(len(tokens_of_rows)), size):
            batch = self._padded_batch([tokens_of_rows[row] for row in rows])
            if self.columns.messages:
                batch[data.CHAT_KEY] = torch.ones(len(rows), dtype=torch.bool)
            yield batch if choices is None else batch | choices.describe(rows)

    def _tokens(self, samples: datasets.Dataset, use: Use, limit: int | None) -> tuple[list[Tokens], Choices | None]:
        """Return the tokens of samples that are no blocks, or of their choices, at most `limit`; and any choices."""
        tokenizer = data.tokenizer_of(self.processor)
        if self.columns.messages:
            return self._conversations(samples, tokenizer, limit), None
        samples, choices = self.with_one_answer(samples, use)
        prompts_read = self.tokenized(samples, enumerate(self.texts(samples)), choices, limit)
        return [cut_on_the_left(tokens, limit, tokenizer) for _, tokens in prompts_read], choices

    def with_one_answer(self, samples: datasets.Dataset, use: Use) -> tuple[datasets.Dataset, Choices | None]:
        """Return the samples with one answer each and None, or each once for every choice and these choices."""
        if not self.columns.label:
            return samples, None
        columns = {"answer": self.template["answer"], "label": self.columns.label}
        if use in ("judge", "time"):
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
        """What every block begins with: the begin-of-text token or nothing; by default what the tokenizer adds."""
        token, asked = self.processor.bos_token_id, self.columns.bos
        if asked == "auto":
            asked = self.processor("a", verbose=False)["input_ids"][:1] == [token]
        elif asked and token is None:
            raise DataError("data.bos must be false or auto for a tokenizer without begin-of-text token, got true")
        return [token] if asked else []

    def _batch_of_blocks(self, samples: datasets.Dataset, rows: list[int]) -> Batch:
        """Return the packed blocks in these rows as a batch, (blocks, tokens), with labels at all but `_begin`."""
        ids = torch.tensor([self._begin + block for block in samples[rows][BLOCK]])
        data.check_vocabulary(ids, self.config)
        labels = ids.clone()
        labels[:, : len(self._begin)] = data.IGNORED
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def tokenized(
        self,
        samples: datasets.Dataset,
        texts: Iterable[tuple[int, dict[str, Any]]],
        choices: Choices | None,
        limit: int | None,
    ) -> Iterator[tuple[str, Tokens]]:
        """Yield prompt and answer of rows as one text, and its tokens, uncut, of which the answer's are labels.

        `texts` are rows of `texts(samples)` with their numbers. A DataError refuses rows without a prompt or an answer,
        or with an answer of `limit` tokens or more.
        """
        tokenizer = data.tokenizer_of(self.processor)
        end = prompts.end_of_text(tokenizer) if choices is None else ""
        for number, row in texts:
            prompt, answer = self.prompt_and_answer(row, None if choices is None else choices.text[number])
            text = prompt + prompts.answer_text(prompt, answer, end)
            tokens = prompts.tokenize_spans(text, [(len(prompt), len(text))], tokenizer)
            name, count = data.row_name(samples, number), sum(tokens.judged)
            if count in (0, len(tokens.judged)):
                missing = "an answer" if count == 0 else "a prompt"
                raise DataError(f"every row must have {missing} of at least one token, but {name} has none")
            if limit is not None and count >= limit:
                raise DataError(
                    f"answers are never cut and need a token before them, but {name} has {count} answer tokens and "
                    f"at most {limit} tokens are read; leave such rows out, or raise max_length if it is given and the "
                    "model takes more"
                )
            yield text, tokens

    def _conversations(self, samples: datasets.Dataset, tokenizer: Any, limit: int | None) -> list[Tokens]:
        """Return the tokens of each conversation, cut on the left; the assistant's are labels."""
        tokens_of_rows, end = [], prompts.end_of_text(tokenizer)
        for number, row in enumerate(samples.select_columns(list(self.columns.messages))):
            name = data.row_name(samples, number)
            with refusing(f"the chat template must render every conversation, but fails on {name}", kind=DataError):
                values = [row[column] for column in self.columns.messages]
                tokens = tokenize_conversation(values, tokenizer, end)
            if not any(tokens.judged[1:]):  # no output predicts the first token
                raise DataError(
                    "every conversation must have tokens that the chat template tells to be the assistant's, but "
                    f"{name} has none; give the template {{% generation %}} around them, or leave the row out"
                )
            tokens_of_rows.append(cut_on_the_left(tokens, limit, tokenizer))
        return tokens_of_rows

    def _padded_batch(self, samples: Sequence[Tokens]) -> Batch:
        """Return samples as a padded batch, (samples, longest), whose labels are `IGNORED` but at judged tokens."""
        rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for ids, judged in samples:
            rows["input_ids"].append(ids)
            rows["attention_mask"].append([1] * len(ids))
            rows["labels"].append([i if is_judged else data.IGNORED for i, is_judged in zip(ids, judged, strict=True)])
        return data.as_batch(rows, data.tokenizer_of(self.processor), self.config)

    def parts(self, batch: Batch) -> list[Batch]:
        """Return a batch in parts whose float32 logits take at most `LOGITS_BYTES`, but of one sample at least."""
        vocabulary = getattr(self.config.get_text_config(), "vocab_size", None)
        if vocabulary is None or "input_ids" not in batch:
            return super().parts(batch)  # undivided, as the size of its logits is unknown
        bytes_of_a_sample = 4 * vocabulary * batch["input_ids"].shape[1]
        return data.in_rows(batch, max(1, LOGITS_BYTES // bytes_of_a_sample))

    def canonical(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return a batch with labels: its own, else the text itself, as in training on plain text."""
        return {**batch, "labels": text_labels(model, batch)}

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
        """Return which outputs predict a label, (batch, tokens - shift) bool; `labels` are not shifted."""
        return labels[:, self.shift :] != data.IGNORED

    def next_tokens(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return which outputs predict a token of the text: those in front of its labels, by default of all of it."""
        return self.predicting(text_labels(model, batch))

    def effect(self, model: PreTrainedModel, batch: Batch, output: Tensor, number: int) -> Tensor:
        """Return the log-probability of tokens that the model would write, summed over each sample, (batch,), in nats.

        One token is drawn from the prediction at the place of each label, by the seed `number`, so half of the squared
        gradient is the KL divergence of a small change on average (Martens 2020, https://arxiv.org/abs/1412.1193,
        section 5). That of the labels is not: those that the model does not expect have by far the largest gradients.
        Nor is that of the likeliest tokens, which is small where the model is certain.
        """
        labels = text_labels(model, batch)
        samples, positions = self.predicting(labels.to(output.device)).nonzero().unbind(-1)
        log_probabilities = output[samples, positions].float().log_softmax(-1)  # (label tokens, vocabulary)
        generator = torch.Generator(log_probabilities.device).manual_seed(number)
        # A row of NaN draws any token, and gives NaN, which the caller refuses by the batch.
        drawn = log_probabilities.detach().exp().nan_to_num_(1.0).multinomial(1, generator=generator)
        of_drawn = log_probabilities.gather(-1, drawn)[:, 0]
        return of_drawn.new_zeros(len(output)).index_add(0, samples, of_drawn)

    def check_batches(self, batches: Sequence[Batch]) -> None:
        """Refuse samples without a label token to compute a loss from."""
        where = " after its first token" if self.shift else ""
        for index, labels in enumerate(batch["labels"] for batch in batches if "labels" in batch):
            if not self.predicting(labels).any(-1).all():
                raise DataError(
                    f"every sample must have a label token{where}, but one of batch {index} (from 0) has none; leave "
                    "such samples out or raise max_length"
                )

    def keep(self, output: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Return the likeliest tokens and the label tokens' negative log-likelihoods, (label tokens,) each, in nats."""
        predicting = self.predicting(batch["labels"])
        samples, positions = predicting.nonzero().unbind(-1)
        labels = batch["labels"][:, self.shift :][predicting]
        tokens, nll = [], []
        at_once = max(1, COPIED_BYTES // (4 * output.shape[-1]))
        chunks = zip(samples.split(at_once), positions.split(at_once), labels.split(at_once), strict=True)
        for of_samples, of_positions, of_labels in chunks:
            logits = output[of_samples.to(output.device), of_positions.to(output.device)].float()
            tokens.append(logits.argmax(-1).cpu())
            nll.append(torch.nn.functional.cross_entropy(logits, of_labels.to(logits.device), reduction="none").cpu())
        return torch.cat(tokens), torch.cat(nll)

    def join(self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Batch]) -> Predictions:
        """Return the predictions of all label tokens, teacher-forced; or of choices, if every row is one."""
        tokens = torch.cat([tokens for tokens, _ in kept])
        nll = torch.cat([nll for _, nll in kept])
        counts = torch.cat([self.losses(batch["labels"]) for batch in batches]).cpu()
        sample, characters = torch.arange(len(counts)).repeat_interleave(counts), None
        if "characters" in batches[0]:
            characters = torch.cat([batch["characters"] for batch in batches]).double()
        if data.PIECE_KEY in batches[0] and "choice" not in batches[0]:
            pieces = self._at_labels(batches, data.PIECE_KEY)
            begins_token = pieces <= 1
            tokens = of_pieces(pieces, tokens, self._at_labels(batches, "labels"))
            sample = sample[begins_token]
            # The likelihood of a token in pieces is the product of those of its pieces.
            nll = nll.new_zeros(len(tokens)).index_add(0, begins_token.cumsum(0) - 1, nll)
        joint = self._are_answers(batches)
        predictions = Predictions(self.predicts, tokens, sample, joint=joint, nll=nll, characters=characters)
        return choice_likelihoods(predictions, batches) if "choice" in batches[0] else predictions

    def _at_labels(self, batches: Sequence[Batch], key: str) -> Tensor:
        """Return the values of a key of batches at the label tokens, (label tokens,)."""
        values = [batch[key][:, self.shift :][self.predicting(batch["labels"])] for batch in batches]
        return torch.cat(values).cpu()

    def _are_answers(self, batches: Sequence[Batch]) -> bool:
        """Return whether the label tokens of a sample are one answer to a prompt, and so are judged as a whole.

        In plain text, conversations and masked texts (`shift` 0), each is judged by itself. Batches have prompts if a
        token other than the first of a row lacks a label, so prompts of a single token are not recognised. Padding and
        end-of-text tokens do not count: collators that pad with the latter take the label of every one away, and may
        leave out the mask.
        """
        from ..model.tokens import token_ids

        if self.shift == 0 or any(data.CHAT_KEY in batch for batch in batches):
            return False
        config = self.config.get_text_config()
        ends = [*token_ids(getattr(config, "eos_token_id", None)), *token_ids(getattr(config, "pad_token_id", None))]
        for batch in batches:
            labels = batch["labels"]
            by_token = {key: values for key, values in batch.items() if values.shape == labels.shape}
            mask, ids = by_token.get("attention_mask", torch.ones_like(labels)), by_token.get("input_ids", labels)
            is_end = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))
            after_first = (mask != 0) & (mask.cumsum(-1) > 1)
            if bool((after_first & ~is_end & (labels == data.IGNORED)).any()):
                return True
        return False

    def references(self, batches: Sequence[Batch]) -> Tensor:
        """Return the label tokens, (label tokens,) int64, or the right choices, (questions,) int64."""
        if "choice" in batches[0]:
            question_of_row = torch.cat([batch["question"] for batch in batches]).cpu()
            right_of_row = torch.cat([batch["right"] for batch in batches]).cpu()
            questions, place = question_of_row.unique(return_inverse=True)
            return torch.zeros(len(questions), dtype=torch.int64).scatter(0, place, right_of_row)
        labels = self._at_labels(batches, "labels")
        if data.PIECE_KEY not in batches[0]:
            return labels
        return of_pieces(self._at_labels(batches, data.PIECE_KEY), labels, labels)

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
        """Return accuracies of choices, exact matches and perplexity of answers, else `metrics`; `rows` is ignored."""
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
    """Return the log-likelihoods of choices, (questions, choices), from the predictions of their tokens, in nats."""
    assert tokens.nll is not None
    columns = {key: torch.cat([batch[key] for batch in batches]).cpu() for key in data.CHOICE_KEYS}
    questions, place = columns["question"].unique(return_inverse=True)
    shape = len(questions), int(columns["choice"].max()) + 1
    likelihoods = torch.full(shape, -torch.inf, dtype=torch.float64)  # some questions have fewer choices than others
    characters = torch.ones(shape, dtype=torch.float64)
    likelihoods[place, columns["choice"]] = -tokens.per_sample(tokens.nll)
    characters[place, columns["choice"]] = columns["characters"].double()
    return Predictions("choices", likelihoods, characters=characters)


def of_pieces(pieces: Tensor, predicted: Tensor, labels: Tensor) -> Tensor:
    """Return one prediction for each token, (tokens,), where some tokens are read in pieces.

    `pieces`, the values of `PIECE_KEY`, `predicted` and `labels` are those of all pieces, (pieces,). The prediction of
    a token in pieces is `WHOLE` if all of them are right, else that of the first piece.
    """
    begins_token = pieces <= 1
    token = begins_token.cumsum(0) - 1  # the number of each piece's token
    wrong = torch.zeros(int(begins_token.sum())).index_add(0, token, (predicted != labels).float())
    return predicted[begins_token].masked_fill((pieces[begins_token] == 1) & (wrong == 0), WHOLE)


def first_largest(values: Tensor) -> Tensor:
    """Return the index of the largest value in each row, the first of equal ones: torch does not say which it takes."""
    return torch.from_numpy(np.argmax(values.numpy(), axis=-1))


def cut_on_the_left(tokens: Tokens, limit: int | None, tokenizer: Any) -> Tokens:
    """Return the last `limit` tokens of a sample up to its last label; all if they fit."""
    ids, judged = tokens
    if limit is None or len(ids) <= limit:
        return tokens
    end = len(judged) - judged[::-1].index(True)
    first = max(end - limit, 0)
    kept = [*range(first, end)]
    # The begin-of-text token takes the place of the first one, unless that predicts a label.
    if ids[0] == tokenizer.bos_token_id and first and not judged[first + 1]:
        kept[0] = 0
    return Tokens([ids[place] for place in kept], [judged[place] for place in kept])


def pack_text(rows: datasets.Dataset, *, column: str, tokenizer: Any, length: int) -> datasets.Dataset:
    """Tokenise all texts, join them, and cut them into blocks: one row each, of `length` tokens in the column `BLOCK`.

    Tokens go to a temporary file, so that memory does not grow with the number of rows, except for a running text,
    which is tokenised in one piece. An incomplete last block is dropped, unless it is the only one.

    Each row is a separate text, and the tokenizer's end-of-text (or else begin-of-text) token separates them. Rows from
    a txt file, or rows of which some are blank (as in WikiText), are instead the lines of one running text, joined by
    line breaks: a blank row is the empty line between paragraphs or stories.
    """
    import pyarrow as pa

    is_running = rows.info.builder_name == "text" or not all(text.strip() for text in data.column_values(rows, column))
    separator = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if separator is None and len(rows) > 1 and not is_running:
        raise DataError(
            "texts are joined by the tokenizer's end-of-text or begin-of-text token, but it has neither; set "
            "tokenizer.eos_token and save it with the model"
        )
    texts = data.column_values(rows, column)
    if is_running:
        texts = iter(["".join(text if text.endswith("\n") else text + "\n" for text in texts)])
    count = 0
    with tempfile.TemporaryFile() as file:
        for some_texts in batched(texts, TEXTS):
            encoded = tokenizer(some_texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids in encoded["input_ids"]:
                ids = [separator, *ids] if count else ids
                array("q", ids).tofile(file)
                count += len(ids)
        if count < 2:
            raise DataError(
                f"text must have at least two tokens to predict one from the other, but {column!r} has fewer"
            )
        file.flush()
        tokens = np.memmap(file, dtype=np.int64, mode="r", shape=(count,))
    length = min(length, count)
    edges = np.arange(0, count - count % length + 1, length, dtype=np.int64)  # the last one is the end of all blocks
    # Blocks are views of the mapped tokens.
    blocks = pa.LargeListArray.from_arrays(pa.array(edges), pa.array(tokens[: edges[-1]]))
    return datasets.Dataset(datasets.table.InMemoryTable(pa.table({BLOCK: blocks})))
