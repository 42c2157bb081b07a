"""JSON field names and exit codes of the commands are contracts: scripts rely on them."""

import json
import math
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.daemon_process import running_daemon, training
from tests.support.sample_history import write_sample_history
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = str(ROOT / "examples" / "pipeline.csv")
OUTCOME = "energy_j iteration_time_s saving_ratio slowdown_ratio"
CLOCK = "chunk instruction microbatch sm_clock_mhz stage"

PLAN = {
    "": (
        "any_order_bound_ratio baseline_energy_j baseline_time_s clocks compile_cpu_s energy_j extra_inflight frontier"
        " held_microbatches iteration_time_s lower_bound_j num_microbatches num_stages order own_order_energy_j"
        " own_order_saving_ratio own_order_time_s saving_ratio schedule slowdown_ratio solve_cpu_s switching throttling"
    ),
    "order": "0 1 2 3",
    "clocks": CLOCK,
    "frontier": "energy_j iteration_time_s lower_bound_j",
    "switching": "changes free_naive free_with_lead num_segments planned switch_latency_s",
    "switching.changes": f"{CLOCK} offset_s",
    "switching.planned": OUTCOME,
    "switching.free_naive": OUTCOME,
    "switching.free_with_lead": OUTCOME,
}
EXPLAIN = {
    "": "energy_j instructions iteration_time_s saving_ratio with_extra_inflight",
    "with_extra_inflight": "extra_inflight saving_ratio",
    "instructions": f"{CLOCK} duration_s explanation is_critical price_w reason slack_s start_s",
}
REPORT_BY_JOB = {
    "": "jobs totals",
    "totals": (
        "assumed_host_j carbon_g estimated_carbon_g gpu_energy_j gpu_estimated_j num_jobs num_jobs_counted"
        " num_not_significant pue"
        " priced_energy_j saved_carbon_g saved_energy_high_j saved_energy_j saved_energy_low_j unpriced_energy_j"
    ),
    "jobs": (
        "adjusted_baseline_energy_j adjusted_baseline_time_s assumed_host_j"
        " baseline_energy_j baseline_energy_per_token_j baseline_time_s between_iterations_j"
        " carbon_factor carbon_g carbon_kind carbon_source carbon_zone cost cost_ratio cost_s currency pue"
        " counted_from counted_until dp_rank duration_s end_reason ended_at energy_j energy_per_iteration_j"
        " energy_per_token_j estimated_carbon_g git_commit iterations_energy_j regular_energy_j"
        " gpu_energy_j gpu_estimated_j gpu_estimated_s gpu_measured_s gpu_missing_s gpu_uuids host host_power_w"
        " is_grid_replayed is_saving_significant is_simulated iteration_time_s job_id job_name lower_bound_j"
        " max_slowdown_ratio"
        " energy_scope measured_intensity_ratio num_baseline_iterations num_estimated_iterations"
        " num_iterations num_measured_iterations"
        " num_compared_baseline_iterations num_compared_tuned_iterations num_experiments num_tokens"
        " num_measured_profile_iterations num_microbatches num_profile_iterations num_ranks num_targets"
        " num_trial_iterations num_tuned_iterations outcome outcome_reason policy predicted_energy_j"
        " predicted_iteration_time_s predicted_saving_basis predicted_saving_high_ratio predicted_saving_low_ratio"
        " predicted_saving_ratio price_per_kwh priced_energy_j profile_energy_j"
        " profiling_cost_j profiling_slowdown_ratio run_key saved_by_frontier_g saved_by_plan_g saved_by_timing_g"
        " saved_energy_j saving_high_ratio saving_low_ratio saving_ratio schedule_name since_iteration"
        " slowdown_high_ratio slowdown_low_ratio slowdown_ratio slurm_job_id started_at tags total_slowdown_ratio"
        " tokens_energy_j tokens_per_j"
        " trial_cost_j trial_energy_j trial_slowdown_ratio tuned_carbon_g uid unpriced_energy_j user"
    ),
    "jobs.tags": "git_commit slurm_job_id user",
}
TRAINING_PART = (
    "assumed_host_j carbon_g cost energy_j estimated_carbon_g estimated_j estimated_s measured_s missing_s num_gpus"
    " num_jobs num_jobs_counted"
    " num_not_significant priced_energy_j saved_carbon_g saved_energy_high_j saved_energy_j saved_energy_low_j"
    " unpriced_energy_j"
)
REPORT_BY_TRAINING = {
    "": "groups",
    "groups": (
        f"{TRAINING_PART} by_gpu by_host by_replica by_stage ended_at group idle_energy_j is_simulated job_energy_j"
        " currency job_name num_hosts num_ranks num_replicas num_stages pipelines price_per_kwh pue run_key"
        " saving_high_ratio saving_low_ratio saving_ratio started_at user world_size"
    ),
    "groups.by_gpu": f"{TRAINING_PART} dp_rank gpu_uuid host pp_rank",
    "groups.by_host": f"{TRAINING_PART} host",
    "groups.by_replica": f"{TRAINING_PART} dp_rank",
    "groups.by_stage": f"{TRAINING_PART} pp_rank",
}
FIGURES_BY_GROUP = (
    "assumed_host_j carbon_g cost currency energy_j estimated_carbon_g estimated_j estimated_s host_energy_j"
    " idle_energy_j job_energy_j measured_s missing_s"
    " num_jobs num_not_significant price_per_kwh priced_energy_j pue saved_energy_j unpriced_energy_j"
)
REPORT_BY_GROUP = {"": "groups", "groups": f"{FIGURES_BY_GROUP} group"}
REPORT_BY_TWO_KEYS = {"": "groups", "groups": f"{FIGURES_BY_GROUP} user month"}
CARBON_NOW = {
    "": (
        "age_s basis carbon_intensity_g_per_kwh factor is_stale kind num_forecast_samples num_samples rejected source"
        " status valid_from zone"
    )
}
CARBON_FORECAST = {
    "": "hours issued_at_utc model skill unit zone",
    "hours": "carbon_intensity_g_per_kwh high_g_per_kwh low_g_per_kwh target_utc",
    "skill": "num_origins skill_1h_ratio skill_24h_mean_ratio skill_6h_ratio",
}
CARBON_BACKTEST = {
    "": (
        "achieved_saving_ratio captured_ratio constant_saving_ratio forecast_s_max interval_coverage_ratio methods"
        " notes num_jobs oracle_saving_ratio refit_s_max skill_1h_ratio skill_24h_mean_ratio skill_6h_ratio"
        " time_used_ratio_max timing_gain_ratio zone"
    ),
    "methods": "captured_ratio mean_slowdown_ratio name saving_ratio time_used_ratio_max worst_job_ratio",
}
RESTORE = {"": "is_complete journal outcomes", "outcomes": "above_sm_clock_mhz control detail gpu_uuid result"}
DOCTOR = {"": "findings is_degraded", "findings": "detail fix level subject"}
STATUS = {
    "": (
        "carbon clock_requests degraded_reasons driver ended_jobs files gpus host_energy idle is_degraded jobs"
        " measured_gpus mode mode_note pid policy_host power pue store swing uptime_s version watts_saved_interval"
        " watts_saved_w worker"
    ),
    "power": (
        "curve division end_at excess_w host_power_w is_cutting jobs least_w mean_w measured_w num_cuts over_s policy"
        " power_budget_w predicted_w price_per_w reason share_w source speed trouble"
    ),
    "idle": "after_s gpus is_acting is_enabled lines",
    "idle.gpus": (
        "allowed_lost_s by_use gpu_uuid index is_lowered lost_s lowered_sm_clock_mhz model_name num_lowerings reason"
        " saving use use_age_s"
    ),
    "idle.gpus.by_use": "could_lower_s energy_j lowered_s time_s use",
    "worker": "heartbeat_age_s is_alive missing_capabilities num_restarts pid sentinel_pid",
    "policy_host": "activity is_alive num_restarts pid trouble",
    "clock_requests": "num_hostile num_stale",
    "host_energy": "domains reason",
    "files": "carbon_path history_path journal_path world_path",
    "store": "num_records_waiting num_rows_dropped num_rows_written path",
    "gpus": (
        "administrator_lease calibration_lease clock_age_s energy_scope gpu_uuid index is_simulated job_id model_name"
        " power_w reading_age_s refused_readings requested_sm_clock_mhz sm_clock_mhz state switching"
        " temperature_celsius total_energy_j"
        " zeusd_client_lease"
        " application_memory_clock_mhz is_power_smoothing_on max_memory_clock_mhz memory_clock_mhz power_floor_w"
        " power_smoothing_profile secondary_power_floor_w"
        " application_sm_clock_mhz default_power_limit_w enforced_power_limit_w enforced_power_profiles"
        " foreign_sm_clock_mhz is_mig_enabled"
        " is_persistent our_power_profile power_limit_owner power_limit_w requested_power_profiles state_reason"
    ),
    "gpus.switching": "basis call_s lower_s num_earlier num_seen num_unseen raise_s seen",
    "jobs": (
        "advice advice_text age_s baseline_energy_j baseline_time_s carbon energy_j expectation extrinsic_saving_ratio"
        " is_given_up is_observing is_pipeline_member is_saving_significant is_suspended iteration_time_s"
        " job_id job_name last_notice last_notice_iterations_ago last_report_age_s lower_bound_j"
        " max_slowdown_ratio max_slowdown_source num_baseline_iterations num_faults num_iterations"
        " num_estimated_iterations"
        " num_iterations_of_plan num_microbatches num_profile_iterations num_ranks num_stage_ranks num_trial_iterations"
        " num_tuned_iterations"
        " captured order order_advice order_held_microbatches order_refusal order_saving_ratio own_order_saving_ratio"
        " plain_order_saving_ratio"
        " outcome outcome_reason own_time_s phase phase_reason pipeline pipeline_refusal plan_energy_j plan_id"
        " plan_iteration_time_s plan_purpose plan_reason"
        " policy policy_source predicted_energy_j predicted_iteration_time_s predicted_saving_basis"
        " replica_name predicted_peak_w predicted_ramp_w_per_s predicted_swing_rms_w predicted_trough_w"
        " predicted_saving_high_ratio predicted_saving_low_ratio predicted_saving_ratio ranks"
        " retry_in_iterations saving_interval saving_ratio schedule slowdown_interval slowdown_ratio straggler"
        " straggler_iteration_energy_j straggler_reason straggler_since_s straggler_time_s target"
        " waiting_iteration_energy_j watts_saved watts_saved_interval is_paused orders priority"
        " account_income_s account_left_s client_cost_s cost_ratio cost_s num_experiments"
        " num_tokens tokens_per_j total_energy_j"
    ),
    "jobs.orders": "is_paused max_slowdown_ratio policy priority",
    "jobs.ranks": "gpu_uuid pid pp_rank stage_rank uid",
}
POLICIES = {"": "policies", "policies": "error group is_usable kind name package version"}


def field_names(value: Any, path: str = "") -> dict[str, set[str]]:
    """Return the names of all fields by the path of their object; the items of a list share its path."""
    found: dict[str, set[str]] = {}
    if isinstance(value, dict):
        found[path] = set(value)
        for name, item in value.items():
            for inner, names in field_names(item, f"{path}.{name}".lstrip(".")).items():
                found.setdefault(inner, set()).update(names)
    elif isinstance(value, list):
        for item in value:
            for inner, names in field_names(item, path).items():
                found.setdefault(inner, set()).update(names)
    return found


def expected(contract: dict[str, str]) -> dict[str, set[str]]:
    return {path: set(names.split()) for path, names in contract.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Enter a folder with the input files of the commands."""
    write_sample_history(tmp_path / "history.sqlite3")
    SimulatedHost.create(tmp_path / "world", ["a100-sxm"], seed=1).close()
    (tmp_path / "frontier.json").write_text('[{"T": 1.0, "E": 100.0}, {"T": 1.05, "E": 91.0}]')
    rows = ["timestamp_utc,carbon_intensity_g_per_kwh"]
    for hour in range(24 * 40):
        month, day = ("03", hour // 24 + 1) if hour < 24 * 31 else ("04", hour // 24 - 30)
        value = 200 + 80 * math.cos(2 * math.pi * hour / 24) + 10 * math.sin(hour)
        rows.append(f"2026-{month}-{day:02d}T{hour % 24:02d}:00:00Z,{value:.1f}")
    (tmp_path / "GB_trace.csv").write_text("\n".join(rows) + "\n")
    with chdir(tmp_path):
        yield tmp_path


@pytest.mark.parametrize(
    ("command", "contract"),
    [
        (f"plan {PIPELINE} --microbatches 4 --frontier --max-switches 4 --switch-latency-s 0.01", PLAN),
        (f"explain {PIPELINE} --microbatches 4", EXPLAIN),
        ("report --database history.sqlite3", REPORT_BY_JOB),
        ("report --database history.sqlite3 --group-by training", REPORT_BY_TRAINING),
        ("report --database history.sqlite3 --group-by user", REPORT_BY_GROUP),
        ("report --database history.sqlite3 --group-by day", REPORT_BY_GROUP),
        ("report --database history.sqlite3 --group-by user,month", REPORT_BY_TWO_KEYS),
        ("carbon now --zone GB --fixed 210", CARBON_NOW),
        ("carbon forecast GB_trace.csv", CARBON_FORECAST),
        (
            "carbon backtest GB_trace.csv --train-until 2026-04-05 --frontier frontier.json --job-hours 24 --starts 2",
            CARBON_BACKTEST,
        ),
        ("restore --all --driver simulated --world world", RESTORE),
        ("policies", POLICIES),
    ],
    ids=lambda value: " ".join(value.split()[:2]).split("/")[0] if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("folder")
def test_json_field_names_of_commands_stay(
    command: str, contract: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), "--json"]) == 0

    assert field_names(json.loads(capsys.readouterr().out)) == expected(contract)


def test_json_field_names_of_doctor_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--socket", str(folder / "none.sock"), "--json"])

    assert field_names(json.loads(capsys.readouterr().out)) == expected(DOCTOR)


def test_json_field_names_of_status_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon(tmp_path) as daemon, training(daemon):
        wait_until(lambda: daemon.job() is not None)
        wait_until(lambda: any(gpu["by_use"] for gpu in daemon.status()["idle"]["gpus"]))
        assert run(["status", "--socket", str(daemon.socket_path), "--json"]) == 0

    status = json.loads(capsys.readouterr().out)
    status["host_energy"]["domains"] = []  # depends on the host
    assert field_names(status) == expected(STATUS)


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        ("policies", 0),
        ("report --database none.sqlite3", 1),
        ("plan none.csv", 2),
        ("report --since yesterday", 2),
        ("status --no-such-option", 2),
        ("status --socket none.sock", 3),
        ("doctor --config none.toml", 4),
    ],
)
@pytest.mark.usefixtures("folder")
def test_exit_codes_are_0_success_1_failure_2_usage_3_daemon_not_running_4_degraded(
    command: str, exit_code: int
) -> None:
    assert run(command.split()) == exit_code
