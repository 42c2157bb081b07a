"""The demo's last line is one sentence with saving, interval, speed and the word simulated."""

from dataclasses import replace
from typing import Any

import pytest

from gpuenergyd.report.job import job_reports
from gpuenergyd.store import JobSummary, open_history
from gpuenergyd_sim.demo.result import result_sentence
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.plugins.sim.demo import test_request
from tests.support.sample_history import write_sample_history

REQUEST = replace(test_request.REQUEST, simulation=WorldKind.KIND)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobSummary:
    with open_history(write_sample_history(tmp_path_factory.mktemp("history") / "history.sqlite3")) as history:
        return job_reports(history)[0].summary


def test_the_sentence_has_the_saving_its_interval_and_the_speed_of_the_report(job: JobSummary) -> None:
    measured = replace(job, saving_ratio=0.1234, saving_interval=(0.1181, 0.1288), slowdown_ratio=0.0012)

    assert result_sentence(measured, REQUEST, reason="") == (
        "gpuenergyd trained this pipeline on 4 ideal simulated a100-sxm GPUs with 12.3 % less energy per iteration"
        " (95 % confidence interval: 11.8 % to 12.9 % less energy), 0.1 % slower than at full speed."
    )


@pytest.mark.parametrize(
    ("saving", "interval", "expected"),
    [
        (
            0.002,
            (-0.003, 0.007),
            "with no significant saving per iteration (95 % confidence interval: 0.3 % more to 0.7 % less energy)",
        ),
        (
            -0.004,
            (-0.006, -0.002),
            "0.4 % more energy per iteration (95 % confidence interval: 0.2 % to 0.6 % more energy)",
        ),
    ],
)
def test_the_direction_of_a_small_or_negative_saving_is_clear(
    job: JobSummary, saving: float, interval: tuple[float, float], expected: str
) -> None:
    sentence = result_sentence(replace(job, saving_ratio=saving, saving_interval=interval), REQUEST, reason="")

    assert expected in sentence


TWO_BLOCKS = "it takes two blocks at full speed between iterations under a plan"


@pytest.mark.parametrize(
    ("changed", "why", "advice"),
    [
        ({}, "", "Try more iterations, e.g. --tuned-iterations 80, or permit a slowdown, e.g. --max-slowdown 0.05."),
        ({"policy": "uniform"}, "policy 'x' failed", "Try the default policy: leave out --policy uniform."),
        ({"is_in_virtual_time": False}, "no", "On a busy host times are noisy: try again without --real-time."),
    ],
)
def test_a_result_without_saving_has_its_reason_and_what_to_do(
    job: JobSummary, changed: dict[str, Any], why: str, advice: str
) -> None:
    unmeasured = replace(job, saving_ratio=None, saving_interval=None, slowdown_ratio=None)

    sentence = result_sentence(unmeasured, replace(REQUEST, **changed), reason=why)

    assert sentence.endswith(f"simulated a100-sxm GPUs, without a measured saving: {why or TWO_BLOCKS}. {advice}")
