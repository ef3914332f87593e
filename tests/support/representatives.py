"""Name the model types that every test run covers: each layout of attention once, each reason for a refusal once.

Layouts that tests/units/test_find_attention.py cuts are not among them.
"""

CUT = {
    "albert": "layers that share their weights",
    "bert": "separate projections with biases",
    "bloom": "attention of its own, fused head by head, a bias of batch times heads",
    "bros": "places that all heads share, also when a layer has one head",
    "clip": "images through a tower of its own",
    "deberta-v2": "attention of its own",
    "flaubert": "attention that is a block, adds to a cache nobody asked for, and is followed by a change in place",
    "funnel": "one tensor given to a block three times",
    "gemma4_text": "keys and values that layers share",
    "gpt2": "fused, transposed weights",
    "gpt_oss": "sinks",
    "llama": "grouped queries, no biases",
    "llava": "two towers",
    "mimo_v2_flash": "values narrower than keys, another number of groups in some layers",
    "mpnet": "a bias that layers share",
    "qwen2_5_vl_vision": "one call of the attention function per image",
    "swin": "windows of an image, a table of biases",
}
# By type, or type and class, for `-m exports`; both the graph and its 8 bits are compared with torch.
QUANTISED = {
    "llama/LlamaForSequenceClassification": "a decoder that classifies, and does not generate",
    "albert": "an encoder, whose layers share their weights",
    "gpt2": "a decoder whose head is its embedding",
}
# Decoders that do not generate, for `-m exports`.
DECODERS = {"gpt2/GPT2ForSequenceClassification": "a classifier", "qwen3/Qwen3Model": "no head"}
REFUSED = {
    "bart": "an encoder and a decoder",
    "beam": "code that fails with fewer heads",
    "bitnet": "heads that are mixed before the output projection",
    "blip": "code that reads the number of heads off its input",
    "diffllama": "values that heads share",
    "fnet": "no attention",
    "jetmoe": "queries that no linear layer makes",
    "lilt": "features that two kinds of attention read",
    "luke": "layers that only some inputs reach",
    "mra": "attention of its own, of blocks",
    "nemotron3_diarization_audio": "numbers of heads that do not match",
    "olmo2": "a norm across heads",
}
NEURONS = {
    "bert": "separate layers with biases",
    "gpt2": "transposed weights, in a field of the config that is unset",
    "llama": "gated",
    "mobilevit": "what goes into blocks goes around them too",
    "phi3": "gate and up fused",
    "vit": "images",
}
NEURONS_REFUSED = {"bitnet": "a norm over neurons", "mixtral": "experts", "resnet": "no block"}
