"""`gpuenergyd plan` with a given order, with waits charged by clock, and with several stages per GPU."""

from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_plan.command import plan
from tests.plugins.plan.invocation import output_of, plan_figures, write_table
from tests.support.installed_distribution import install_distribution

COMMON = ("--microbatches", "6", "--blocking-power-w", "60")


def _run(*arguments: str | Path) -> str:
    return output_of(plan, *arguments)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write a profile of four unequal stages."""
    return write_table(tmp_path, clock_step_mhz=200)


def _order_file(folder: Path, figures: dict[str, Any]) -> Path:
    """Write the order of a plan as a file for --order."""
    words = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    stages = figures.get("stage_of_chunk")
    rows = ["rank,position,instruction,microbatch,stage"]
    for rank, order in figures["order"].items():
        for position, (kind, microbatch, chunk) in enumerate(order):
            stage = rank if stages is None else stages[int(rank)][chunk]
            rows.append(f"{rank},{position},{words[kind]},{microbatch},{stage}")
    path = folder / "order.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_chosen_order_given_as_a_file_is_planned_alike(table: Path, tmp_path: Path) -> None:
    chosen = plan_figures(table, *COMMON, "--schedule", "auto", "--memory-limit-microbatches", "4")

    # Without a target a given order keeps its own full speed, which is faster than that of 1F1B.
    target = ("--target-s", repr(chosen["baseline_time_s"]))
    given = plan_figures(table, "--blocking-power-w", "60", "--order", _order_file(tmp_path, chosen), *target)

    assert given["order"] == chosen["order"]
    assert given["schedule"] == "order.csv"
    assert given["num_microbatches"] == 6
    for name in ("baseline_time_s", "baseline_energy_j", "own_order_time_s", "held_microbatches"):
        assert given[name] == pytest.approx(chosen[name])
    assert given["energy_j"] == pytest.approx(chosen["energy_j"], rel=2e-3)


def test_an_order_with_two_stages_per_gpu_is_planned_alike(table: Path, tmp_path: Path) -> None:
    chosen = plan_figures(table, *COMMON, "--schedule", "auto", "--chunks", "2", "--memory-limit-microbatches", "3")

    given = plan_figures(table, "--blocking-power-w", "60", "--order", _order_file(tmp_path, chosen))

    assert chosen["num_stages"] == 2
    assert sorted(stage for own in chosen["stage_of_chunk"] for stage in own) == [0, 1, 2, 3]
    assert max(chosen["held_microbatches"]) <= 3
    assert chosen["iteration_time_s"] <= chosen["baseline_time_s"]
    assert 0 < chosen["saving_ratio"] <= chosen["any_order_bound_ratio"]
    assert given["own_order_time_s"] == pytest.approx(chosen["own_order_time_s"])
    printed = _run(table, *COMMON, "--schedule", "auto", "--chunks", "2", "--memory-limit-microbatches", "3")
    assert "stages of each GPU: " in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "gpipe"], r"--schedule gpipe: .*order\.csv gives the order; omit one of them"),
        (["--extra-inflight", "auto"], r"--extra-inflight auto: .*order\.csv gives the order; omit one of them"),
        (["--microbatches", "7"], r"--microbatches 7: .*order\.csv has 6"),
        (["--chunks", "2"], r"--chunks 2: .*order\.csv has 1"),
        (["--memory-limit-microbatches", "1"], "needs 4 microbatches in flight on stage 0, but only 1 fit in memory"),
    ],
)
def test_options_that_contradict_an_order_are_refused(
    table: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    order = _order_file(tmp_path, plan_figures(table, *COMMON))

    with pytest.raises(GpuEnergyError, match=message):
        _run(table, "--order", order, *options)


def test_an_order_that_deadlocks_is_refused_in_one_line(table: Path, tmp_path: Path) -> None:
    order = _order_file(tmp_path, plan_figures(table, *COMMON))
    text = order.read_text().replace("0,0,forward,0", "0,0,forward,x").replace("0,3,forward,3", "0,0,forward,3")
    order.write_text(text.replace("0,0,forward,x", "0,3,forward,0").replace("3,1,backward,0", "3,1,forward,y"))

    with pytest.raises(GpuEnergyError) as raised:
        _run(table, "--order", order)

    assert "\n" not in str(raised.value)


def test_waiting_by_clock_saves_more_than_keeping_clocks_and_less_than_the_bound(table: Path, tmp_path: Path) -> None:
    curve = tmp_path / "waiting.csv"
    curve.write_text("frequency,power\n1400,60\n800,40\n200,30\n")

    by_latency = {
        latency: plan_figures(table, "--microbatches", "6", "--waiting-power", curve, "--switch-latency-s", latency)
        for latency in ("0", "0.002", "10")
    }

    for figures in by_latency.values():
        kept = figures["waiting"]["kept_clock_saving_ratio"]
        assert kept <= figures["saving_ratio"]
        assert figures["lower_bound_j"] <= figures["energy_j"]
        assert not figures["waiting"]["is_assumed"]
    assert by_latency["0"]["saving_ratio"] > by_latency["0.002"]["saving_ratio"]
    assert by_latency["10"]["waiting"]["lowered"] == []
    assert len(by_latency["0.002"]["waiting"]["lowered"]) > 0
    constant = plan_figures(table, *COMMON)
    assert by_latency["0"]["baseline_energy_j"] == pytest.approx(constant["baseline_energy_j"])
    assert by_latency["0"]["saving_ratio"] > constant["saving_ratio"]


def test_an_assumed_curve_is_marked(table: Path) -> None:
    figures = plan_figures(table, "--microbatches", "6", "--waiting-power", "a100-sxm")

    assert figures["waiting"]["is_assumed"]
    printed = " ".join(_run(table, "--microbatches", "6", "--waiting-power", "a100-sxm").split())
    assert "the power of waiting by clock is assumed, as of a simulated a100-sxm" in printed
    assert "clocks are lowered in" in printed
    assert "assumed to draw 0 W" not in printed


def test_another_package_may_know_the_waiting_power_of_a_gpu_model(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_powers.py").write_text("def powers(): return {'mi300x': ((2000, 90.0), (1000, 60.0))}\n")
    install_distribution(tmp_path, "other", "gpuenergyd.waiting_powers", {"other": "other_powers:powers"})
    monkeypatch.syspath_prepend(tmp_path)

    figures = plan_figures(table, "--microbatches", "6", "--waiting-power", "mi300x")

    assert figures["waiting"]["is_assumed"]
    with pytest.raises(GpuEnergyError, match=r"neither a file nor a GPU model; models: .*a100-sxm.*mi300x"):
        _run(table, "--microbatches", "6", "--waiting-power", "mi355x")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("frequency,power\n", [], "no powers below the header"),
        ("frequency,power\n1400,-1\n", [], "power -1.0 W at 1400 MHz must be finite and >= 0"),
        ("frequency,power\n1400,60\n1400,50\n", [], "1400 MHz is given twice"),
        ("frequency,watts\n1400,60\n", [], "no column 'power'; expected the header frequency,power"),
        ("frequency,power\n0,60\n", [], "frequency 0 MHz must be > 0"),
        ("frequency,power\n1400,60\n", ["--blocking-power-w", "60"], "--blocking-power-w: not together with"),
        ("frequency,power\n1400,60\n", ["--straggler-time-s", "9"], "--straggler-time-s: not together with"),
        ("frequency,power\n1400,60\n", ["--frontier"], "--frontier: not together with --waiting-power"),
    ],
)
def test_bad_waiting_powers_are_refused_in_one_line(
    table: Path, tmp_path: Path, text: str, options: list[str], message: str
) -> None:
    curve = tmp_path / "waiting.csv"
    curve.write_text(text)

    with pytest.raises(GpuEnergyError) as raised:
        _run(table, "--microbatches", "6", "--waiting-power", curve, *options)

    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_curve_names_the_models(table: Path) -> None:
    with pytest.raises(GpuEnergyError, match=r"neither a file nor a GPU model; models: a100-pcie, a100-sxm"):
        _run(table, "--microbatches", "6", "--waiting-power", "a1000")
