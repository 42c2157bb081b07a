"""`--format trace`: what the history knows of one job, in the format and on the clock of torch.profiler's traces."""

import json
import socket
import subprocess
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks
from gpuenergyd.store import open_history
from gpuenergyd.store.records import ControlEventRecord, JobRecord, PlanRecord, SampleRecord
from gpuenergyd_formats.trace import _end_before_the_next, trace_text
from tests.support.chromium import CHROMIUM, Page, in_browser
from tests.support.sample_history import MAX_CLOCK_MHZ, NUM_MICROBATCHES, NUM_RANKS, START, spans, write_sample_history
from tests.support.stored_history import write_records
from tests.support.tools_environment import PERFETTO, tools_environment
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = write_sample_history(tmp_path_factory.mktemp("trace") / "history.sqlite3")
    clocks = tuple(RankClocks(r, (1050,) * (2 * NUM_MICROBATCHES)) for r in range(NUM_RANKS - 1))
    write_records(
        path,
        PlanRecord("gpt-1", 9, ClockPlan("tuned-9", PlanPurpose.TUNED, clocks, reason="slack"), START, 0),
        ControlEventRecord(START, "lease", "daemon", "gpt-1", "GPU-0", "clocks of plan tuned-9"),
        SampleRecord("GPU-0", START + timedelta(seconds=1), 250.0, 1000.0, None, 40.0),
    )
    with open_history(path) as history:
        found: dict[str, Any] = json.loads(trace_text(history, history.job_summaries()[0]))
    return found


def tracks(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the slices and instants of each track by its name, in order."""
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in sorted((e for e in trace["traceEvents"] if e["ph"] in "Xi"), key=lambda e: e["ts"]):
        found[names[event["tid"]]].append(event)
    return found


def test_instructions_have_their_place_planned_clock_and_read_clock(trace: dict[str, Any]) -> None:
    stage = [event for event in tracks(trace)["stage 3: GPU-3"] if event["name"] != "bubble"]
    other = [event for event in tracks(trace)["stage 0: GPU-0"] if event["name"] != "bubble"]
    wanted = [span for span in spans(is_tuned=False) if span.pp_rank == 3]
    (begin,) = {event["ts"] for event in tracks(trace)["iterations"] if event["name"] == "iteration 2"}

    for span, event in zip(sorted(wanted, key=lambda own: own.start_s), stage, strict=False):
        assert event["name"] == f"{span.kind.value}{span.microbatch_index}"
        assert event["ts"] == pytest.approx(begin + 1e6 * span.start_s, abs=1.0)
        assert event["dur"] == pytest.approx(1e6 * (span.end_s - span.start_s), abs=1.0)
        assert event["args"]["mean SM clock read (MHz)"] == MAX_CLOCK_MHZ
        assert "planned SM clock (MHz)" not in event["args"]  # this stage keeps its clock
    assert {event["args"]["planned SM clock (MHz)"] for event in other} == {1050}
    assert {InstructionKind.F, InstructionKind.B} == {event["name"][0] for event in other}


def test_bubbles_fill_the_time_between_instructions(trace: dict[str, Any]) -> None:
    track = tracks(trace)["stage 3: GPU-3"]
    within = [(own, following) for own, following in pairwise(track) if "bubble" in (own["name"], following["name"])]

    assert within
    for own, following in within:
        is_next_iteration = following["ts"] - own["ts"] - own["dur"] > 10_000
        assert is_next_iteration or own["ts"] + own["dur"] == pytest.approx(following["ts"], abs=2.0)


def test_slices_of_a_track_do_not_overlap(trace: dict[str, Any]) -> None:
    for name, events in tracks(trace).items():
        if name != "control events":
            assert all(own["ts"] + own["dur"] <= following["ts"] for own, following in pairwise(events)), name


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(0, 20)), max_size=20))
def test_no_slices_overlap_whatever_their_times(values: list[tuple[int, int, int]]) -> None:
    slices: list[dict[str, Any]] = [{"tid": track, "ts": ts, "dur": dur} for track, ts, dur in values]

    _end_before_the_next(slices)

    for own, following in pairwise(slices):
        assert own["tid"] != following["tid"] or own["ts"] + own["dur"] <= following["ts"]
    assert all(own["dur"] >= 0 for own in slices)


def test_what_was_not_read_has_no_event(trace: dict[str, Any]) -> None:
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]

    assert [(event["name"], event["args"]) for event in counters] == [("power of GPU-0", {"W": 250.0})]
    assert None not in [value for event in trace["traceEvents"] for value in event.get("args", {}).values()]


def test_plans_and_control_events_have_their_reasons(trace: dict[str, Any]) -> None:
    plans, (event,) = tracks(trace)["plan in force"], tracks(trace)["control events"]

    assert "slack" in [plan["args"]["reason"] for plan in plans]
    assert (event["name"], event["args"]["reason"]) == ("lease", "clocks of plan tuned-9")


def test_times_are_on_the_clock_of_torch_profiler(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch.profiler writes the other trace")
    path, before = tmp_path / "torch.json", datetime.now(tz=UTC)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(2).sum()
    after = datetime.now(tz=UTC)
    profile.export_chrome_trace(str(path))
    database = write_records(
        tmp_path / "history.sqlite3",
        JobRecord("gpt-1", "gpt", "run", 0, "uniform", "1f1b", "torch", True, 1, 8, 0.0, 1000, before),
        ControlEventRecord(before, "before", "daemon", "gpt-1", None, "the profile"),
        ControlEventRecord(after, "after", "daemon", "gpt-1", None, "the profile"),
    )
    with open_history(database) as history:
        ours = json.loads(trace_text(history, history.job_summaries()[0]))
    theirs = json.loads(path.read_text())
    begin_us, end_us = (event["ts"] for event in ours["traceEvents"] if event["ph"] == "i")

    assert theirs["baseTimeNanoseconds"] == ours["baseTimeNanoseconds"]
    measured = [event["ts"] for event in theirs["traceEvents"] if event.get("cat") == "cpu_op"]
    assert measured
    assert all(begin_us - 1000 <= ts <= end_us + 1000 for ts in measured)


ROWS = """
(async () => {
  const result = await app.trace.engine.query(%s);
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(result.columns().map((name) => String(row.get(name))));
  return rows;
})()
"""
"""Rows of an SQL query to the trace that Perfetto has loaded."""


@pytest.mark.thorough
def test_perfetto_itself_shows_the_tracks_and_loads_every_event(trace: dict[str, Any], tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("Chromium (Debian package chromium) is not installed")
    viewer = tools_environment(PERFETTO) / "vizviewer"
    (tmp_path / "job.json").write_text(json.dumps(trace))
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    found: dict[str, list[list[str]]] = {}
    asked = {
        "tracks": "select thread.name, count(*) from slice join thread_track on track_id = thread_track.id "
        "join thread using (utid) group by 1",
        "counters": "select count(*) from counter",
        "problems": "select name from stats where severity != 'info' and value > 0",
    }

    def is_served() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    async def look(page: Page) -> None:
        await page.call("Network.setBlockedURLs", urls=["https://*"])
        await page.open(f"http://localhost:{port}/", width=1600)
        await page.wait_until("globalThis.app?.trace !== undefined")
        for name, query in asked.items():
            found[name] = await page.evaluate(ROWS % json.dumps(query))
        await page.wait_until("document.body.innerText.includes('stage 3: GPU-3')")
        await page.evaluate("waitForPerfettoIdle()")
        await page.screenshot("perfetto", tmp_path)

    server = subprocess.Popen([viewer, "--server_only", "--port", str(port), tmp_path / "job.json"])
    try:
        wait_until(is_served)
        in_browser(tmp_path / "profile", look)
    finally:
        server.terminate()
        server.wait()

    kinds = Counter(event["ph"] for event in trace["traceEvents"])
    assert found["problems"] == []
    assert found["counters"] == [[str(kinds["C"])]]
    assert dict(found["tracks"]) == {name: str(len(events)) for name, events in tracks(trace).items()}
