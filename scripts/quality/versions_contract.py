"""Run the contract of a few model types on the installed releases, and print one row of a table.

`scripts/quality/versions` runs this file in one environment after another. What failed goes to standard error.
"""

import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

SHORT = ("bert", "llama")
TYPES = ("bert", "vit", "llama", "llama/LlamaForSequenceClassification", "llava")
STEPS = ("score", "cut", "reload", "alone", "train", "onnx", "int8", "neurons", "processor")

# In a process of its own, as on a machine that has torch and transformers only.
ALONE = """
import sys
sys.modules["hies_export"] = None
import torch, transformers
folder, loader = sys.argv[1:]
model = getattr(transformers, loader).from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    torch.save(model(**torch.load(f"{folder}/batch.pt"))[0], f"{folder}/output.pt")
"""


def main() -> int:
    """Print the header, or the row of this environment; return 1 if a step fails."""
    if "--header" in sys.argv:
        print("| transformers | torch | Python |", *(f"{step} |" for step in STEPS))
        print("| --- | --- | --- |" + " --- |" * len(STEPS), flush=True)
        return 0
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    releases = [version("transformers"), version("torch"), ".".join(map(str, sys.version_info[:3]))]
    cells, failures = [], []
    for name, step in steps().items():
        results = {}
        for model_type in SHORT if "--short" in sys.argv else TYPES:
            results[model_type] = result_of(step, model_type)
        cells.append(in_short(results))
        failures += [
            f"transformers {releases[0]}, torch {releases[1]}: {name} of {model_type}: {result}"
            for model_type, result in results.items()
            if result.startswith("no: ")
        ]
    print("|", " | ".join([*releases, *cells]), "|", flush=True)
    print("\n".join(failures), end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


def steps() -> dict[str, Callable[[str], None]]:
    """Return the steps by name, each a function of a model type."""
    from support.contract import MORE_STEPS, NEURON_STEPS, Subject
    from support.contract import STEPS as HEAD_STEPS

    from hies_export.kinds import MLP

    found: dict[str, Callable[[str], None]] = {
        name: lambda model_type, step=step: step(Subject.of(model_type))
        for name, step in {**HEAD_STEPS, **MORE_STEPS}.items()
    }
    found["alone"] = alone
    found["processor"] = processor
    found["neurons"] = lambda model_type: NEURON_STEPS["cut"](Subject.of(model_type, MLP))
    return {name: found[name] for name in STEPS}


def alone(model_type: str) -> None:
    """Load an uneven cut where this package is not installed, and compare its output."""
    import torch
    from support.contract import Broken, Subject

    from hies_export.checkpoint.save import save_slim
    from hies_export.data.batches import first_output
    from hies_export.equal import SAME_CODE, Difference
    from hies_export.model.internals import auto_classes

    subject = Subject.of(model_type)
    slim = subject.slim[False]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "slim"
        save_slim(slim, folder, plan=subject.plan(False), batch=subject.batch)
        torch.save(subject.batch, folder / "batch.pt")
        loader = auto_classes(type(slim).__name__, slim.config.model_type)[0]
        done = subprocess.run([sys.executable, "-c", ALONE, folder, loader], capture_output=True, text=True)
        if done.returncode:
            raise Broken(done.stderr.splitlines()[-1])
        difference = Difference.of(torch.load(folder / "output.pt"), first_output(slim, subject.batch))
    if not difference.within(SAME_CODE):
        raise Broken(f"the outputs differ by {difference}")


def processor(model_type: str) -> None:
    """Load the processor of a model of images, which must not need torchvision."""
    import transformers
    from support.models import llava_processor
    from support.references import NotApplicable

    from hies_export.data.processors import load_processor
    from hies_export.tasks import TASKS

    if model_type not in ("vit", "llava"):
        raise NotApplicable("it reads no images")
    task = "image-classification" if model_type == "vit" else "image-text-to-text"
    saved = transformers.ViTImageProcessorPil() if model_type == "vit" else llava_processor()
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        loaded = load_processor(folder, task=TASKS[task])
    if type(loaded) is not type(saved):
        raise TypeError(f"a {type(saved).__name__} came back as {type(loaded).__name__}")


def result_of(step: Callable[[str], None], model_type: str) -> str:
    """Return "yes", "n/a", or "no: " and the reason."""
    from support.references import NotApplicable

    try:
        step(model_type)
    except NotApplicable:
        return "n/a"
    except Exception as error:  # of any library
        return f"no: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "yes"


def in_short(results: dict[str, str]) -> str:
    """Return what holds for all model types, or which of them fail."""
    wrong = [model_type for model_type, result in results.items() if result.startswith("no: ")]
    return f"not {', '.join(wrong)}" if wrong else "yes"


if __name__ == "__main__":
    sys.exit(main())
