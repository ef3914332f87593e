"""Which two models `bench` compares, and on what."""

from pathlib import Path

import pytest
from support.models import bert, vit

from hies_export.errors import RequestError
from hies_export.pipeline.bench import bench


def test_models_of_different_vocabularies_read_the_tokens_of_the_smaller(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "large")
    bert(vocab_size=7).save_pretrained(tmp_path / "small")
    for first, second in (("large", "small"), ("small", "large")):
        (row,) = bench(tmp_path / first, tmp_path / second, shapes=[(4, 16)], repeats=2)
        assert (row.batch, row.sequence) == (4, 16)


def test_images_must_be_of_one_size(tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path / "small")
    vit(image_size=32).save_pretrained(tmp_path / "large")
    with pytest.raises(RequestError, match="same kind of input .* got images of 3 x 16 and images of 3 x 32"):
        bench(tmp_path / "small", tmp_path / "large")


def test_a_shape_that_fills_the_memory_is_refused(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"a shape must have at most 16,777,216 tokens .* got \[2000000, 16\]"):
        bench(tmp_path, tmp_path, shapes=[(2_000_000, 16)])
