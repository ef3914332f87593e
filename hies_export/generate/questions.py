"""Answer files of questions about images: MM-Vet's, for its own grader, and VizWiz's, judged by VQA accuracy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from ..data.processors import load_processor
from ..data.prompts import template_fields
from ..errors import DataError
from ..files import Rule, Schema, check, read_json
from ..progress import SILENT, Progress
from .text import encode_prompts, load_generator

# LLaVA-1.5's own prompt format; the image goes in front of prompts that do not place it.
PROMPT = "USER: <image>\n{question} ASSISTANT:"

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = ("a", "an", "the")
_NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)} | {"zero": "0"}
_CONTRACTED = (
    "ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's I'm "
    "I've isn't it'd it'll let's ma'am might've mightn't must've mustn't needn't oughtn't shan't she'd she's should've "
    "shouldn't somebody's someone's something's that'd that's there'd there's they'd they'll they're they've wasn't "
    "we've weren't what'll what're what's what've when's where'd where's where've who'd who'll who's who've why'll "
    "why's won't would've wouldn't y'all you'd you'll you're you've"
)
_CONTRACTIONS = {word.replace("'", "").lower(): word for word in _CONTRACTED.split()}


def normalise_answer(answer: str) -> str:
    """Normalise an answer as the VQA evaluation does before it compares (https://visualqa.org/evaluation.html).

    Letters become lower case, number words digits, and contractions get their apostrophe. Articles and punctuation are
    removed, but punctuation between letters becomes a space, and a point inside a number stays.
    """
    text = re.sub(r"[\n\t]", " ", answer).strip()
    has_thousands = re.search(r"\d,\d", text) is not None
    cleaned = text
    for mark in _PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        cleaned = cleaned.replace(mark, "" if beside_space or has_thousands else " ")
    cleaned = re.sub(r"\.(?!\d)", "", cleaned)
    words = (_DIGITS.get(word, word) for word in cleaned.lower().split())
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def vqa_accuracy(answer: str, given: Sequence[str]) -> float:
    """Return how many people agree with an answer: the mean over people of min(equal answers of the others / 3, 1).

    If all people gave the same answer, only white space is stripped, as in the evaluation's own code. Raises DataError
    without answers.
    """
    if not given:
        raise DataError("VQA accuracy needs the answers people gave, got none; leave such questions out")
    tidy: Callable[[str], str] = normalise_answer if len(set(given)) > 1 else str.strip
    wanted = [tidy(other) for other in given]
    equal = wanted.count(tidy(answer))
    return sum(min((equal - (other == tidy(answer))) / 3, 1.0) for other in wanted) / len(wanted)


def mean_vqa_accuracy(answers: Sequence[str], given: Sequence[Sequence[str]]) -> float:
    """Return the mean of `vqa_accuracy` over questions, each with an answer and people's answers."""
    values = [vqa_accuracy(answer, people) for answer, people in zip(answers, given, strict=True)]
    return sum(values) / len(values)


@dataclass(frozen=True)
class Question:
    """A question about an image: `id` (else the image's name), text, file name, and what people answered, if known."""

    id: str
    text: str
    image: str
    answers: tuple[str, ...] = ()


class _Answer(Schema):
    answer: str | int | float


class _Row(Schema):
    """A question of MM-Vet's file, or of VizWiz's."""

    question: str
    imagename: Annotated[str, Field(min_length=1)] | None = None
    image: Annotated[str, Field(min_length=1)] | None = None
    answers: list[_Answer | str | int | float] | None = None

    @model_validator(mode="after")
    def _has_an_image(self) -> _Row:
        if self.imagename is None and self.image is None:
            raise ValueError("imagename or image is missing")
        return self


_QUESTIONS = Rule(
    "questions must be a JSON file of MM-Vet or VizWiz, in which every question has a question and an imagename or "
    "image",
    "give MM-Vet's or VizWiz's own file",
    DataError,
)


def read_questions(path: str | Path) -> list[Question]:
    """Read MM-Vet's file (id -> imagename, question) or VizWiz's (list of image, question, answers).

    Raises DataError if it is neither; the message names the first question that is wrong.
    """
    content = read_json(path, Any, _QUESTIONS)
    check(content, dict[str, _Row] if isinstance(content, dict) else list[_Row], _QUESTIONS, where=str(path))
    rows = [{"id": key, **row} for key, row in content.items()] if isinstance(content, dict) else content
    found = []
    for row in rows:
        image = row.get("imagename") or row["image"]
        # VizWiz's answers carry their confidence.
        answers = [a["answer"] if isinstance(a, Mapping) else a for a in row.get("answers") or ()]
        found.append(Question(str(row.get("id", image)), row["question"], image, tuple(map(str, answers))))
    if not found:
        raise DataError(f"questions must be MM-Vet's object or VizWiz's list, but {path} holds no question")
    return found


def are_answers(text: str) -> bool:
    """Return whether JSON is what `answer_questions` returns."""
    values = json.loads(text)
    return isinstance(values, dict) and all(isinstance(value, str) for value in values.values())


def answer_questions(
    folder: str | Path,
    questions: Sequence[Question],
    *,
    images: str | Path,
    prompt: str = PROMPT,
    max_new_tokens: int = 128,
    batch_size: int = 4,
    progress: Progress = SILENT,
) -> dict[str, str]:
    """Answer questions greedily with a checkpoint or an exported folder, as `generate_text` takes.

    Returns id -> answer, in the order of the questions: as MM-Vet's grader reads it. Raises DataError if the template
    `prompt` has other fields than `{question}`, or an image cannot be read.
    """
    if template_fields(prompt) != ("question",):
        raise DataError(f"a prompt for questions must have the one field {{question}}, got {prompt!r}")
    files = [Path(images) / question.image for question in questions]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DataError(f"every question must have its image, but {len(missing)} are missing, e.g. {missing[0]}")
    processor = load_processor(folder, task="image-text-to-text", for_prompts=True)
    generate = load_generator(folder)
    found: dict[str, str] = {}
    starts = list(range(0, len(questions), batch_size))
    for start in progress.track(starts, "generate"):
        part = slice(start, start + batch_size)
        texts = [prompt.format(question=question.text) for question in questions[part]]
        batch = encode_prompts(processor, texts, files[part])
        tokens = generate(batch, max_new_tokens)
        answers = processor.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        found.update(zip((question.id for question in questions[part]), map(str.strip, answers), strict=True))
    return found
