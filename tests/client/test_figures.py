"""The figures of a job for the program's own log: measured ones only, without a request of their own."""

import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuenergyd
from gpuenergyd.client.figures import STATES, metrics_of, numbers_of
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.wire.messages import JobFigures
from gpuenergyd_trainers import huggingface
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon
from tests.support.waiting import wait_until

FIGURES = {"phase": "tuned", "iteration_energy_j": 812.5, "power_w": 290.0, "energy_j": 7.2e6, "from_later_version": 1}


def test_states_are_numbered_in_the_order_of_the_phases_of_a_job() -> None:
    assert tuple(JobPhase) == STATES


def test_what_is_not_measured_is_none_and_left_out_of_the_log() -> None:
    known = JobFigures("tuned", energy_j=7.2e6, saving_ratio=0.0)
    metrics = metrics_of(known, price_per_kwh=0.3)

    assert set(metrics_of(None, price_per_kwh=0.3).values()) == {None}
    assert {name: value for name, value in metrics.items() if value is not None} == {
        "state": "tuned",
        "energy_j": 7.2e6,
        "cost": 0.6,
        "saving_ratio": 0.0,
    }
    assert numbers_of(None, price_per_kwh=0.3) == numbers_of(JobFigures("of-a-later-version")) == {}
    assert numbers_of(known, price_per_kwh=0.3) == {
        "gpuenergyd/state": 4,
        "gpuenergyd/energy_j": 7.2e6,
        "gpuenergyd/cost": 0.6,
        "gpuenergyd/saving_ratio": 0.0,
    }


def test_a_loop_reads_what_the_daemon_last_sent_even_after_its_end(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        with gpuenergyd.job("loop", gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False) as job:
            before = job.metrics()
            daemon.figures = {"figures": FIGURES}  # type: ignore[dict-item]  # the other figures are numbers

            def has_figures() -> bool:
                with job.iteration():
                    pass
                return job.metrics()["power_w"] is not None

            wait_until(has_figures)
            daemon.figures = {}
        num_messages = daemon.num_messages
        after = job.metrics()

    assert set(before.values()) == {None}
    assert (after["state"], after["iteration_energy_j"], after["power_w"]) == ("tuned", 812.5, 290.0)
    assert daemon.num_messages == num_messages


def test_what_a_callback_adds_to_a_logged_step_is_few_calls() -> None:
    callback = huggingface._Hooks("loop")
    callback._marks._job = job = SimpleNamespace(figures=None)  # type: ignore[assignment]  # a job without a daemon has no figures

    def logged_step() -> tuple[dict[str, Any], int]:
        logs: dict[str, Any] = {"loss": 1.0}
        calls: list[str] = []
        sys.setprofile(lambda _frame, event, _argument: calls.append(event) if event.endswith("call") else None)
        try:
            callback.add_figures(SimpleNamespace(log_history=[{}]), logs)
        finally:
            sys.setprofile(None)
        return logs, len(calls)

    job.figures = JobFigures("tuned", **{field.name: 1 for field in fields(JobFigures)[1:]})
    new, num_calls = logged_step()
    same, num_calls_later = logged_step()

    assert len(new) == 1 + len(fields(JobFigures))
    assert same == new
    assert num_calls <= 20  # a call takes 0.1 to 0.4 us, and a step may have 20 us
    assert num_calls_later <= 6


class Tensor:
    """A number on a device, whose conversion would wait for it."""

    def __int__(self) -> int:
        raise AssertionError

    __index__ = __bool__ = __str__ = __repr__ = __int__  # type: ignore[assignment]


def test_each_report_has_the_tokens_of_its_own_iteration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given: tuple[Any, ...] = (100, None, 300, np.int64(7), 0, -1, 2.5, 2**53, Tensor())
    with FakeDaemon(tmp_path) as daemon:
        with gpuenergyd.job("loop", gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False) as job:
            for num_tokens in given:
                with job.iteration(num_tokens=num_tokens):
                    pass
        daemon.releases.get(timeout=WAIT_LIMIT_S)
        reports = [daemon.reports.get(timeout=WAIT_LIMIT_S) for _ in given]

    assert [report.get("num_tokens") for report in reports] == [100, None, 300, 7, None, None, None, None, None]
    (warning,) = (record.message for record in caplog.records if "tokens" in record.message)
    assert warning == "gpuenergyd: number of tokens 0 is ignored: must be a whole number from 1, e.g. 8192"
