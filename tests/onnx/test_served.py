"""Settings of a folder that sentence-transformers runs; how it runs one is in test_sentence_transformers.py."""

import json
from pathlib import Path

import pytest

from hies_export import RequestError
from hies_export.checkpoint.sentence import SERVED_FILE, read_served


@pytest.mark.parametrize("file", ["../model.onnx", "..", ""])
def test_settings_that_name_a_file_elsewhere_are_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / SERVED_FILE).write_text(json.dumps({"file": file, "dimension": 3}))
    with pytest.raises(RequestError, match="which is not in its folder; export the model again"):
        read_served(tmp_path)
