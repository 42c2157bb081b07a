"""`gpuenergyd status` shows the daemon's status; its exit code reports health."""

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from gpuenergyd.cli.main import run
from gpuenergyd.errors import DaemonNotRunningError
from gpuenergyd.report.terminal.live import status_view, view_lines
from tests.support.sample_status import sample_status

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "pid": 12,
    "uptime_s": 75.2,
    "is_degraded": False,
    "degraded_reasons": [],
    "driver": "simulated",
    "mode": "control",
    "worker": {"pid": 13, "is_alive": True, "heartbeat_age_s": 0.1},
    "policy_host": {"pid": 14, "is_alive": True},
    "gpus": [
        {
            "gpu_uuid": "GPU-0",
            "index": 0,
            "model_name": "NVIDIA A100-SXM4-40GB",
            "is_simulated": True,
            "state": "ok",
            "sm_clock_mhz": 1050,
            "requested_sm_clock_mhz": 1050,
            "power_w": 187.4,
            "total_energy_j": 1234.5,
            "temperature_celsius": None,
            "reading_age_s": 0.1,
            "switching": {"basis": "measured", "raise_s": 0.0061, "lower_s": 0.0053},
            "job_id": "j1",
        }
    ],
    "jobs": [
        {
            "job_id": "j1",
            "job_name": "gpt",
            "phase": "tuned",
            "policy": "bubble-aware",
            "schedule": "1f1b",
            "num_ranks": 4,
            "num_microbatches": 8,
            "num_iterations": 40,
            "plan_id": "tuned-1",
            "plan_purpose": "tuned",
            "plan_reason": "slack on 3 of 4 ranks",
            "baseline_time_s": 0.5,
            "baseline_energy_j": 400.0,
            "num_baseline_iterations": 10,
            "iteration_time_s": 0.501,
            "energy_j": 340.0,
            "num_tuned_iterations": 6,
            "saving_ratio": 0.15,
            "is_saving_significant": True,
            "num_iterations_of_plan": 5,
            "plan_iteration_time_s": 0.499,
            "plan_energy_j": 336.0,
            "slowdown_ratio": 0.002,
            "num_trial_iterations": 20,
            "max_slowdown_ratio": 0.0,
            "predicted_iteration_time_s": 0.5,
            "predicted_energy_j": 338.0,
            "lower_bound_j": 330.0,
            "age_s": 30.0,
            "last_report_age_s": 0.2,
            "ranks": [],
        }
    ],
    "store": {"path": "x", "num_rows_written": 5, "num_rows_dropped": 0},
}


def drawn(status: dict[str, Any]) -> str:
    """Return the view as text, 80 columns wide."""
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(status_view(status))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_gpus_and_jobs_are_shown_with_units_and_ages() -> None:
    text = drawn(STATUS)

    assert all(
        figure in text
        for figure in ("1050 MHz", "187 W", "500.0 ms", "400.0 J", "15.0 % less", "0.2 % slower", "0.1 s")
    )
    assert "slack on 3 of 4 ranks" in text


@pytest.mark.parametrize("models", [("NVIDIA A100-SXM4-80GB",), ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")])
def test_long_names_of_models_and_jobs_are_complete_on_80_columns(models: tuple[str, ...]) -> None:
    status = copy.deepcopy(STATUS)
    (gpu,), (job,) = status["gpus"], status["jobs"]
    names = [f"megatron-gpt-1.3b-pretraining-run-{k}" for k in (7, 8)]
    status["jobs"] = [{**job, "job_id": name, "job_name": name} for name in names]
    status["gpus"] = [
        {**gpu, "index": k, "model_name": models[k % len(models)], "job_id": name} for k, name in enumerate(names)
    ]

    text = drawn(status)

    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for index, name in enumerate(names):
        row = text.partition(f"\n  {index}  ")[2].splitlines()[:2]
        assert row[-1].strip() == name
    parts = ("2 GPUs: A100-SXM4-80GB",) if len(models) == 1 else ("GPU: A100-SXM4-80GB (0)", "GPU: H100 80GB HBM3 (1)")
    assert all(part in text for part in parts)


def test_status_shows_the_sources_of_options_the_expectation_and_the_reason_for_no_saving() -> None:
    status = copy.deepcopy(STATUS)
    status["jobs"][0] |= {
        "policy_source": "daemon",
        "max_slowdown_source": "environment",
        "max_slowdown_ratio": 0.05,
        "expectation": "saves energy by running up to 5 % slower",
        "outcome": "at_full_speed",
        "outcome_reason": "policy uniform failed: ValueError: no clock",
    }

    text = " ".join(drawn(status).split())

    assert "policy the daemon's default; permitted slowdown 5 %, from the environment: saves energy by running" in text
    assert "no saving so far: policy uniform failed: ValueError: no clock" in text
    ended = {"job_name": "gpt", "job_id": "gpt-1", "ended_age_s": 12.0, "summary": "12.0 % less energy"}
    assert "gpt (gpt-1) ended 12 s ago: 12.0 % less energy" in drawn(status | {"ended_jobs": [ended]})
    status["jobs"][0]["outcome"] = "saved"
    assert "no saving so far" not in drawn(status)


@pytest.mark.parametrize("mode", ["observe", "control"])
def test_gpus_that_a_daemon_only_observes_are_a_problem_unless_it_is_in_mode_observe(mode: str) -> None:
    gpus = [STATUS["gpus"][0] | {"state": "observe_only"}]
    status = STATUS | {"gpus": gpus, "mode": mode, "mode_note": "no mode is set"}

    (line,) = [line for line in view_lines(status, 120, 40) if "observe_only" in line.plain]

    assert any(span.style == "bold red" for span in line.spans) is (mode == "control")
    assert "no mode is set" in drawn(status)


def test_missing_figures_are_shown_as_missing() -> None:
    status = copy.deepcopy(STATUS)
    status["gpus"][0] |= {"sm_clock_mhz": None, "power_w": None, "requested_sm_clock_mhz": None}
    figures = ("baseline_time_s", "baseline_energy_j", "iteration_time_s", "energy_j", "saving_ratio", "slowdown_ratio")
    status["jobs"][0] |= dict.fromkeys((*figures, "predicted_energy_j", "lower_bound_j", "plan_id", "plan_reason"))

    rows = [line.split() for line in drawn(status).splitlines()]

    assert ["0", "ok", "-", "full", "-", "-", "0.1", "s", "gpt"] in rows
    assert ["baseline", "-", "-", "10"] in rows
    assert ["tuned", "-", "-", "6"] in rows
    assert ["gpt", "tuned:", "no", "saving", "measured", "yet"] in rows


def test_the_status_leads_with_the_watts_saved_now_and_adds_up_significant_savings_only() -> None:
    status = sample_status()

    lines = [line.rstrip() for line in drawn(status).splitlines()]
    blank = drawn(status | {"watts_saved_w": None, "watts_saved_interval": None})

    assert lines[1] == "146 W saved now (95 %: 143 W to 150 W; 1 of 3 jobs)"
    assert lines[2] == "not counted, because not significant: llama-ddp (3 W)"
    assert "13.4 % less energy (95 %: 13.1 % to 13.7 % less), no slower" in "\n".join(lines)
    assert "no significant saving now" in blank


def test_a_saving_that_may_be_chance_is_no_claim() -> None:
    status = copy.deepcopy(STATUS)
    status["jobs"][0] |= {
        "saving_ratio": 0.412, "saving_interval": (-0.57, 0.48), "is_saving_significant": False, "watts_saved": 90.0,
        "watts_saved_interval": (-120.0, 100.0),
    }  # fmt: skip

    text = " ".join(drawn(status).split())

    assert "no significant saving (95 %: 57.0 % more to 48.0 % less energy), 0.2 % slower" in text
    assert "41.2" not in text
    assert "not counted, because not significant: gpt (90 W)" in text


def test_the_plan_in_force_is_compared_with_its_own_prediction_and_bound() -> None:
    """Earlier plans of a job, e.g. under a slower target, may have used less than this plan can."""
    rows = [" ".join(line.split()) for line in drawn(STATUS).splitlines()]

    begin = rows.index("tuned 501.0 ms 340.0 J 6")
    assert rows[begin + 1 : begin + 4] == [
        "plan in force 499.0 ms 336.0 J 5", "predicted (fit) 500.0 ms 338.0 J", "lower bound (fit) 330.0 J"
    ]  # fmt: skip
    assert not any("fitted lower bound" in row for row in rows)


def test_a_measurement_below_the_lower_bound_is_explained_by_the_fit() -> None:
    status = copy.deepcopy(STATUS)
    status["jobs"][0]["plan_energy_j"] = 326.7

    text = " ".join(drawn(status).split())

    assert "plan in force: measured energy is 1.0 % below the fitted lower bound" in text


def test_every_lease_is_shown_with_what_it_sets_and_for_how_long() -> None:
    status = copy.deepcopy(STATUS)
    free = {**status["gpus"][0], "job_id": None}
    lease = {"lease_id": "x", "uid": 0, "pid": None, "age_s": 9.0}
    limited = {**lease, "sm_clock_mhz": 1200, "power_limit_w": 300.0, "remaining_s": 125.0}
    client = {**lease, "uid": 1001, "pid": 77, "sm_clock_mhz": None, "power_limit_w": 250.0, "remaining_s": None}
    status["gpus"] += [
        {**free, "index": 1, "administrator_lease": limited}, {**free, "index": 2, "zeusd_client_lease": client}
    ]  # fmt: skip

    text = " ".join(drawn(status).split())

    expected = [
        "GPU 1: administrator lease (uid 0): clock locked at 1200 MHz, power limited to 300 W, for 2 min 5 s more",
        "GPU 2: zeusd client lease (uid 1001, pid 77): power limited to 250 W, until released",
    ]
    assert all(line in text for line in expected)
    assert all(any(line in str(row) for row in view_lines(status, 120, 40)) for line in expected)


def test_a_host_without_gpus_and_jobs_is_shown() -> None:
    text = drawn(STATUS | {"gpus": [], "jobs": []})

    assert "no GPU found" in text
    assert "no jobs" in text


@pytest.mark.parametrize(("is_degraded", "exit_code"), [(False, 0), (True, 4)])
def test_the_exit_code_is_4_when_the_daemon_is_degraded(
    *, is_degraded: bool, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = STATUS | {"is_degraded": is_degraded, "degraded_reasons": ["the worker is gone"] * is_degraded}
    monkeypatch.setattr("gpuenergyd.client.connection.DaemonClient.get_status", lambda _self: status)

    assert run(["status"]) == exit_code
    assert ("degraded: the worker is gone" in capsys.readouterr().out) is is_degraded


def test_status_shows_switch_latency_and_its_source() -> None:
    quick, slow = ({"basis": b, "raise_s": r, "lower_s": 0.005} for b, r in (("measured", 0.006), ("assumed", 0.03)))
    gpu = STATUS["gpus"][0]

    text = drawn(STATUS | {"gpus": [gpu | {"switching": quick}, gpu | {"index": 1, "switching": slow}]})

    line = "switch latency: raise 6.0 ms to 30.0 ms, lower 5.0 ms (assumed on 1 of 2 GPUs, measured on 1 of 2 GPUs)"
    assert line in " ".join(text.split())


def test_status_names_latencies_that_an_earlier_daemon_measured() -> None:
    kept = {"basis": "measured_earlier", "raise_s": 0.006, "lower_s": 0.005}

    text = drawn(STATUS | {"gpus": [STATUS["gpus"][0] | {"switching": kept}]})

    assert "lower 5.0 ms (measured by an earlier daemon on 1 of 1 GPU)" in " ".join(text.split())


def test_status_shows_predicted_savings_with_their_basis() -> None:
    reported = {
        "is_observing": True,
        "predicted_saving_ratio": 0.12,
        "predicted_saving_low_ratio": 0.08,
        "predicted_saving_high_ratio": 0.19,
        "predicted_saving_basis": "assumed curves",
    }
    name, low = "predicted_saving_ratio", "predicted_saving_low_ratio"
    unknown = reported | dict.fromkeys((name, low, "predicted_saving_high_ratio"))

    text, blank = (drawn(STATUS | {"jobs": [STATUS["jobs"][0] | job]}) for job in (reported, unknown))

    shown = " ".join(text.split())
    assert "predicted saving: 12.0 % less energy (range: 8.0 % to 19.0 % less energy); assumed curves" in shown
    assert "predicted saving: unknown; assumed curves" in blank
    nothing = drawn(STATUS | {"jobs": [STATUS["jobs"][0] | reported | {name: 0.0, low: 0.0}]})
    assert "predicted saving: nothing to save beyond the error of the prediction (range:" in " ".join(nothing.split())
    assert "predicted saving" not in drawn(STATUS)


@pytest.mark.parametrize(("pue", "named"), [(1.0, ""), (1.2, ", PUE 1.2")])
def test_status_shows_all_emissions_apart_from_those_of_tuned_iterations(pue: float, named: str) -> None:
    target: dict[str, Any] = dict.fromkeys(("permitted_time_s", "slowdown_so_far_ratio", "length_basis"))
    target |= {"policy": "carbon", "budget_ratio": 0.02, "reason": "test"}
    carbon: dict[str, Any] = {f"saved_by_{what}_g": 1.5 for what in ("plan", "frontier", "timing")}
    carbon |= {"carbon_g": 1234.0, "tuned_carbon_g": 900.0, "pue": pue}
    job = STATUS["jobs"][0] | {"target": target, "carbon": carbon, "is_saving_significant": True}

    text = " ".join(drawn(STATUS | {"jobs": [job]}).split())

    assert f"carbon emissions so far: 1.23 kg, location-based{named} emissions of tuned iterations: 900 g;" in text


NOTICES = {
    "stage slower": "the job changed: B of rank 0 takes 1.100 times as long as before",
    "throttling": "plan 'tuned-1' takes 1.263 s per iteration, 1.258 s are allowed",
    "straggler": "straggler: gpt-2 takes 2.036 s per iteration, this replica 1.7 s",
    "recovered": "straggler recovered: gpt-2 now takes 1.7 s, this replica 1.703 s",
    "evaluation": "2.5 s passed between iterations 49 and 50 (evaluation, checkpoint, waiting for others): not counted",
    "batch": "the job changed: an iteration takes 1.400 times as long as before",
    "lying policy": "2 plans in a row were slow: beginning again",
    "orders": "3 iterations in a row ran other instructions, or in another order, than were registered",
    "endless profiling": "still profiling after 120 iterations",
}


@pytest.mark.parametrize("what", NOTICES)
def test_status_shows_why_a_job_changed_its_plan(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = copy.deepcopy(STATUS)
    status["jobs"][0] |= {"last_notice": NOTICES[what], "last_notice_iterations_ago": 7}
    monkeypatch.setattr("gpuenergyd.client.connection.DaemonClient.get_status", lambda _self: status)

    run(["status"])
    text = " ".join(capsys.readouterr().out.split())
    run(["status", "--json"])
    as_json = json.loads(capsys.readouterr().out)

    assert f"7 iterations ago: {NOTICES[what]}" in text
    assert as_json["jobs"][0]["last_notice"] == NOTICES[what]


def test_status_shows_the_straggler_of_a_job_and_since_when() -> None:
    status = copy.deepcopy(STATUS)
    reason = NOTICES["straggler"]
    status["jobs"][0] |= {"straggler_time_s": 2.036, "straggler_since_s": 41.0, "straggler_reason": reason}

    assert f"at straggler pace 2.036 s for 41 s: {reason}" in " ".join(drawn(status).split())

    status["jobs"][0]["extrinsic_saving_ratio"] = 0.123
    text = " ".join(drawn(status).split())

    assert f"at straggler pace 2.036 s for 41 s, saving 12.3 % compared with waiting: {reason}" in text


ORDER_ADVICE = "split backward in place: 24 % instead of 14 %"
SLOWDOWN_ADVICE = "at 2 % slower this job would use 6.1 % less energy (5.0-7.2 %, measured): --max-slowdown 0.02"


@pytest.mark.parametrize(
    ("job", "shown"),
    [
        ({"captured": "timetable"}, "captured: a timetable of clock changes for each replay"),
        ({"captured": "one clock"}, "captured: one clock for each replay"),
        ({"order": None, "order_advice": ORDER_ADVICE}, f"order of instructions: {ORDER_ADVICE}"),
        ({"order": "1F1B", "order_advice": ORDER_ADVICE}, f"order of instructions (in use: 1F1B): {ORDER_ADVICE}"),
        ({"outcome": "saved", "advice_text": SLOWDOWN_ADVICE}, f"with more slowdown: {SLOWDOWN_ADVICE}"),
        ({"outcome": "nothing_to_save", "advice_text": SLOWDOWN_ADVICE}, f"with more slowdown: {SLOWDOWN_ADVICE}"),
        ({"phase": "fallback", "phase_reason": "a plan was too slow"}, "fallback: a plan was too slow"),
        ({"phase": "fallback", "phase_reason": "too slow", "retry_in_iterations": 12}, "next attempt in 12 iterations"),
        ({"phase": "fallback", "phase_reason": "too slow", "is_given_up": True}, "too slow; no further attempts"),
    ],
)
def test_status_shows_what_is_known_of_a_job(job: dict[str, Any], shown: str) -> None:
    status = copy.deepcopy(STATUS)
    status["jobs"][0] |= {"outcome_reason": "why", **job}

    assert shown in " ".join(drawn(status).split())


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has a daemon answer a watch with these statuses, and then end it with an error."""
    monkeypatch.setattr("gpuenergyd.cli.commands.status._WATCH_PERIOD_S", 0.0)

    def answer(*statuses: dict[str, Any], then: BaseException) -> None:
        left = list(statuses)

        def look(_self: object) -> dict[str, Any]:
            if not left:
                raise then
            return left.pop(0)

        monkeypatch.setattr("gpuenergyd.client.connection.DaemonClient.get_status", look)

    return answer


def test_watching_with_json_prints_a_line_per_refresh_until_ctrl_c(
    answers: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    answers(STATUS, STATUS | {"pid": 77}, then=KeyboardInterrupt())

    assert run(["status", "--watch", "--json"]) == 130
    assert [json.loads(line)["pid"] for line in capsys.readouterr().out.splitlines()] == [12, 77]


def test_a_daemon_that_goes_away_ends_the_watch(
    answers: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    answers(STATUS, then=DaemonNotRunningError("no daemon answers"))

    assert run(["status", "--watch"]) == 3
    assert capsys.readouterr().err == "gpuenergyd: no daemon answers\n"


def test_watching_into_a_pipe_prints_a_table_per_refresh(
    answers: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    answers(STATUS, STATUS | {"uptime_s": 76.2}, then=KeyboardInterrupt())

    assert run(["status", "--watch"]) == 130
    shown = capsys.readouterr().out
    assert [up for up in ("up 75 s", "up 76 s") if up in shown] == ["up 75 s", "up 76 s"]
