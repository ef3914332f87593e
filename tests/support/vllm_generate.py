"""What users of vLLM do: run by test_vllm.py in an environment of it, not by pytest.

    python vllm_generate.py SOURCE FOLDER

FOLDER holds prompts.json, lists of token ids, and options.json, for `vllm.LLM`; it gets answers.json. With "times"
among the options, all prompts are answered as many times again, and seconds.json says how long each time took. A
pooling model ("runner": "pooling") gives the state of every token instead, of length 1.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

NEW_TOKENS = 64


def main(source: str, folder: Path) -> None:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    options: dict[str, Any] = json.loads((folder / "options.json").read_text())
    times = options.pop("times", 0)
    processes = options.get("tensor_parallel_size", 1)
    if processes > 1:  # a core for each; by itself it gives each a NUMA node
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(processes)))
    from vllm import LLM, SamplingParams

    pools = options.get("runner") == "pooling"
    # Without a tokenizer, which only pooling needs; and unless asked for without compiling, which takes minutes.
    usual: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 128,
        "enforce_eager": True,
        "skip_tokenizer_init": not pools,
    }
    if pools:
        from vllm.config import PoolerConfig

        usual["pooler_config"] = PoolerConfig(task="token_embed")
    model = LLM(model=source, **usual | options)
    prompts: Any = [{"prompt_token_ids": ids} for ids in json.loads((folder / "prompts.json").read_text())]
    if pools:
        states = [answer.outputs.data.tolist() for answer in model.encode(prompts, pooling_task="token_embed")]
        (folder / "answers.json").write_text(json.dumps(states))
        (folder / "seconds.json").write_text("[]")
        return
    greedy = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False}
    found = [answer.outputs[0] for answer in model.generate(prompts, SamplingParams(**greedy, logprobs=5))]
    answers = [
        {
            "tokens": list(one.token_ids),
            "logprobs": [{token: value.logprob for token, value in step.items()} for step in one.logprobs],
        }
        for one in found
    ]
    (folder / "answers.json").write_text(json.dumps(answers))
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        model.generate(prompts, SamplingParams(**greedy))
        seconds.append(time.perf_counter() - start)
    (folder / "seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
