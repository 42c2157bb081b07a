"""The Grafana dashboard uses only exported metrics and shows energy, power, carbon and savings."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gpuenergyd.daemon.api.metrics import metrics_text
from tests.daemon.api.test_metrics import STATUS

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "gpuenergyd.json"
PROMISED = (
    "gpuenergyd_gpu_energy_joules_total",
    "gpuenergyd_gpu_power_watts",
    "gpuenergyd_job_carbon_grams",
    "gpuenergyd_job_plan_saving_ratio",
    "gpuenergyd_saved_power_watts",
)


def exported() -> set[str]:
    """Return the names of all metrics of a daemon without unknown values."""
    status: dict[str, Any] = deepcopy(STATUS)
    for gpu in status["gpus"]:
        gpu.update({name: 1.0 for name, value in gpu.items() if value is None})
    for job in status["jobs"]:
        job.update({name: 1.0 for name, value in job.items() if value is None})
        job["carbon"] = {"carbon_g": 5.0}
    families = text_string_to_metric_families(metrics_text(status).decode())
    return {sample.name for family in families for sample in family.samples}


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_exported() -> None:
    asked = {name for query in queries() for name in re.findall(r"gpuenergyd_\w+", query)}

    assert asked
    assert asked - exported() == set()


def test_the_dashboard_shows_energy_power_carbon_and_saving() -> None:
    assert set(PROMISED) <= exported()
    assert [name for name in PROMISED if not any(name in query for query in queries())] == []


def test_counters_are_read_as_rates_and_gauges_as_they_are() -> None:
    for query in queries():
        for name in re.findall(r"gpuenergyd_\w+", query):
            assert name.endswith("_total") == bool(re.search(r"(rate|increase)\(", query)), query


def test_host_and_job_are_selected_at_the_top_of_the_dashboard() -> None:
    variables = json.loads(DASHBOARD.read_text(encoding="utf-8"))["templating"]["list"]

    assert [variable["name"] for variable in variables] == ["source", "host", "job"]
    for query in queries():
        for name, selected in re.findall(r"(gpuenergyd_\w+)(\{[^}]*\})?", query):
            assert 'instance=~"$host"' in selected, query
            assert ('job_name=~"$job"' in selected) == name.startswith("gpuenergyd_job_")


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells

    assert len({panel["id"] for panel in panels}) == len(panels)
