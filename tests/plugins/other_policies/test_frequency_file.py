"""The frequency-file policy: plans of Zeus's pipeline optimizer, written by `gpuenergyd plan`, run and evaluated."""

import json
from pathlib import Path

import pytest

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.profile import WORD_OF_KIND
from gpuenergyd.core.policy_api.testing import SimulatedJob
from gpuenergyd.errors import GpuEnergyError, ProfileError
from gpuenergyd_other_policies.frequency_file import FrequencyFile
from tests.plugins.plan.invocation import plan_figures, write_table

COMMON = ("--microbatches", "6", "--blocking-power-w", "60")
SCHEDULE = one_forward_one_backward(4, 6)


def import_(path: Path) -> tuple[str, ...]:
    """Return the options that evaluate a file or a folder instead of planning."""
    return ("--policy", "frequency-file", "--set", f"path={path}")


def test_a_written_plan_is_read_with_its_time_and_energy(tmp_path: Path) -> None:
    table, file = write_table(tmp_path, clock_step_mhz=100), tmp_path / "plan.py"

    planned = plan_figures(table, *COMMON, "--frequency-files", file)
    read = plan_figures(table, *COMMON, *import_(file))

    assert read["clocks"] == planned["clocks"]
    assert (read["iteration_time_s"], read["energy_j"]) == (planned["iteration_time_s"], planned["energy_j"])
    assert f"# total cost with P2P: {planned['energy_j']}\n" in file.read_text()


def test_a_frontier_is_a_folder_slowest_first_from_which_the_target_chooses(tmp_path: Path) -> None:
    table, folder = write_table(tmp_path, clock_step_mhz=200), tmp_path / "plans"

    planned = plan_figures(table, *COMMON, "--frontier", "--frequency-files", folder)
    read = plan_figures(table, *COMMON, *import_(folder), "--frontier", "--max-slowdown", "0.05")

    files = sorted(folder.iterdir())
    assert [file.name for file in files[:2]] == ["freqs_pipeline_00000.py", "freqs_pipeline_00001.py"]
    assert len(files) == len(read["frontier"]) == len(planned["frontier"]) > 5
    times_s = [
        plan_figures(table, *COMMON, *import_(file), "--max-slowdown", "1")["iteration_time_s"] for file in files
    ]
    assert times_s == sorted(times_s, reverse=True)
    assert 0 < read["slowdown_ratio"] <= 0.05
    assert read["energy_j"] == min(
        p["energy_j"] for p in read["frontier"] if p["iteration_time_s"] <= read["iteration_time_s"]
    )


def write_plan(file: Path, lowest_mhz: int, schedule: Schedule = SCHEDULE) -> None:
    """Write clocks that differ within each rank."""
    words = [[(WORD_OF_KIND[i.kind], clock_mhz(i, lowest_mhz)) for i in order] for order in schedule.orders]
    file.write_text(f"{words}\n# any comment")


def clock_mhz(instruction: Instruction, lowest_mhz: int) -> int:
    return lowest_mhz + 30 * ((instruction.microbatch_index + instruction.pp_rank) % 7)


def test_a_job_runs_the_file_s_clocks_and_the_next_higher_where_a_gpu_lacks_one(tmp_path: Path) -> None:
    file, job = tmp_path / "plan.py", SimulatedJob(SCHEDULE, max_slowdown_ratio=0.3)
    write_plan(file, 1201)

    plan = job.run_policy(FrequencyFile(str(file)), 20)

    assert plan.purpose is PlanPurpose.TUNED
    assert [plan.plan_id for plan in job.plans[1:]] == [plan.plan_id]
    for rank, order in zip(plan.ranks, SCHEDULE.orders, strict=True):
        assert rank.sm_clocks_mhz == tuple(clock_mhz(i, 1215) for i in order)
        assert {change.sm_clock_mhz for change in rank.changes} == set(rank.sm_clocks_mhz)


@pytest.mark.parametrize("other", [one_forward_one_backward(4, 5), one_forward_one_backward(2, 6), gpipe(4, 6)])
def test_a_file_of_another_pipeline_leaves_a_job_at_full_speed(other: Schedule, tmp_path: Path) -> None:
    file, job = tmp_path / "plan.py", SimulatedJob(SCHEDULE)
    write_plan(file, 1200, other)

    plan = job.run_policy(FrequencyFile(str(file)), 2)

    assert plan.purpose is PlanPurpose.BASELINE
    assert plan.reason.startswith("plan.py: is for another order of instructions")


def test_the_optimizer_s_stored_schedules_are_read_in_rank_order(tmp_path: Path) -> None:
    rows = [{"rank": 1, "frequencies": [["backward", 900]]}, {"rank": 0, "frequencies": [["forward", 1410]]}]
    (tmp_path / "0.sched.json").write_text(json.dumps(rows))
    first, second = Instruction(0, InstructionKind.F, 0), Instruction(1, InstructionKind.B, 0)

    assert FrequencyFile(str(tmp_path / "0.sched.json")).clocks_mhz([[first], [second]]) == {first: 1410, second: 900}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[1]", "secret", "[[('forward', 0)]]", "[[('sendrecv', 900)]]", "[[([], 900)]]", "[[('forward', 9.5)]]",
     "[[('forward', 900, 1)]]", "[{'rank': 0}]", "[" * 9999, "__import__('os').abort()", "\xff"],
)  # fmt: skip
def test_other_text_is_refused_and_neither_executed_nor_quoted(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.py").write_text(text, encoding="latin-1")

    with pytest.raises(ProfileError, match=r"not a frequency file: a list per rank of pairs of a word \(f") as found:
        FrequencyFile(str(tmp_path / "plan.py"))

    assert "secret" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--frequency-files", "plans"), "plans: give a file [*].py for one plan, or --frontier for a folder"),
        (import_(Path("absent.py")), "absent.py: cannot be read: No such file"),
        (import_(Path()), "no freqs_pipeline_[*].py in this folder"),
        (("--policy", "frequency-file"), "path is missing"),
    ],
)
def test_a_missing_file_or_folder_is_named(
    options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_table(tmp_path, clock_step_mhz=400)
    (empty := tmp_path / "empty").mkdir()
    monkeypatch.chdir(empty)

    with pytest.raises(GpuEnergyError, match=message):
        plan_figures(table, *COMMON, *options)


def test_a_plan_slower_than_permitted_is_refused_offline(tmp_path: Path) -> None:
    table, folder = write_table(tmp_path, clock_step_mhz=400), tmp_path / "plans"
    plan_figures(table, *COMMON, "--frontier", "--frequency-files", folder)

    with pytest.raises(GpuEnergyError, match=r"the fastest plan of .*freqs_pipeline_00000\.py takes"):
        plan_figures(table, *COMMON, *import_(folder / "freqs_pipeline_00000.py"))
