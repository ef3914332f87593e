"""What users of vLLM do: run by test_vllm.py in an environment of it, not by pytest.

    python vllm_generate.py SOURCE FOLDER

FOLDER holds prompts.json, lists of token ids, and options.json, for `vllm.LLM`; it gets answers.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

NEW_TOKENS = 64


def main(source: str, folder: Path) -> None:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    options: dict[str, Any] = json.loads((folder / "options.json").read_text())
    processes = options.get("tensor_parallel_size", 1)
    if processes > 1:  # a core for each; by itself it gives each a NUMA node
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(processes)))
    from vllm import LLM, SamplingParams

    # Without a tokenizer; and without compiling, which takes minutes.
    model = LLM(
        model=source, dtype="float32", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True, **options
    )
    prompts = [{"prompt_token_ids": ids} for ids in json.loads((folder / "prompts.json").read_text())]
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=5, ignore_eos=True, detokenize=False)
    found = [answer.outputs[0] for answer in model.generate(prompts, greedy)]
    answers = [
        {
            "tokens": list(one.token_ids),
            "logprobs": [{token: value.logprob for token, value in step.items()} for step in one.logprobs],
        }
        for one in found
    ]
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
