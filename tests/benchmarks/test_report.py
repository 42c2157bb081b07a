"""Pages with figures match the stored results, every benchmark is listed, and a failed run keeps the last figures."""

import json
import os
import re
import signal
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.report.__main__ import Bench
from benchmarks.report.page import PAGE, goal, names_by_state, rendered_page, stamp
from benchmarks.report.results import Attempt, Result, circumstances, read_result, with_failure, write_result
from benchmarks.report.running import ROOT, Output, failure_reason, figures_in, measured, run_program
from benchmarks.report.runs import PARTS, RUNS, Kind, Run, chosen_runs
from gpuenergyd.errors import UsageError
from tests.support.daemon_process import wait_for_death

SAMPLE = Run("sample", "sample.py", (), (), 30.0, 60.0)


def a_result(name: str = "sample", figures: object = None) -> Result:
    given = circumstances("python benchmarks/sample.py", datetime(2026, 1, 2, 3, 4, tzinfo=UTC), 1.5, 0.25)
    return Result(name, {"n": 1} if figures is None else figures, given)


def test_the_page_is_what_rendering_the_kept_results_gives() -> None:
    assert PAGE.read_text(encoding="utf-8") == rendered_page(), "python -m benchmarks.report --render writes it anew"


def test_every_script_is_a_benchmark_or_listed_as_part_of_one() -> None:
    files = {path.name for path in (ROOT / "benchmarks" / "runs").glob("*.py")}

    assert files == {run.script for run in RUNS} | set(PARTS)
    assert not {run.script for run in RUNS} & set(PARTS)
    assert len({run.name for run in RUNS}) == len(RUNS)


def test_every_stored_result_belongs_to_a_known_run_and_names_its_origin() -> None:
    kept = sorted((ROOT / "benchmarks" / "results").glob("*.json"))

    assert {path.stem for path in kept} <= {run.name for run in RUNS}
    for path in kept:
        result = read_result(path.stem)
        assert result.figures is None or result.circumstances is not None
        assert result.figures is not None or result.failed is not None


def test_a_page_without_results_names_each_run_as_not_measured(tmp_path: Path) -> None:
    page = rendered_page(tmp_path)

    listed = re.findall(r"^\| not measured yet \| (.*) \|$", page, flags=re.MULTILINE)
    assert [name.rstrip("*") for names in listed for name in names.split(", ")] == [run.name for run in RUNS]


def test_every_run_is_named_by_the_state_of_its_last_run() -> None:
    results = {run.name: a_result(run.name) for run in RUNS}
    results |= {
        "planner": replace(a_result("planner"), is_met=False),
        "emulation": with_failure(a_result("emulation"), Attempt("2026-01-03 00:00 UTC", "no GPU")),
        "learning": Result("learning"),
    }

    names = names_by_state(results)

    assert names["target missed"] == ["planner"]
    assert names["last attempt failed"] == ["emulation"]
    assert names["not measured yet"] == ["learning*"]
    assert names["no target"] == [run.name + "*" * (not run.is_usual) for run in RUNS if not run.has_target]
    assert sum(len(chosen) for chosen in names.values()) == len(RUNS)


def test_a_value_that_misses_its_target_is_bold() -> None:
    assert goal("time", 0.004, most=0.005, digits=1) == "| time | 0.4 % | at most 0.5 % |"
    assert goal("time", 0.006, most=0.005, digits=1) == "| time | **0.6 %** | at most 0.5 % |"
    assert goal("rows", 9_900, least=10_000, digits=0, scale=1, unit="") == "| rows | **9,900** | at least 10,000 |"
    assert goal("lost", 0, most=0, least=0, digits=0, scale=1, unit="") == "| lost | 0 | 0 |"
    assert goal("inside", 0.98, least=0.93, most=0.97, digits=0) == "| inside | **98 %** | 93 to 97 % |"
    assert goal("equal", value=False, least=True) == "| equal | **no** | yes |"
    assert goal("saving", None, least=0.2) == "| saving | **none** | at least 20 % |"
    assert goal("saving", 0.1) == "| saving | 10.00 % |  |"


def test_a_result_is_kept_and_read_back(tmp_path: Path) -> None:
    result = with_failure(a_result(), Attempt("2026-01-03 00:00 UTC", "no GPU"))

    write_result(result, tmp_path)

    assert read_result("sample", tmp_path) == result
    assert [path.name for path in tmp_path.iterdir()] == ["sample.json"]


def test_a_stamp_names_date_machine_versions_command_and_a_failed_attempt() -> None:
    result = a_result()

    good = stamp(result)
    missed = stamp(replace(result, is_met=False))
    failed = stamp(with_failure(result, Attempt("2026-01-03 00:00 UTC", "no `GPU` | here")))

    assert good.startswith("2026-01-02 03:04 UTC, ")
    assert "load 0.25 before" in good
    assert good.endswith("`python benchmarks/sample.py`.")
    assert "missed" in missed
    assert (
        failed
        == f"{good} The attempt at 2026-01-03 00:00 UTC failed (no 'GPU' / here); the figures are from the run before."
    )


def test_json_is_found_between_other_lines_and_tables_are_used_without_json() -> None:
    table = "## Speed, s\n\n| case | time |\n|---|---|\n| a | 1 |\n| b | - |\n"

    assert figures_in('{\n "a": 1\n}') == {"a": 1}
    assert figures_in('noise\n{"a": 1}\n') == {"a": 1}
    assert figures_in('{"a": 1}\n{"a": 2}\n') == [{"a": 1}, {"a": 2}]
    assert figures_in(table) == {"Speed, s": {"columns": ["case", "time"], "rows": [["a", "1"], ["b", "-"]]}}
    assert figures_in("nothing of the kind") is None
    assert figures_in("| case |\n|---|\n") is None


def test_a_failed_run_keeps_the_last_figures_and_the_reason() -> None:
    last = a_result()
    absent = replace(SAMPLE, script="no-such-file.py")

    result = measured(absent, last, is_short=False, limit_s=60.0)

    assert (result.figures, result.circumstances) == (last.figures, last.circumstances)
    assert result.failed is not None
    assert "no-such-file.py" in result.failed.reason
    assert failure_reason(Output(1, "out\n", "\nwhy\n", is_out_of_time=False)) == "out (exit status 1)"


def test_a_run_without_its_data_is_not_started() -> None:
    result = measured(replace(SAMPLE, data=("no-such-folder",)), a_result(), is_short=False, limit_s=60.0)

    assert result.failed is not None
    assert result.failed.reason == "shared/data/no-such-folder is missing beside the checkout"


def test_a_program_over_its_time_limit_is_killed_with_descendants_in_other_sessions() -> None:
    script = "trap '' INT; setsid sleep 600 & echo $!; sleep 600; echo done"

    output = run_program(["bash", "-c", script], 2.0, grace_s=0.2)

    wait_for_death(int(output.stdout))
    assert output.is_out_of_time
    assert output.status == -signal.SIGKILL


def test_processes_that_a_program_leaves_behind_do_not_block_and_are_killed() -> None:
    output = run_program(["bash", "-c", "sleep 600 & echo $!; echo why >&2; exit 3"], 500.0)

    wait_for_death(int(output.stdout))
    assert (output.status, output.stderr, output.is_out_of_time) == (3, "why\n", False)


def test_a_run_that_is_skipped_for_lack_of_time_keeps_its_figures_and_their_date(tmp_path: Path) -> None:
    last = a_result("sample", {"p99_ms": 1.0})
    write_result(last, tmp_path)
    bench = Bench(tmp_path, 1.0, is_short=False)

    bench.run_all([replace(SAMPLE, quiet_s=90.0), replace(SAMPLE, name="other", kind=Kind.COMPUTED, quiet_s=90.0)])

    kept = read_result("sample", tmp_path)
    assert (kept.figures, kept.circumstances) == (last.figures, last.circumstances)
    assert kept.failed is not None
    assert kept.failed.reason.startswith("not enough time: it takes 90 s, ")
    assert bench.failed == ["other", "sample"]


def test_a_run_that_cannot_be_started_keeps_its_figures_and_the_others_run(tmp_path: Path) -> None:
    write_result(a_result(), tmp_path)
    bench = Bench(tmp_path, 10.0, is_short=False)

    bench.run_all([replace(SAMPLE, arguments=("x" * 1_000_000,)), replace(SAMPLE, name="other", script="absent.py")])

    kept = read_result("sample", tmp_path)
    assert kept.figures == {"n": 1}
    assert kept.failed is not None
    assert kept.failed.reason.startswith("cannot be run: ")
    assert bench.failed == ["sample", "other"]


def test_the_longest_computed_run_is_first_and_the_longest_timed_run_last() -> None:
    usual = list(chosen_runs([]))
    computed = [run.quiet_s for run in usual if run.kind is Kind.COMPUTED]
    timed = [run.quiet_s for run in usual if run.kind is Kind.TIMED]

    assert all(run.is_usual for run in usual)
    assert [run.quiet_s for run in usual] == computed + timed
    assert computed == sorted(computed, reverse=True)
    assert timed == sorted(timed)
    assert [run.name for run in chosen_runs(["load", "carbon"])] == ["carbon", "load"]
    with pytest.raises(UsageError, match="no benchmark 'nope'; valid: adapter-overhead, advice, advice-h200"):
        list(chosen_runs(["nope"]))


def test_all_usual_runs_fit_in_an_hour_with_room_to_spare_and_each_limit_lets_a_slow_machine_end() -> None:
    lanes_s, timed_s = [0.0, 0.0], 0.0
    for run in chosen_runs([]):
        if run.kind is Kind.COMPUTED:
            lanes_s[lanes_s.index(min(lanes_s))] += run.quiet_s
        else:
            timed_s += run.quiet_s

    assert max(lanes_s) + timed_s < 50 * 60
    assert all(run.limit_s >= 1.8 * run.quiet_s for run in RUNS)


def test_one_short_benchmark_runs_from_the_command_to_the_page(tmp_path: Path) -> None:
    run = next(run for run in RUNS if run.name == "device-model")
    if not all((ROOT.parent / "shared" / "data" / name).is_dir() for name in run.data):
        pytest.skip("no shared/data beside the checkout")
    bench = Bench(tmp_path, 10.0, is_short=True)

    bench.run(run)

    page = rendered_page(tmp_path)
    assert not bench.failed
    assert json.loads((tmp_path / "device-model.json").read_text(encoding="utf-8"))["figures"]
    assert "| A40 GPT-3 (Perseus) | time (fitted) |" in page
    assert f"{os.cpu_count()} cores" in page


def test_the_cost_of_the_client_is_measured_whatever_it_is(tmp_path: Path) -> None:
    """It follows how the client queues reports, so a change there may leave it waiting for a report forever."""
    bench = Bench(tmp_path, 10.0, is_short=True)

    bench.run(next(run for run in RUNS if run.name == "client-cost"))

    assert not bench.failed
    assert json.loads((tmp_path / "client-cost.json").read_text(encoding="utf-8"))["figures"]["n"] == 10
