"""Names that help texts list, as the command line starts without the libraries behind them.

tests/cli/test_help.py holds them to what the package knows.
"""

RUNTIMES = (
    "torch",
    "torch-compile",
    "onnxruntime-cpu",
    "onnxruntime-cpu-int8",
    "onnxruntime-cuda",
    "onnxruntime-tensorrt",
    "openvino",
    "llamacpp",
)
CRITERIA = (
    "hies",
    "his",
    "fisher",
    "ad",
    "l2",
    "random",
    "activation-l2",
    "activation",
    "output-norm",
    "obs",
    "llm-pruner-block",
    "ae + activation-l2",
    "compensated",
    "hies-compensated",
    "kwon",
    "flap",
    "llm-pruner-channel",
    "slicegpt",
    "slicegpt-tuned",
)
