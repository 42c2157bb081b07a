"""The live view fits its screen, counts GPUs and jobs that are not shown and always shows GPUs with problems."""

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from gpuenergyd.report.terminal.screen import screen_view
from tests.cli.commands.test_status import STATUS


def status_of(num_gpus: int, num_jobs: int, *, bad_gpu: int | None = None) -> dict[str, Any]:
    status = copy.deepcopy(STATUS)
    (gpu,), (job,) = status["gpus"], status["jobs"]
    status["gpus"] = [{**gpu, "index": k, "state": "lost" if k == bad_gpu else "ok"} for k in range(num_gpus)]
    status["jobs"] = [{**job, "job_id": f"j{k}", "job_name": f"gpt-{k}"} for k in range(num_jobs)]
    return status


def shown(status: dict[str, Any], *, width: int, height: int) -> list[str]:
    """Return the lines of the view on a screen of that size, without trailing spaces."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    lines = console.render_lines(screen_view(status, console))
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
    assert "20 profiled" in text
