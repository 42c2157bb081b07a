"""The benchmark of what the client costs a busy interpreter: its arithmetic, its switches, and a few pairs."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import finished

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "runs" / "host_bound.py"


@pytest.fixture
def host_bound(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("host_bound")


def pairs(host_bound: Any, client: float, *, null: float = 1.0, cpu: float | None = None) -> Any:
    """Return pairs on a core whose speed changes from pair to pair, with times relative to a plain step."""
    found = host_bound.Pairs()
    for number in range(40):
        step_s = 0.006 * (1.0 + 0.1 * (number % 7))
        steps = [
            [(step_s * ratio, 2 * step_s * ratio, step_s * of_cpu)] * count
            for ratio, of_cpu, count in ((client, cpu or client, 16), (1.0, 1.0, 8), (null, null, 8))
        ]
        found.add(steps, [[1.01 * step_s] * 3, [step_s] * 13])
        found.threads_s.append(2e-5)
    found.first_s.append(1.0)
    return found


def test_ratios_are_those_of_steps_whatever_the_speed_of_the_core(host_bound: Any) -> None:
    found = pairs(host_bound, 1.012, cpu=1.008)
    figures = found.figures()

    ratios = {name: figures[name]["ratio"] for name in ("wall", "raw", "cpu", "null", "after")}
    assert ratios == pytest.approx({"wall": 1.012, "raw": 1.012, "cpu": 1.008, "null": 1.0, "after": 1.01}, abs=1e-6)
    assert found.is_known()
    assert figures["threads_us"] == 20.0


def test_an_arm_is_as_good_as_its_worse_program_and_not_resolved_with_another_null_arm(host_bound: Any) -> None:
    worse, better = (
        {**pairs(host_bound, ratio, null=null).figures(), "calls_ratio": 0.001}
        for ratio, null in ((1.004, 1.003), (1.002, 1.0))
    )
    summary = host_bound.summarized({"observe": {"loop": better, "pipeline": worse}})
    too_dear = host_bound.summarized({"without_daemon": {"loop": better}})

    assert summary["observe_ratio"] == pytest.approx(1.0025, abs=2e-4)
    assert (summary["is_met"], summary["is_resolved"]) == (True, False)
    assert (too_dear["is_met"], too_dear["is_resolved"]) == (False, True)


def test_a_plain_step_calls_no_hook_and_the_next_step_of_the_client_calls_all(host_bound: Any) -> None:
    model = host_bound.deep_model(8)
    seen: list[str] = []
    note: Callable[..., None] = lambda *_: seen.append("called")  # noqa: E731  one function for both hooks
    model.register_forward_pre_hook(note)
    removed = model[1].register_forward_hook(note)
    hooks, batch = host_bound.TorchHooks(model), host_bound.torch.zeros(1, host_bound.WIDTH)
    for is_on, num_calls in ((False, 0), (True, 2)):
        hooks.switch(is_on)
        seen.clear()
        model(batch)

        assert len(seen) == num_calls
    removed.remove()
    seen.clear()
    model(batch)
    assert len(seen) == 1


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the benchmark's events are compiled")
def test_a_few_pairs_have_all_figures(tmp_path: Path) -> None:
    arguments = ["--pairs", "3", "--only", "observe", "--programs", "loop", "--json"]
    output = finished([sys.executable, str(SCRIPT), *arguments], timeout=300, cwd=tmp_path)
    assert output.returncode in {0, 1}, output.stderr
    figures = json.loads(output.stdout)

    assert {"observe_ratio", "observe_half_width", "observe_pairs", "observe_cpu_ratio", "observe_null_ratio"} <= set(
        figures
    )
    loop = figures["arms"]["observe"]["loop"]
    assert loop["pairs"] == 3
    assert loop["threads_us"] > 0.0  # the reporter has worked: one pair may be shorter than its pause
    assert 0.0 < loop["calls_us"] < 1e3 * loop["step_ms"]
