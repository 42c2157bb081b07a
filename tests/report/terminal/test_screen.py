"""The live view fits its screen, counts GPUs and jobs that are not shown and always shows GPUs with problems."""

import copy
import io
from collections.abc import Sequence
from typing import Any
from unittest.mock import ANY

import pytest
from rich.console import Console

from gpuenergyd.report.terminal.live import power_lines, screen_view, status_view, swing_lines
from tests.cli.commands.test_status import STATUS
from tests.support.sample_status import sample_status


def status_of(num_gpus: int, num_jobs: int, *, bad_gpu: int | None = None) -> dict[str, Any]:
    status = copy.deepcopy(STATUS)
    (gpu,), (job,) = status["gpus"], status["jobs"]
    status["gpus"] = [{**gpu, "index": k, "state": "lost" if k == bad_gpu else "ok"} for k in range(num_gpus)]
    status["jobs"] = [{**job, "job_id": f"j{k}", "job_name": f"gpt-{k}"} for k in range(num_jobs)]
    return status


def shown(status: dict[str, Any], *, width: int, height: int, powers_w: Sequence[float | None] = ()) -> list[str]:
    """Return the lines of the view on a screen of that size, without trailing spaces."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    lines = console.render_lines(screen_view(status, console, powers_w))
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


@pytest.mark.parametrize("size", [(80, 24), (200, 50), (60, 10), (40, 6)], ids=str)
@pytest.mark.parametrize("num_jobs", [0, 1, 3, 12])
@pytest.mark.parametrize("num_gpus", [1, 8, 72])
def test_the_view_fits_its_screen_and_counts_what_it_does_not_show(
    size: tuple[int, int], num_gpus: int, num_jobs: int
) -> None:
    width, height = size

    lines = shown(status_of(num_gpus, num_jobs), width=width, height=height)

    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if " ok" in line]
    not_shown = [line for line in lines if "more" in line and "GPU" in line]
    assert len(rows) == num_gpus or (len(not_shown) == 1 and f"{num_gpus - len(rows)} more GPU" in not_shown[0])
    named = [line for line in lines if line.startswith("gpt-")]
    not_shown = [line for line in lines if "more" in line and "job" in line]
    assert len(named) == num_jobs or (len(not_shown) == 1 and f"{num_jobs - len(named)} more job" in not_shown[0])


@pytest.mark.parametrize("view", ["screen", "full"])
def test_readings_that_cannot_be_right_are_named(view: str) -> None:
    status = status_of(2, 1)
    status["gpus"][1]["refused_readings"] = [{"name": "power_w", "num": 3, "reason": "3.7e+06 W"}]
    console = Console(file=io.StringIO(), width=100, height=40, color_system=None)

    lines = shown(status, width=100, height=40) if view == "screen" else []
    if view == "full":
        console.print(status_view(status))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO

    assert "GPU 1: 3 x power_w refused, last: 3.7e+06 W" in {line.strip() for line in lines}


def test_a_gpu_with_a_problem_is_always_shown() -> None:
    lines = shown(status_of(72, 2, bad_gpu=71), width=80, height=24)

    assert any(line.split()[:2] == ["71", "lost"] for line in lines)


def test_eight_gpus_and_a_job_fit_a_small_terminal() -> None:
    lines = shown(status_of(8, 1), width=80, height=24)
    text = "\n".join(lines)

    assert "more" not in text
    assert sum("1050 MHz" in line and "187 W" in line and "0.1 s" in line for line in lines) == 8
    assert "15.0 % less energy" in text
    assert "slack on 3 of 4 ranks" in text
    assert "20 in trials" in text


def test_the_screen_shows_the_watts_saved_each_gpus_job_and_each_jobs_interval() -> None:
    lines = shown(sample_status(), width=120, height=40, powers_w=[100.0, 200.0, None, 400.0])

    assert lines[1] == "146 W saved now (95 %: 143 W to 150 W; 1 of 3 jobs)"
    assert lines[3].endswith("drawn by all GPUs, last 4 s, 0 to 400 W \u2583\u2585 \u2588")
    gpus = [line.split() for line in lines if " ok " in line]
    assert [gpu[gpu.index("s") + 1] for gpu in gpus] == ["gpt-2.6b"] * 4 + ["llama-ddp"] * 2 + ["resnet", ANY]
    assert "gpt-2.6b tuned: 13.4 % less energy (95 %: 13.1 % to 13.7 % less), no slower, 146 W saved" in lines
    assert any(
        line.startswith("llama-ddp tuned: no significant saving (95 %: 0.3 % more to 1.5 % less energy)")
        for line in lines
    )
    assert "resnet trial: no saving measured yet" in lines
    assert "bert (bert-1) ended 95 s ago: while trying settings, after 21 iterations" in lines


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_the_screen_shows_savings_with_intervals_and_ended_jobs_in_full(width: int, height: int) -> None:
    lines = shown(sample_status(), width=width, height=height, powers_w=[1900.0] * 60)
    text = "\n".join(lines)

    assert len(lines) <= height
    assert lines[1] == "146 W saved now (95 %: 143 W to 150 W; 1 of 3 jobs)"
    assert ", last " in lines[3]
    assert "no slower, 146 W saved" in text
    assert "95 %: 13.1 % to 13.7 % less" in text
    assert "95 %: 0.3 % more to 1.5 % less" in text
    assert "llama-ddp tuned: no significant saving" in text
    assert "0.8 % slower" in text
    assert "bert (bert-1) ended 95 s ago: while trying settings, after 21 iterations" in text
    assert [line for line in lines if line.endswith("…") and " iterations; " not in line] == []


POWER: dict[str, Any] = {
    "power_budget_w": 1800.0,
    "measured_w": 1780.4,
    "reason": "grid event 17",
    "is_cutting": False,
    "division": "equal speed per watt for all jobs",
}


def test_a_budget_is_one_line_and_none_is_no_line() -> None:
    (line,) = power_lines(POWER)
    assert line.plain == "power: 1780 W of a budget of 1800 W (grid event 17); equal speed per watt for all jobs"
    (cut,) = power_lines({**POWER, "is_cutting": True, "measured_w": None, "reason": ""})
    assert cut.plain == "power: - of a budget of 1800 W; clocks are lowered beyond plans"
    assert power_lines({**POWER, "power_budget_w": None}) == []
    assert power_lines(None) == []


def test_swings_of_the_last_minute_are_one_line_and_unknown_ones_none() -> None:
    swing = {"trough_w": 700.4, "peak_w": 1551.0, "ramp_w_per_s": 320.0, "swing_rms_w": 250.2, "highest_hz": 5.0}
    (line,) = swing_lines(swing)
    assert line.plain == ("last minute: 700 W to 1551 W, ramps of up to 320 W/s, swings by 250 W RMS (0.1 to 5 Hz)")
    assert swing_lines(None) == []
