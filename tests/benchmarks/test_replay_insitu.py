"""The replay of published trainings: a made-up training with a known truth is predicted, errors included."""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "benchmarks" / "runs"
CLOCKS_MHZ = (1410, 1110)
TIMES_S = {("forward", 1410): 1.0, ("forward", 1110): 1.25, ("backward", 1410): 2.0, ("backward", 1110): 2.5}
POWERS_W = {1410: 250.0, 1110: 150.0}
WAITING_W = 83.64
OVERHEAD_S = 0.5
COMMANDS = ("LFXLFXBXBEEE", "XLFBXLFBXEEE")
"""Two stages, two microbatches, written down by hand: load, exchange, forward, backward, end of the iteration."""
RUN = "A100__made-up__pp2_nmb2"


def iteration(clocks_mhz: tuple[int, int]) -> tuple[float, float]:
    """Return time and energy of an iteration with one clock per stage, the first not slower than the second.

    F0 F1 B0 B1 on stage 0 wait for the second stage, which runs F0 B0 F1 B1 without a gap after the first F0.
    """
    first, second = ({kind: TIMES_S[kind, mhz] for kind in ("forward", "backward")} for mhz in clocks_mhz)
    time_s = first["forward"] + 2 * second["forward"] + 2 * second["backward"] + first["backward"] + OVERHEAD_S
    busy_s = [2 * sum(own.values()) for own in (first, second)]
    energy_j = sum(POWERS_W[mhz] * s + WAITING_W * (time_s - s) for mhz, s in zip(clocks_mhz, busy_s, strict=True))
    return time_s, energy_j


def write_training(folder: Path, name: str, artifact: Path | None, *, plans: dict[int, tuple[int, int]]) -> None:
    curves = ["stage,instruction,frequency_mhz,n,time_mean_s,energy_fitted_j"]
    for stage in range(2):
        for (kind, mhz), time_s in TIMES_S.items():
            curves.append(f"{stage},{kind},{mhz},10,{time_s},{time_s * POWERS_W[mhz]}")
    rows = ["source,plan,iter_time_s,iter_energy_j,energy_rank0,energy_rank1"]
    for plan, clocks_mhz in plans.items():
        time_s, energy_j = iteration(clocks_mhz)
        rows.append(f"perseus,{plan},{time_s},{energy_j},{energy_j / 2},{energy_j / 2}")
        if artifact is not None:
            model = name.split("__")[1]
            path = artifact / "perseus" / "A100" / "dp1+pp2+tp1" / f"merak+{model}+x+dp1+pp2+tp1+mbs8+nmb2+Solution"
            path.mkdir(parents=True, exist_ok=True)
            ranks = [
                {"rank": rank, "power_states": [clocks_mhz[rank] if c in "FB" else 999 for c in COMMANDS[rank]]}
                for rank in range(2)
            ]
            (path / f"{plan}.sched.json").write_text(json.dumps(ranks))
    (folder / f"{name}__time_by_freq.csv").write_text("\n".join(curves))
    (folder / f"{name}__iterations.csv").write_text("\n".join(rows))


def replayed(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status, figures, _ = replayed_with_messages(folder, *arguments)
    return status, figures


def replayed_with_messages(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "policies"))
    environ = {key: value for key, value in os.environ.items() if key != "PERSEUS_ARTIFACT"} | {"PYTHONPATH": paths}
    command = [sys.executable, "benchmarks/runs/replay_insitu.py", "--data", str(folder), "--others", str(folder)]
    done = subprocess.run(
        [*command, *arguments, "--json"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout, f"exit status {done.returncode}: {done.stderr}"
    return done.returncode, json.loads(done.stdout), done.stderr


PLANS = {0: (1410, 1410), 1: (1410, 1410), 2: (1110, 1110), 3: (1410, 1110)}


@pytest.fixture(scope="module")
def two_trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("insitu")
    for name in (RUN, "A100__another__pp2_nmb2"):
        write_training(folder, name, folder / "artifact", plans=PLANS)
    status, figures = replayed(folder)
    assert status == 0
    return figures


def test_overhead_is_learned_from_the_other_training_and_then_predicts_without_error(
    two_trainings: dict[str, Any],
) -> None:
    run = two_trainings["by_run"][RUN]

    assert run["clocks"] == "of the published plans"
    assert run["overhead_predicted_s"] == pytest.approx(OVERHEAD_S)
    assert (two_trainings["iterations"], run["iterations"]) == (8, 4)
    assert two_trainings["time_error_mean_ratio"] == pytest.approx(0, abs=1e-9)
    assert two_trainings["energy_error_mean_ratio"] == pytest.approx(0, abs=1e-9)
    assert two_trainings["saving_error_mean_points"] == pytest.approx(0, abs=1e-7)


def test_training_never_learns_from_itself(tmp_path: Path) -> None:
    write_training(tmp_path, RUN, tmp_path, plans=PLANS)

    status, figures = replayed(tmp_path)

    run = figures["by_run"][RUN]
    assert (status, run["overhead_learned_from"], run["overhead_predicted_s"]) == (0, 0, 0.0)
    assert run["overhead_measured_s"] == pytest.approx(OVERHEAD_S)
    assert figures["time_error_mean_ratio"] == pytest.approx(
        sum(OVERHEAD_S / iteration(clocks)[0] for clocks in PLANS.values()) / len(PLANS)
    )


def test_without_clocks_only_the_time_at_full_speed_is_predicted(tmp_path: Path) -> None:
    for name in (RUN, "A100__another__pp2_nmb2"):
        write_training(tmp_path, name, None, plans=PLANS)

    status, figures, messages = replayed_with_messages(tmp_path)

    run = figures["by_run"][RUN]
    assert status in {0, 1}
    assert run["overhead_predicted_s"] == pytest.approx(OVERHEAD_S)
    assert run["time_error_mean_ratio"] == pytest.approx(0, abs=1e-9)
    assert [row["time_predicted_s"] for row in run["plans"]] == [None] * len(run["plans"])
    assert figures["runs_with_planned_clocks"] == 0
    assert figures["saving_error_mean_points"] is not None
    assert "our own plans" in run["clocks"]
    assert messages.splitlines() == [
        "2 of 2 runs without the clocks of their plans, which --artifact gives: our own plans stand in"
    ]


def test_stand_in_for_a_slow_plan_takes_as_long_although_less_time_needs_less_energy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POWERS_W, 1110, 205.0)
    write_training(tmp_path, RUN, None, plans=PLANS)

    _, figures = replayed(tmp_path)

    slowest = next(row for row in figures["by_run"][RUN]["plans"] if row["plan"] == 2)
    assert slowest["saving_ratio"] < -0.04
    assert slowest["saving_predicted_ratio"] == pytest.approx(slowest["saving_ratio"], abs=0.01)


def test_own_full_speed_and_measured_time_leave_no_error_of_a_constant_overhead(tmp_path: Path) -> None:
    write_training(tmp_path, RUN, tmp_path, plans=PLANS)

    _, figures = replayed(tmp_path)

    run = figures["by_run"][RUN]
    assert run["time_error_mean_ratio_by_model"]["timeline"] > 0
    assert run["time_error_mean_ratio_by_model"]["own_full_speed"] == pytest.approx(0, abs=1e-9)
    assert run["energy_error_mean_ratio_by_model"]["measured_time"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "end", "change", "reason"),
    [
        ("A100__odd__pp2_nmb2", "__time_by_freq.csv", None, "no file A100__odd__pp2_nmb2__time_by_freq.csv"),
        ("A100__odd__pp2_nmb2", "__iterations.csv", None, "no file A100__odd__pp2_nmb2__iterations.csv"),
        ("A100__odd__pp2_nmb2", "__iterations.csv", ("iter_time_s", "seconds"), "line 2: no column 'iter_time_s'"),
        ("A100__odd__pp2_nmb2", "__iterations.csv", ("energy_rank1", "rank1"), "line 2: no column 'energy_rank1'"),
        ("A100__odd__pp2_nmb2", "__iterations.csv", ("perseus,1,", "perseus,one,"), "line 3: invalid literal"),
        ("A100__odd__pp2_nmb2", "__iterations.csv", ("perseus,2,", "perseus,2,nan,"), "line 4: time and energies must"),
        ("A100__odd__pp2_nmb2", "__time_by_freq.csv", ("backward", "sideways"), "no column or instruction 'sideways'"),
        ("A100__odd__pp2_nmb2", "__time_by_freq.csv", ("1,backward", "0,backward"), "no backward of stage 1"),
        ("H100__odd__pp2_nmb2", "__iterations.csv", ("", ""), "the power of a waiting H100 is not known"),
        ("odd", "__iterations.csv", ("", ""), "expected a name like"),
    ],
)
def test_odd_run_is_named_with_its_reason_and_the_others_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, end: str, change: tuple[str, str] | None, reason: str
) -> None:
    write_training(tmp_path, RUN, tmp_path, plans=PLANS)
    write_training(tmp_path, name, None, plans=PLANS)
    file = tmp_path / f"{name}{end}"
    if change is None:
        file.unlink()
    else:
        file.write_text(file.read_text().replace(*change))

    monkeypatch.syspath_prepend(str(RUNS))
    replay = importlib.import_module("replay_insitu")
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        found = replay.trainings_in(tmp_path, replay.PlannedClocks([tmp_path]), step=1, without=())

    assert [own.name for own in found] == [RUN]
    assert f"left out {name}: " in output.getvalue()
    assert reason in output.getvalue()
    assert len(output.getvalue().splitlines()) == 1


def test_folder_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"^exit status 2: [^\n]*: no run of [^\n]* to replay\n"):
        replayed(tmp_path)


def test_power_above_the_limit_of_the_board_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POWERS_W, 1410, 400.0)
    write_training(tmp_path, RUN, tmp_path, plans=PLANS)

    _, figures = replayed(tmp_path)

    full = figures["by_run"][RUN]["full_speed"]
    without_limit_j = iteration(PLANS[0])[1]
    assert full["energy_predicted_j"] < without_limit_j
    assert full["energy_predicted_j"] <= 2 * 300.0 * full["time_predicted_s"]


def test_clock_file_of_another_size_is_refused(tmp_path: Path) -> None:
    write_training(tmp_path, RUN, tmp_path, plans=PLANS)
    file = next(tmp_path.rglob("2.sched.json"))
    file.write_text(json.dumps([{"rank": 0, "power_states": [1410]}, {"rank": 1, "power_states": [1410]}]))

    with pytest.raises(AssertionError, match=r"exit status 2: .*1 clocks for stage 0; its commands are 12"):
        replayed(tmp_path)
