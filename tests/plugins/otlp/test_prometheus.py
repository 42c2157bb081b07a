"""Metrics: the status in base units and conventional names, without unknown values."""

import json
import re
import shutil
import subprocess
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gpuenergyd_otlp.metrics import otlp_metrics
from gpuenergyd_otlp.prometheus import StatusCollector, metrics_text

GPU = {
    "gpu_uuid": "GPU-a",
    "index": 0,
    "model_name": 'A100 "SXM"\\',
    "is_simulated": True,
    "state": "ok",
    "sm_clock_mhz": 1200,
    "requested_sm_clock_mhz": None,
    "power_w": 250.5,
    "total_energy_j": 12345.5,
    "temperature_celsius": 40.0,
    "reading_age_s": 0.1,
    "switching": {
        "basis": "measured",
        "raise_s": 0.006,
        "lower_s": 0.005,
        "call_s": 0.004,
        "num_seen": 90,
        "num_unseen": 2,
        "seen": [
            {"direction": "raise", "from_region": None, "low_s": 0.004, "median_s": 0.005, "high_s": None},
            {"direction": "raise", "from_region": "low", "low_s": 0.1, "median_s": 0.1, "high_s": 0.1},
        ],
    },
    "job_id": "j",
}
JOB = {
    "job_id": "j",
    "job_name": "line\nbreak",
    "phase": "tuned",
    "policy": "bubble-aware",
    "num_iterations": 12,
    "baseline_time_s": 1.0,
    "baseline_energy_j": None,
    "iteration_time_s": 1.01,
    "energy_j": None,
    "saving_ratio": None,
    "slowdown_ratio": 0.01,
    "max_slowdown_ratio": 0.0,
    "last_report_age_s": 0.5,
    "predicted_saving_ratio": None,
    "watts_saved": None,
}
STATUS: dict[str, Any] = {
    "uptime_s": 5.0,
    "is_degraded": False,
    "worker": {"is_alive": True, "num_restarts": 1},
    "policy_host": {"is_alive": True, "num_restarts": 0},
    "store": {"num_rows_written": 10, "num_rows_dropped": 0},
    "clock_requests": {"num_stale": 3, "num_hostile": 4},
    "gpus": [GPU, {**GPU, "gpu_uuid": "GPU-b", "index": 1, "power_w": None, "total_energy_j": None}],
    "jobs": [JOB],
    "watts_saved_w": 40.5,
}
DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "gpuenergyd.json"
PROMISED = (
    "gpuenergyd_gpu_energy_joules_total",
    "gpuenergyd_gpu_power_watts",
    "gpuenergyd_job_carbon_grams",
    "gpuenergyd_job_plan_saving_ratio",
    "gpuenergyd_saved_power_watts",
)


def samples(status: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return every sample by name and identifying label."""
    found = {}
    for family in text_string_to_metric_families(metrics_text(status).decode()):
        for sample in family.samples:
            labels = sample.labels
            telling = labels.get("gpu_uuid") or labels.get("job_id") or labels.get("reason") or ""
            found[sample.name, telling] = sample.value
    return found


def test_figures_are_in_base_units_and_counters_end_in_total() -> None:
    found = samples(STATUS)

    assert found["gpuenergyd_gpu_energy_joules_total", "GPU-a"] == 12345.5
    assert found["gpuenergyd_gpu_power_watts", "GPU-a"] == 250.5
    assert found["gpuenergyd_gpu_sm_clock_hertz", "GPU-a"] == 1.2e9
    assert found["gpuenergyd_job_plan_slowdown_ratio", "j"] == 0.01
    assert found["gpuenergyd_job_iterations_total", "j"] == 12
    assert found["gpuenergyd_clock_requests_refused_total", "hostile"] == 4
    assert found["gpuenergyd_worker_restarts_total", ""] == 1
    assert found["gpuenergyd_saved_power_watts", ""] == 40.5


CARBON = {
    "carbon_g": 90.0,
    "unpriced_j": 1.0,
    "saved_by_plan_g": 8.0,
    "saved_by_frontier_g": 1.0,
    "saved_by_timing_g": -2.0,
}


def test_emissions_that_a_revision_may_lower_are_a_gauge() -> None:
    """Prometheus would take a lower value of a counter for a restart, and add all of it again."""
    families = {
        f.name: f.type
        for f in text_string_to_metric_families(metrics_text({**STATUS, "jobs": [{**JOB, "carbon": CARBON}]}).decode())
    }

    assert families["gpuenergyd_job_carbon_grams"] == "gauge"
    decreasing = [name for name, kind in families.items() if kind == "counter" and name.endswith("grams")]
    assert decreasing == []


@pytest.mark.parametrize(("is_significant", "saved_g"), [(True, 8.0), (False, None), (None, None)])
def test_emissions_saved_are_absent_while_the_saving_may_be_chance(
    *, is_significant: bool | None, saved_g: float | None
) -> None:
    job = {**JOB, "carbon": CARBON, "is_saving_significant": is_significant}

    found = samples({**STATUS, "jobs": [job]})

    assert found["gpuenergyd_job_carbon_grams", "j"] == 90.0
    assert found.get(("gpuenergyd_job_saved_by_plan_grams", "j")) == saved_g


def test_the_text_equals_that_of_the_prometheus_library() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(STATUS))

    assert metrics_text(STATUS) == generate_latest(registry)


def test_each_gpu_is_found_by_the_labels_of_dcgm_exporter() -> None:
    """So a query joins both: `DCGM_FI_PROF_SM_ACTIVE * on (UUID) group_left (gpu_uuid) gpuenergyd_gpu_info`."""
    found = [
        sample.labels
        for family in text_string_to_metric_families(metrics_text(STATUS).decode())
        for sample in family.samples
        if sample.name == "gpuenergyd_gpu_info"
    ]

    assert [labels["UUID"] for labels in found] == ["GPU-a", "GPU-b"]
    for labels in found:
        own = (labels["index"], labels["gpu_uuid"], labels["model_name"], gethostname())
        assert (labels["gpu"], labels["UUID"], labels["modelName"], labels["hostname"]) == own
        assert labels["Hostname"] == labels["hostname"]


def test_energy_of_a_module_is_marked_and_not_exported_as_that_of_a_gpu() -> None:
    status = {**STATUS, "gpus": [{**GPU, "energy_scope": "module"}]}
    body = otlp_metrics(status, at=datetime.now(tz=UTC), host_name="node17")

    sent = {metric["name"] for metric in body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]}
    assert {name for name in sent if name.startswith("hw.")} == {"hw.temperature"}
    assert 'energy_scope="module"' in metrics_text(status).decode()


def test_readings_that_cannot_be_right_are_counted_by_kind() -> None:
    refused = {"refused_readings": [{"name": "power_w", "num": 3, "reason": "3.7e+06 W"}]}

    text = metrics_text({**STATUS, "gpus": [{**GPU, **refused}]}).decode()

    (line,) = [line for line in text.splitlines() if line.startswith("gpuenergyd_gpu_refused_readings_total{")]
    assert 'value="power_w"' in line
    assert line.endswith(" 3.0")


def test_unknown_values_are_omitted_never_zero() -> None:
    found = samples(STATUS)

    assert ("gpuenergyd_gpu_power_watts", "GPU-b") not in found
    assert ("gpuenergyd_gpu_energy_joules_total", "GPU-b") not in found
    assert ("gpuenergyd_job_plan_saving_ratio", "j") not in found
    assert ("gpuenergyd_job_saved_power_watts", "j") not in found
    assert ("gpuenergyd_saved_power_watts", "") not in samples({**STATUS, "watts_saved_w": None})
    assert ("gpuenergyd_gpu_requested_sm_clock_hertz", "GPU-a") not in found


def test_promtool_accepts_the_metrics() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian package prometheus) is not installed")

    checked = subprocess.run(
        [promtool, "check", "metrics"], input=metrics_text(STATUS), capture_output=True, check=False
    )

    found = {line for line in checked.stderr.decode().splitlines() if line}
    assert {line for line in found if not line.startswith("gpuenergyd_gpu_info label names")} == set()


def test_planned_and_measured_switch_latencies_are_exported() -> None:
    families = {f.name: f for f in text_string_to_metric_families(metrics_text(STATUS).decode())}

    planned = families["gpuenergyd_gpu_planned_switch_latency_seconds"].samples
    seen = families["gpuenergyd_gpu_switch_latency_seconds"].samples
    counted = families["gpuenergyd_gpu_switches"].samples
    assert {s.labels["direction"]: s.value for s in planned} == {"raise": 0.006, "lower": 0.005}
    assert {(s.labels["direction"], s.labels["percentile"]): s.value for s in seen} == {
        ("raise", "10"): 0.004,
        ("raise", "50"): 0.005,
    }
    assert {s.labels["seen"]: s.value for s in counted} == {"true": 90, "false": 2}


def test_swings_are_gauges_where_known() -> None:
    swing = {"peak_w": 1551.0, "trough_w": 700.0, "ramp_w_per_s": 320.0, "swing_rms_w": 250.0}
    found = samples({**STATUS, "swing": swing, "jobs": [{**JOB, "predicted_swing_rms_w": 240.0}]})

    assert found["gpuenergyd_power_peak_watts", ""] == 1551.0
    assert found["gpuenergyd_power_trough_watts", ""] == 700.0
    assert found["gpuenergyd_power_ramp_watts_per_second", ""] == 320.0
    assert found["gpuenergyd_power_swing_rms_watts", ""] == 250.0
    assert found["gpuenergyd_job_predicted_swing_rms_watts", "j"] == 240.0
    assert not [name for name, _ in samples({**STATUS, "swing": None}) if "swing" in name or "ramp" in name]


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
