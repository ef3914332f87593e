"""Publish a finished run on the Hugging Face Hub.

In comes the folder that `hies-export run` wrote; out comes one commit with the slim checkpoint at the top, `onnx/`, the
report, its figures, and a card with the metadata that the Hub asks for.

- `push.py`: checks the request (token, licence, what the repository holds), collects the files, and commits them.
"""
