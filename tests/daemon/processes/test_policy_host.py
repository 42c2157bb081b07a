"""Policies that raise, loop, print, leak or die: a one-line failure for their job, no effect on others."""

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, baseline_plan
from gpuenergyd.core.policy_api.policy import BaselineView, GpuView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.processes.launch import start_policy_child
from gpuenergyd.daemon.processes.plugins import (
    InstalledPolicy,
    PolicyNames,
    check_policy_name,
    installed_policies,
    load_policy,
    with_default_options,
)
from gpuenergyd.daemon.processes.policy_client import PolicyClient, PolicyFailure
from gpuenergyd.daemon.processes.policy_host import PlanRequest, PolicyHost
from gpuenergyd.errors import UnknownPolicyError, UsageError
from tests.support.installed_distribution import install_distribution
from tests.support.waiting import LIMIT_S, wait_until


def view(job_id: str = "j1") -> JobView:
    kind = InstructionKind.F
    return JobView(
        job_id=job_id,
        schedule=one_forward_one_backward(2, 4),
        gpus=tuple(GpuView(f"GPU-{r}", "A100", (1410, 1200, 900), 0.01) for r in range(2)),
        target=PerformanceTarget(),
        baseline=BaselineView(1.0, None, 10),
        observations=(
            IterationObservation(
                iteration_index=3,
                plan_id=None,
                iteration_time_s=1.0,
                instruction_samples=(InstructionSample(0, kind, (ClockShare(1410, 0.1),), 4),),
                ranks=(RankEnergy(0, 1.0, None, (TimeAtClock(None, 1410, 0.5), TimeAtClock(kind, 1410, 0.5))),),
            ),
        ),
        issued_plans=(baseline_plan(),),
    )


@asynccontextmanager
async def policy_link(
    command: tuple[str, ...], *, time_limit_s: float = LIMIT_S, memory_limit_bytes: int | None = None
) -> AsyncIterator[PolicyClient]:
    link = PolicyClient(
        lambda: start_policy_child(memory_limit_bytes, command), time_limit_s=time_limit_s, first_time_limit_s=LIMIT_S
    )
    try:
        yield link
    finally:
        await link.close()


async def test_each_job_has_its_own_policy_which_is_discarded_with_the_job(host_command: tuple[str, ...]) -> None:
    async with policy_link(host_command) as link:
        answers = [await link.next_plan(job, "polite", view(job)) for job in ("a", "a", "b")]
        await link.drop_job("a")
        plans = [*answers, await link.next_plan("a", "polite", view("a"))]

    assert [plan.plan_id for plan in plans if isinstance(plan, ClockPlan)] == [
        "polite-a-1",
        "polite-a-2",
        "polite-b-1",
        "polite-a-1",
    ]


async def test_a_policy_is_preloaded_once_and_an_import_error_is_returned(host_command: tuple[str, ...]) -> None:
    async with policy_link(host_command) as link:
        await link.start()
        assert "ModuleNotFoundError" in (await link.preload("broken-import") or "")
        assert await link.preload("polite") is None
        num_asked = link._next_request_id
        await link.preload("polite")
        await link.preload("polite:eta=0.7")  # what users choose is not remembered
        num_asked_again, plan, num_restarts = (
            link._next_request_id - num_asked,
            await link.next_plan("a", "polite", view("a")),
            link.num_restarts,
        )

    assert num_asked_again == 0
    assert isinstance(plan, ClockPlan)
    assert num_restarts == 0


def test_what_a_policy_prepares_is_known_meanwhile_and_a_lasting_problem_is_logged_once(
    host_command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # opening it waits until the other side does
    monkeypatch.setenv("MAY_PREPARE", str(gate))
    activities: list[str | None] = []

    async def scenario() -> tuple[str | None, ClockPlan | PolicyFailure, PolicyClient]:
        async with policy_link(host_command) as link:
            activities.append(link.activity)
            loading = asyncio.create_task(link.preload("prepares"))
            await asyncio.to_thread(wait_until, lambda: link.activity is not None)
            activities.append(link.activity)
            await asyncio.to_thread(gate.write_text, "")
            error = await loading
            activities.append(link.activity)
            opened = asyncio.create_task(asyncio.to_thread(gate.write_text, ""))
            plan = await link.next_plan("a", "prepares", view("a"))
            await opened
            return error, plan, link

    with caplog.at_level("INFO"):
        error, plan, link = asyncio.run(scenario())

    assert (error, link.trouble) == (None, "no folder is writable; make one")
    assert activities == [None, "compiling something, once", None]
    assert isinstance(plan, ClockPlan)
    assert [record.getMessage() for record in caplog.records] == [
        "policy host: compiling something, once",
        "policy host: no folder is writable; make one",
        "policy host: compiling something, once",
    ]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("raises", "RuntimeError: no idea"),
        ("garbage", "next_plan returned dict, not a ClockPlan"),
        ("unsendable", "the result cannot be encoded"),
        ("no-policy", "has no method next_plan"),
        ("broken-import", "ModuleNotFoundError"),
        ("nope", "no policy 'nope'; installed: "),
    ],
)
async def test_an_exception_in_a_policy_is_a_failure_and_the_host_continues(
    host_command: tuple[str, ...], policy: str, reason: str
) -> None:
    async with policy_link(host_command) as link:
        bad = await link.next_plan("bad", policy, view())
        good = await link.next_plan("good", "polite", view())
        num_restarts = link.num_restarts

    assert isinstance(bad, PolicyFailure)
    assert reason in bad.reason
    assert "\n" not in bad.reason
    assert isinstance(good, ClockPlan)
    assert num_restarts == 0


@pytest.mark.fault(44)
@pytest.mark.kill
@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("loops", "did not answer within 0.5"),
        ("sleeps", "did not answer within 0.5"),
        ("exits", "died while running 'exits' (exit status 3)"),
        ("mistyped", "returned an invalid result"),
    ],
)
async def test_a_policy_that_breaks_its_host_is_a_failure_and_the_host_is_restarted(
    host_command: tuple[str, ...], policy: str, reason: str
) -> None:
    async with policy_link(host_command, time_limit_s=0.5) as link:
        await link.next_plan("good", "polite", view())
        bad = await link.next_plan("bad", policy, view())
        good = await link.next_plan("good", "polite", view())
        num_restarts = link.num_restarts

    assert isinstance(bad, PolicyFailure)
    assert reason in bad.reason
    assert isinstance(good, ClockPlan)
    assert num_restarts == 1


@pytest.mark.fault(44)
@pytest.mark.kill
async def test_another_job_is_served_after_a_looping_policy_times_out(host_command: tuple[str, ...]) -> None:
    async with policy_link(host_command, time_limit_s=0.5) as link:
        await link.next_plan("good", "polite", view())
        bad, good = list(
            await asyncio.gather(link.next_plan("bad", "loops", view()), link.next_plan("good", "polite", view()))
        )

    assert isinstance(bad, PolicyFailure)
    assert isinstance(good, ClockPlan)


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """Have a process, whose priority is lower, share one core with two others that compute all the time."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(pid, {core})
    program = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    rivals = [subprocess.Popen([sys.executable, "-S", "-c", program]) for _ in range(2)]
    try:
        yield
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()


@pytest.mark.thorough
@pytest.mark.fault(44)
async def test_a_policy_on_a_busy_host_is_waited_for(host_command: tuple[str, ...]) -> None:
    async with policy_link(host_command, time_limit_s=1.0) as link:
        await link.next_plan("a", "polite", view("a"))
        assert link.pid is not None
        with starved(link.pid):
            plan, num_restarts = await link.next_plan("b", "computes", view("b")), link.num_restarts

    assert isinstance(plan, ClockPlan)
    assert num_restarts == 0


async def test_output_of_a_policy_does_not_reach_the_channel(
    host_command: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    async with policy_link(host_command) as link:
        plans = [await link.next_plan("a", "prints", view()) for _ in range(2)]

    assert [plan.plan_id for plan in plans if isinstance(plan, ClockPlan)] == ["printed", "printed"]
    assert "not a plan" in capfd.readouterr().err


@pytest.mark.fault(44)
async def test_a_leaking_policy_is_stopped_by_its_memory_limit(host_command: tuple[str, ...]) -> None:
    async with policy_link(host_command, memory_limit_bytes=2**30) as link:
        answer = await link.next_plan("a", "leaks", view())

    assert isinstance(answer, PolicyFailure)
    assert "MemoryError" in answer.reason


@pytest.mark.kill
def test_the_policy_host_dies_with_the_daemon(host_command: tuple[str, ...]) -> None:
    program = (
        "import subprocess, sys\n"
        f"host = subprocess.Popen({list(host_command)!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(host.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    core = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert core.stdout is not None
    host_pid = int(core.stdout.readline())
    host = os.pidfd_open(host_pid)

    core.kill()
    core.communicate(timeout=LIMIT_S)

    # It may still be starting; it reads its pipe only after that.
    readable, _, _ = select.select([host], [], [], LIMIT_S)
    os.close(host)
    assert readable


def test_installed_policies_are_listed_with_their_errors(
    hostile_distribution: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(hostile_distribution))

    found = {policy.name: policy for policy in installed_policies()}

    assert {"bubble-aware", "full-speed", "uniform"} <= set(found)
    assert found["polite"] == InstalledPolicy("polite", "gpuenergyd.policies", "hostile-policies", "6.6.6")
    assert found["no-policy"].error == "policy 'no-policy' (hostile_policies:NoPolicy) has no method next_plan()"
    assert found["broken-import"].error is not None
    assert "hostile_policies_that_are_not_there" in found["broken-import"].error


def test_a_policy_installed_while_the_daemon_runs_is_found() -> None:
    installed, now_s = ["full-speed"], [100.0]
    num_searches = 0

    def search() -> tuple[str, ...]:
        nonlocal num_searches
        num_searches += 1
        return tuple(installed)

    names = PolicyNames(search, now_s=lambda: now_s[0])
    names.require("full-speed")
    with pytest.raises(UnknownPolicyError, match="no policy 'mine'; installed: full-speed"):
        names.require("mine")
    installed.append("mine")
    now_s[0] += 5.0

    names.require("mine")

    for _ in range(1000):
        with pytest.raises(UnknownPolicyError):
            names.require("nope")
        names.require("full-speed")
    assert num_searches == 2


def test_an_import_error_names_the_restart_that_may_be_missing(
    hostile_distribution: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(hostile_distribution))

    with pytest.raises(ModuleNotFoundError, match="installed while the daemon ran, restart the daemon"):
        load_policy("broken-import")


def test_an_import_error_inside_a_policy_keeps_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_module\n")
    install_distribution(tmp_path, "needs-more", "gpuenergyd.policies", {"needs-more": "needs_more:Policy"})
    monkeypatch.syspath_prepend(str(tmp_path))

    answer = PolicyHost().answer(PlanRequest(1, "", "needs-more"))

    place = f"({tmp_path / 'needs_more.py'}:1)"
    assert answer.error == f"ModuleNotFoundError: No module named 'no_such_module' {place}"


async def test_a_package_installed_while_the_host_runs_is_imported(
    host_command: tuple[str, ...], tmp_path: Path
) -> None:
    """The host has searched the folder before; the new package is neither in its cache of folders nor of modules."""
    program = host_command[3].replace("import sys;", f"import sys; sys.path.insert(0, {str(tmp_path)!r});")
    async with policy_link((*host_command[:3], program)) as link:
        before = await link.preload("late")
        (tmp_path / "late_policy.py").write_text("from hostile_policies import Polite\n")
        install_distribution(tmp_path, "late", "gpuenergyd.policies", {"late": "late_policy:Polite"})
        plan = await link.next_plan("a", "late", view("a"))

    assert "no policy 'late'" in (before or "")
    assert isinstance(plan, ClockPlan)


def test_an_unknown_policy_is_refused_with_the_installed_ones() -> None:
    with pytest.raises(
        UnknownPolicyError,
        match="no policy 'nope'; installed: bubble-aware, cost, envelope, frequency-file, full-speed, learning,"
        " power-limit, power-profile, uniform",
    ):
        check_policy_name("nope")


def test_a_policy_name_provided_by_two_distributions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_distribution(tmp_path, "impostor", "gpuenergyd.policies", {"uniform": "impostor:Uniform"})
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(UnknownPolicyError, match=r"'uniform' is provided more than once: .*impostor"):
        load_policy("uniform")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cost", "cost:eta=0.7,fast=true"), ("cost:eta=1", "cost:eta=1,fast=true"), ("other", "other")],
)
def test_options_of_the_settings_hold_where_a_job_gives_none(name: str, expected: str) -> None:
    assert with_default_options(name, {"cost": {"eta": 0.7, "fast": True}}) == expected


def test_an_option_that_a_policy_does_not_take_is_named_with_the_valid_ones() -> None:
    with pytest.raises(UsageError, match="policy uniform has no option 'eta'; valid is trials"):
        load_policy("uniform:eta=1")
    with pytest.raises(UnknownPolicyError, match=r"does not take these options: eta; valid: "):
        load_policy("envelope:eta=1")
