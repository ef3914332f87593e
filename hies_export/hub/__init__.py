"""Publish a finished run on the Hugging Face Hub.

The input is the folder that a run wrote; the output is one commit with the slim checkpoint at the top, `onnx/`, the
report, its figures, and a card with the metadata that the Hub requires.

- `push.py`: check the request (token, licence, existing files of the repository), collect the files, commit them.
"""
