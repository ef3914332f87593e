"""What users of transformers 4 and optimum-onnx do: run by test_interop.py in an environment of these, not by pytest.

    python old_stack.py load CLASS TASK SOURCE SUBFOLDER FOLDER    load an ONNX export, run it and its pipeline
    python old_stack.py plain ATTENTION SOURCE FOLDER              load a slim checkpoint without code, and run it
    python old_stack.py quantise FOLDER                            load FOLDER/onnx-int8, quantise FOLDER/onnx
    python old_stack.py prune MODEL_TYPE FOLDER                    prune heads as transformers 4 does, and save

FOLDER holds inputs.npz and asked.json, and gets output.npz and answers.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image


def load(class_name: str, task: str, source: str, subfolder: str, folder: Path) -> None:
    import optimum.onnxruntime
    from optimum.pipelines import pipeline

    where = {"subfolder": subfolder} if subfolder else {}
    loads = getattr(optimum.onnxruntime, class_name)
    model = (slim_decoder(loads) if task == "text-generation" else loads).from_pretrained(source, **where)
    given = {name: torch.from_numpy(value) for name, value in np.load(folder / "inputs.npz").items()}
    logits = model(**given).logits
    asked = json.loads((folder / "asked.json").read_text())
    if task == "image-classification":
        processor = transformers.AutoImageProcessor.from_pretrained(source, **where)
        ask = pipeline(task, model=model, image_processor=processor, accelerator="ort")
        answers = ask([Image.open(folder / name) for name in asked], top_k=None)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
        ask = pipeline(task, model=model, tokenizer=tokenizer, accelerator="ort")
        options = {"max_new_tokens": 12, "do_sample": False} if task == "text-generation" else {"top_k": None}
        answers = ask(asked, **options)
    found = {"logits": np.asarray(logits)}
    if task == "text-generation":
        found["tokens"] = model.generate(**given, max_new_tokens=12, do_sample=False).numpy()
    np.savez(folder / "output.npz", **found)
    (folder / "answers.json").write_text(json.dumps(answers))


def slim_decoder(base: Any) -> Any:
    """Return the class of docs/guides/serve.md, which makes the empty cache by the sizes of the graph."""

    class SlimDecoder(base):
        def forward(self, input_ids, attention_mask=None, past_key_values=None, **inputs):
            if past_key_values is None:
                sizes = [self.input_shapes[name] for name in self.key_value_input_names]
                empty = [torch.zeros(len(input_ids), heads, 0, width) for _, heads, _, width in sizes]
                past_key_values = tuple(zip(empty[::2], empty[1::2], strict=True))
            return super().forward(input_ids, attention_mask, past_key_values, **inputs)

    return SlimDecoder


def plain(attention: str, source: str, folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", attn_implementation=attention or None
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    given = {name: torch.from_numpy(value) for name, value in np.load(folder / "inputs.npz").items()}
    with torch.no_grad():
        np.savez(folder / "output.npz", logits=model(**given).logits.float().numpy())
    (folder / "answers.json").write_text(
        json.dumps(tokenizer(json.loads((folder / "asked.json").read_text()))["input_ids"])
    )


def quantise(folder: Path) -> None:
    """Load an export in 8 bits, and let Optimum quantise the one in float32 beside it."""
    from optimum.onnxruntime import AutoQuantizationConfig, ORTModelForSequenceClassification, ORTQuantizer

    given = {name: torch.from_numpy(value) for name, value in np.load(folder / "inputs.npz").items()}
    quantizer = ORTQuantizer.from_pretrained(folder / "onnx", file_name="model.onnx")
    how = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
    quantizer.quantize(save_dir=folder / "optimum", quantization_config=how)
    found = {}
    for name in ("onnx-int8", "optimum"):
        model = ORTModelForSequenceClassification.from_pretrained(folder / name, file_name="model_quantized.onnx")
        found[name] = np.asarray(model(**given).logits)
    np.savez(folder / "output.npz", **found)


def prune(model_type: str, folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 64}
    text = {"vocab_size": 100, "max_position_embeddings": 64}
    makes = {
        "bert": (transformers.BertForSequenceClassification, text),
        "roberta": (transformers.RobertaForSequenceClassification, {**text, "pad_token_id": 1}),
        "electra": (transformers.ElectraForSequenceClassification, text),
        "vit": (transformers.ViTForImageClassification, {"image_size": 16, "patch_size": 4}),
        "deit": (transformers.DeiTForImageClassification, {"image_size": 16, "patch_size": 4}),
    }
    make, options = makes[model_type]
    model = make(make.config_class(**sizes, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.prune_heads({0: [1, 4], 2: [0, 2, 3, 5]})
    given = {name: torch.from_numpy(value) for name, value in np.load(folder / "inputs.npz").items()}
    with torch.no_grad():
        np.savez(folder / "output.npz", logits=model(**given).logits.numpy())
    model.save_pretrained(folder / "pruned")


if __name__ == "__main__":
    {"load": load, "plain": plain, "quantise": quantise, "prune": prune}[sys.argv[1]](
        *sys.argv[2:-1], Path(sys.argv[-1])
    )
