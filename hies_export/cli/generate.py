"""Continue prompts, or answer questions about images, greedily with an ONNX folder."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from rich.console import Console

from ..errors import RequestError
from ..progress import Progress
from .arguments import a_number, a_path, a_path_or_id, a_text, add_json
from .paths import checkpoint_in


def add_arguments(parser: ArgumentParser) -> None:
    """Add the model, and prompts or questions."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=a_path_or_id, help="ONNX folder; or a checkpoint or run, for PyTorch")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--prompt",
        dest="prompts",
        metavar="TEXT",
        type=a_text,
        action="append",
        help="text to continue; may be repeated",
    )
    asked.add_argument(
        "--questions",
        metavar="FILE",
        type=a_path,
        help="JSON file of questions, as in MM-Vet or VizWiz; --image is then the folder of images",
    )
    add(
        "-o",
        "--output",
        metavar="FILE",
        type=a_path,
        help="file for the answers to --questions, in the format of MM-Vet's grader",
    )
    add(
        "--image",
        dest="images",
        metavar="FILE",
        type=a_path,
        action="append",
        default=[],
        help="image for all prompts, or one for each",
    )
    add("--max-new-tokens", metavar="N", type=a_number(int, 1), default=20, help="most tokens to write (default: 20)")
    add_json(parser)


def run(options: Namespace, console: Console, progress: Progress) -> dict[str, Any]:
    """Continue prompts, or answer a file of questions, and return the texts."""
    from ..checkpoint.contents import Contents

    if options.questions is None and options.output is not None:
        raise RequestError("-o is the file for the answers to --questions, got --prompt; leave -o out")
    options.folder = checkpoint_in(options.folder, Contents.ONNX, progress=progress)
    if options.questions is not None:
        return _answer(options, console, progress)
    from ..generate.text import generate_text

    progress.stage("generate")
    texts = generate_text(options.folder, options.prompts, images=options.images, max_new_tokens=options.max_new_tokens)
    results = [{"prompt": prompt, "text": text} for prompt, text in zip(options.prompts, texts, strict=True)]
    for result in results:
        console.print(f"> {result['prompt']}\n{result['text']}\n", soft_wrap=True)
    return {"folder": str(options.folder), "results": results}


def _answer(options: Namespace, console: Console, progress: Progress) -> dict[str, Any]:
    from ..checkpoint.folders import refuse_other_file, replace_file
    from ..generate.questions import answer_questions, are_answers, mean_vqa_accuracy, read_questions
    from ..values import dump_json

    if options.output is None or len(options.images) != 1:
        raise RequestError("--questions needs -o FILE for the answers and one --image, the folder of the images")
    refuse_other_file(options.output, "a file of answers", are_answers)
    questions = read_questions(options.questions)
    progress.stage("generate")
    answers = answer_questions(
        options.folder, questions, images=options.images[0], max_new_tokens=options.max_new_tokens, progress=progress
    )
    replace_file(options.output, dump_json(answers))
    console.print(f"written to {options.output}: {len(answers)} answers")
    result: dict[str, Any] = {"folder": str(options.folder), "answers": len(answers)}
    if all(question.answers for question in questions):
        given = [list(question.answers) for question in questions]
        result["vqa_accuracy"] = mean_vqa_accuracy([answers[question.id] for question in questions], given)
        console.print(f"VQA accuracy {result['vqa_accuracy']:.4f}")
    return result
