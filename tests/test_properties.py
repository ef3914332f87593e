"""Whatever happens to a file that the tool reads, it is read, or refused in a sentence; see scripts/quality/fuzz."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.readers import MAKERS
from support.reads import Read, outcome

EXAMPLES = settings(
    derandomize=True,
    database=None,
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LEAST_SHARE = 3  # what takes longer is left to scripts/quality/fuzz


@pytest.fixture(scope="module", params=MAKERS, ids=lambda make: make.__name__.strip("_"))
def reads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Read]:
    make: Callable[[Path], list[Read]] = request.param
    return make(tmp_path_factory.mktemp("read"))


def test_undamaged_files_are_read(reads: list[Read]) -> None:
    # Some files are read by the same use of their folder.
    for read in {read.read: read for read in reads if read.share >= LEAST_SHARE}.values():
        came, error = outcome(read.read)
        assert came == "accepted", f"{read.name}: {error!r}"


@EXAMPLES
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_damaged_file_is_read_or_refused(reads: list[Read], data: st.DataObject, seed: int) -> None:
    read = data.draw(st.sampled_from([read for read in reads if read.share >= LEAST_SHARE]))
    with read.damage(random.Random(seed)) as damaged:
        came, error = outcome(read.read)
    assert came in ("accepted", "refused"), f"{read.name}: {error!r} of {damaged[:300]!r}"
