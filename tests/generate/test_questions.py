"""Answers to files of questions, and VQA accuracy against its definition over sets of nine."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.models import llava, llava_processor

from hies_export.cli.main import main
from hies_export.errors import DataError
from hies_export.generate.questions import (
    answer_questions,
    mean_vqa_accuracy,
    normalise_answer,
    read_questions,
    vqa_accuracy,
)
from hies_export.generate.text import generate_text


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("The Cat.", "cat"),
        ("a  two-door car", "2 door car"),
        ("two - door", "2 door"),
        ("1,000 dollars!", "1000 dollars"),
        ("3.5 oz", "3.5 oz"),
        ("U.S.A.", "usa"),
        ("dont know", "don't know"),
        ("none\n", "0"),
        ("yes/no", "yes no"),
        ("An apple, a pear", "apple pear"),
    ],
)
def test_answers_are_normalised(answer: str, normal: str) -> None:
    assert normalise_answer(answer) == normal


@pytest.mark.parametrize("equal", range(11))
def test_accuracy_is_the_mean_over_nine_others(equal: int) -> None:
    given = ["The dog"] * equal + [f"cat {chr(97 + i)}" for i in range(10 - equal)]
    nines = itertools.combinations(given, 9)
    expected = [min(sum(normalise_answer(a) == "dog" for a in others) / 3, 1) for others in nines]
    assert vqa_accuracy("dog" if equal < 10 else "The dog", given) == pytest.approx(sum(expected) / 10)


def test_answers_that_all_agree_are_compared_as_they_are() -> None:
    assert vqa_accuracy("dog", ["The dog"] * 10) == 0.0
    assert vqa_accuracy(" The dog\n", ["The dog"] * 10) == 1.0
    with pytest.raises(DataError, match="needs the answers people gave, got none"):
        vqa_accuracy("dog", [])


def test_accuracy_of_a_file_is_the_mean_over_its_questions() -> None:
    given = [["dog"] * 3 + ["cat"] * 7, ["red"] * 10]
    assert mean_vqa_accuracy(["dog", "blue"], given) == pytest.approx((3 * 2 / 3 + 7) / 10 / 2)
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        mean_vqa_accuracy(["dog", "blue"], given[:1])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    llava().save_pretrained(tmp_path / "model")
    llava_processor().save_pretrained(tmp_path / "model")
    (tmp_path / "images").mkdir()
    for i in range(3):
        Image.effect_noise((20, 20), 40 + 20 * i).convert("RGB").save(tmp_path / "images" / f"{i}.png")
    return tmp_path


def test_mm_vets_questions_are_answered_as_one_by_one(project: Path) -> None:
    rows = {
        f"v1_{i}": {"imagename": f"{i}.png", "question": "Q " + "a b c d"[: 2 * i + 1], "answer": "x"} for i in range(3)
    }
    (project / "mm-vet.json").write_text(json.dumps(rows))
    command = ["generate", str(project / "model"), "--questions", str(project / "mm-vet.json")]
    command += ["--image", str(project / "images"), "--max-new-tokens", "4", "-o", str(project / "answers.json")]
    assert main(command) == 0
    found = json.loads((project / "answers.json").read_text())
    assert list(found) == list(rows)
    for name, row in rows.items():
        prompt = f"USER: <image>\n{row['question']} ASSISTANT:"
        image = project / "images" / row["imagename"]
        (alone,) = generate_text(project / "model", [prompt], images=[image], max_new_tokens=4)
        assert found[name] == alone.strip()


def test_vizwiz_answers_are_judged(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = [{"image": f"{i}.png", "question": "Q a"} for i in range(3)]
    (project / "plain.json").write_text(json.dumps(questions))
    options: dict[str, Any] = {"images": project / "images", "max_new_tokens": 3}
    answers = answer_questions(project / "model", read_questions(project / "plain.json"), **options)
    for i, row in enumerate(questions):
        people = [{"answer": answers[f"{i}.png"] if i else "unsuitable", "answer_confidence": "yes"}] * 9
        row["answers"] = [*people, {"answer": "other", "answer_confidence": "no"}]  # type: ignore[assignment]
    (project / "vizwiz.json").write_text(json.dumps(questions))
    command = ["generate", str(project / "model"), "--questions", str(project / "vizwiz.json"), "--json"]
    command += ["--image", str(project / "images"), "--max-new-tokens", "3", "-o", str(project / "answers.json")]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["vqa_accuracy"] == pytest.approx(2 / 3)


def test_bad_files_of_questions(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project / "questions.json"
    for content, message in (
        ("no json", "questions must be a JSON file"),
        ("[]", "holds no question"),
        ('[{"question": "Q"}]', "0: Value error, imagename or image is missing"),
        ('{"v1_0": "text"}', "every question has a question and an imagename or image"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=message):
            read_questions(file)
    file.write_text('[{"question": "Q", "image": "gone.png"}]')
    with pytest.raises(DataError, match=r"must have its image, but 1 are missing, e.g. .*gone\.png"):
        answer_questions(project / "model", read_questions(file), images=project / "images")
    with pytest.raises(DataError, match=r"must have the one field \{question\}, got 'USER:'"):
        answer_questions(project / "model", read_questions(file), images=project / "images", prompt="USER:")
    assert main(["generate", str(project / "model"), "--questions", str(file)]) == 2
    assert "--questions needs -o FILE" in capsys.readouterr().err
