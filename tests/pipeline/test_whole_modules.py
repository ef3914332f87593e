"""A run that lets whole modules go: what it chooses, reports and promises."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.models import bert, save_regressor, save_stories, text_batch
from support.runs import hies, without_tracing

from hies_export import PruningPlan, PruningRecipe, load, prune
from hies_export.errors import UnsupportedModelError
from hies_export.forms.cost.bundles import flops_table
from hies_export.forms.measure.counts import count_flops
from hies_export.model.tokens import synthetic_batch
from hies_export.pipeline import choose as choosing
from hies_export.pipeline import stages
from hies_export.select.cost import CostTable

FREE = {"modules": ["attention", "mlp"], "min_heads": 0, "min_neurons": 0}
TIMED = {"runtime": "torch", "batch": 2, "sequence": 16}
WHOLE = {"multiple_of": {"heads": 6, "neurons": 64}}


@pytest.mark.filterwarnings("ignore::hies_export.slim.refit.FewTokensWarning")
@pytest.mark.parametrize("budget", [{"flops": 0.55}, {"latency": {**TIMED, "ratio": 0.55}}], ids=str)
def test_a_run_without_whole_modules(budget: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def table_of_time(model: Any, modules: Any, where: Any, *, skippable: Any, **_: Any) -> CostTable:
        assert skippable == ("attention", "mlp")
        return flops_table(model, modules, batch=where.batch)

    monkeypatch.setattr(choosing, "latency_table", table_of_time)
    prune = {**FREE, **WHOLE, "criterion": "compensated", "budget": budget, "compensation": {"samples": 60}}
    save_regressor(tmp_path, prune=prune)
    with without_tracing():
        assert hies("run", tmp_path / "recipe.yaml") == 0
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    plan = PruningPlan.from_file(tmp_path / "out" / "plan.json")
    counts = [len(kept.units) for kept in plan.kept.values()]
    assert written["heads"]["kept_per_layer"] + written["neurons"]["kept_per_layer"] == counts
    assert {*counts} == {0, 6, 64} or {*counts} in ({0, 6}, {0, 64})
    assert written["cut_max_abs"] < 1e-4
    assert written["reload_max_abs"] < 1e-4
    assert (tmp_path / "out" / "report.html").is_file()
    slim, dense = load(tmp_path / "out" / "slim"), load(tmp_path / "model")
    batch = synthetic_batch(dense, batch=2, sequence=16)
    assert written["flops"]["slim"] == count_flops(slim, batch) <= 0.55 * count_flops(dense, batch)


@pytest.mark.filterwarnings("ignore::hies_export.slim.refit.FewTokensWarning")
def test_auto_takes_no_second_step_where_a_module_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "TOKEN_WEIGHTS", (1.0,))
    monkeypatch.setattr(stages, "AUTO_CRITERIA", ("fisher",))
    model, batches = bert(num_hidden_layers=2), [text_batch() for _ in range(4)]
    result = prune(model, batches, **FREE, **WHOLE, criterion="auto", budget={"flops": 0.4}, shape=(1, 8))
    assert result.flops.ratio <= 0.4
    assert 0 in [len(kept.units) for kept in result.plan.kept.values()]


def test_a_gguf_file_without_modules_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    prune = {**FREE, "criterion": "fisher", "budget": {"flops": 0.7}}
    halves = {"calibration": {"split": "train[:50%]", "samples": 8}, "evaluation": {"split": "train[50%:]"}}
    recipe = save_stories(tmp_path, lines=40, prune=prune, export={"format": "gguf"}, **halves)
    with pytest.raises(UnsupportedModelError, match="layers may lose all heads or neurons; set min_heads and min_neu"):
        PruningRecipe.from_yaml(recipe).run()
    assert not (tmp_path / "out").exists()
