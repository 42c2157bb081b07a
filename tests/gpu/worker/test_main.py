"""The GPU worker as a process, through its socket."""

import asyncio
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from gpuenergyd.core.clock_request import ClockRequest, TimedClock
from gpuenergyd.errors import DriverError, GpuError, ProtocolError
from gpuenergyd.gpu.link.codec import decode, encode
from gpuenergyd.gpu.link.messages import Done, Failed, GpuHealth, Message, Restore
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd.gpu.restore.executor import RestoreResult
from gpuenergyd.gpu.restore.journal import Control
from tests.support.client_process import needs_namespaces
from tests.support.waiting import LIMIT_S, wait_until
from tests.support.worker_link import WorkerLink
from tests.support.worker_site import OWNER, Site, request_clock, run, simulated_site, until, with_worker


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Three simulated A100s held by this process; workers are ended afterwards."""
    with simulated_site(tmp_path, 3) as made:
        yield made


@with_worker
async def test_clock_request_is_carried_out_and_its_effect_reported(site: Site, link: WorkerLink) -> None:
    assert [i.gpu_uuid for i in link.welcome.identities] == site.gpus
    await link.lease("L1", site.gpus, OWNER)
    request_clock(link, site.gpus[1], 1110)
    await until(lambda: bool(site.received.clock_changes))
    change = site.received.clock_changes[0]
    assert (change.gpu_uuid, change.requested_sm_clock_mhz, change.error) == (site.gpus[1], 1110, None)
    assert change.effective_mono_ns is not None
    assert change.due_mono_ns <= change.called_mono_ns <= change.returned_mono_ns <= change.effective_mono_ns
    assert change.actual_sm_clock_mhz == 1110
    assert site.locks() == [None, 1110, None]


@with_worker
async def test_journal_is_on_disk_before_the_lease_is_granted(site: Site, link: WorkerLink) -> None:
    await link.lease("L1", site.gpus[:2], OWNER)
    assert site.journalled() == set(site.gpus[:2])
    assert site.locks() == [None, None, None]
    await link.restore(site.gpus, "test")
    assert site.journalled() == set()


@with_worker
async def test_clock_request_without_a_lease_is_refused(site: Site, link: WorkerLink) -> None:
    await link.lease("L1", site.gpus[:1], OWNER)
    request_clock(link, site.gpus[2], 900)
    await until(lambda: bool(site.received.clock_changes))
    assert site.received.clock_changes[0].error == "refused: no lease on this GPU"
    assert site.host.num_clock_sets(site.gpus[2]) == 0


@with_worker
async def test_lease_that_cannot_be_journalled_is_refused_and_nothing_is_set(site: Site, link: WorkerLink) -> None:
    (site.folder / "journal.json.lock").unlink(missing_ok=True)
    (site.folder / "journal.json.lock").mkdir()
    with pytest.raises(GpuError, match="cannot lock the journal"):
        await link.lease("L1", site.gpus, OWNER)
    request_clock(link, site.gpus[0], 900)
    await until(lambda: bool(site.received.clock_changes))
    assert site.received.clock_changes[0].error is not None
    assert site.locks() == [None, None, None]


@with_worker
async def test_second_lease_on_a_gpu_names_the_first(site: Site, link: WorkerLink) -> None:
    await link.lease("L1", site.gpus[:2], OWNER)
    with pytest.raises(GpuError, match="is leased to L1"):
        await link.lease("L2", site.gpus[1:], OWNER)
    await link.restore(site.gpus[:2], "done")
    await link.lease("L2", site.gpus[1:], OWNER)


@pytest.mark.fault(36)
@with_worker
async def test_flood_of_clock_requests_is_coalesced_to_the_newest(site: Site, link: WorkerLink) -> None:
    await link.lease("L1", site.gpus, OWNER)
    clocks = link.welcome.identities[0].supported_sm_clocks_mhz
    for k in range(300):
        for gpu in site.gpus:
            request_clock(link, gpu, clocks[k % 20])
    for gpu in site.gpus:
        request_clock(link, gpu, 1005)
    await until(lambda: site.locks() == [1005, 1005, 1005])
    await until(lambda: sum(c.requested_sm_clock_mhz == 1005 for c in site.received.clock_changes) == 3)
    assert all(site.host.num_clock_sets(gpu) < 150 for gpu in site.gpus)


@with_worker
async def test_request_for_the_clock_in_force_makes_no_driver_call(site: Site, link: WorkerLink) -> None:
    await link.lease("L1", site.gpus, OWNER)
    request_clock(link, site.gpus[0], 1110)
    await until(lambda: bool(site.received.clock_changes))
    request_clock(link, site.gpus[0], 1110)
    request_clock(link, site.gpus[1], 1110)
    await until(lambda: site.locks()[1] == 1110)
    assert (await link.ping()).num_sets_skipped == 1
    assert site.host.num_clock_sets(site.gpus[0]) == 1


@with_worker
async def test_restore_while_a_clock_is_being_set_is_no_foreign_change(site: Site, link: WorkerLink) -> None:
    """The call returns after its lease has ended; the GPU's full speed afterwards is our own restore."""
    gpu = site.gpus[0]
    for _ in range(3):
        await link.lease("L1", [gpu], OWNER)
        request_clock(link, gpu, 900)
        await link.restore([gpu], "while its clock is being set")
    site.received.samples.clear()
    await until(lambda: sum(s.gpu_uuid == gpu for s in site.received.samples) > 40)

    assert site.received.health_changes == []

    await link.lease("L1", [gpu], OWNER)
    request_clock(link, gpu, 900)
    await until(lambda: site.locks()[0] == 900)


@with_worker
async def test_request_between_two_supported_clocks_sets_the_faster_one(site: Site, link: WorkerLink) -> None:
    """Rounding to a supported clock never makes a job slower than requested."""
    await link.lease("L1", site.gpus, OWNER)
    for gpu, clock in zip(site.gpus, (1111, 5000, 1), strict=True):
        request_clock(link, gpu, clock)
    await until(lambda: site.locks() == [1125, 1410, 210])


@with_worker
async def test_later_clock_is_set_at_its_instant_unless_replaced(site: Site, link: WorkerLink) -> None:
    await link.lease("L1", site.gpus, OWNER)
    now_ns = time.monotonic_ns()
    for gpu in site.gpus[:2]:
        link.request_clock(gpu, ClockRequest(1110, now_ns, (TimedClock(1410, now_ns + 300_000_000),)))
    request_clock(link, site.gpus[1], 1200)
    await until(lambda: any(c.requested_sm_clock_mhz == 1410 for c in site.received.clock_changes))
    (raised,) = (c for c in site.received.clock_changes if c.requested_sm_clock_mhz == 1410)
    assert raised.gpu_uuid == site.gpus[0]
    assert raised.called_mono_ns >= now_ns + 300_000_000
    await link.ping()
    assert site.locks()[:2] == [1410, 1200]


@with_worker
async def test_restore_removes_clock_locks_ends_leases_and_drops_requests(site: Site, link: WorkerLink) -> None:
    await site.lower_all(link)
    request_clock(link, site.gpus[0], 1005)
    outcomes = await link.restore(site.gpus[:2], "test")
    assert {(o.gpu_uuid, o.result) for o in outcomes} == {(gpu, RestoreResult.RESTORED) for gpu in site.gpus[:2]}
    assert site.locks() == [None, None, 900]
    request_clock(link, site.gpus[0], 800)
    await until(lambda: any(c.error for c in site.received.clock_changes))
    assert site.locks() == [None, None, 900]


@with_worker
async def test_power_limit_needs_a_lease_and_is_restored_with_it(site: Site, link: WorkerLink) -> None:
    gpu = site.gpus[0]
    with pytest.raises(GpuError, match="does not cover"):
        await link.set_power_limit("L1", gpu, 300.0, OWNER)
    await link.lease("L1", site.gpus[:1], OWNER)
    assert await link.set_power_limit("L1", gpu, 300.0, OWNER) == 300.0
    assert await link.set_power_limit("L1", gpu, 250.0, OWNER) == 250.0
    with pytest.raises(GpuError, match="100-480 W"):
        await link.set_power_limit("L1", gpu, 900.0, OWNER)
    assert site.host.power_limit_w(gpu) == 250.0
    assert {o.result for o in await link.restore([gpu], "end")} == {RestoreResult.RESTORED}
    assert site.host.power_limit_w(gpu) == 480.0


@with_worker
async def test_a_job_only_lowers_the_power_limit_and_returns_to_the_one_before(site: Site, link: WorkerLink) -> None:
    gpu = site.gpus[0]
    site.host.set_power_limit(gpu, 350.0)
    await link.lease("L1", [gpu], OWNER, sets_clocks=False)
    assert site.journalled() == set()
    assert await link.lower_power_limit("L1", gpu, 400.0, OWNER) == 350.0
    assert await link.lower_power_limit("L1", gpu, 250.0, OWNER) == 250.0
    assert await link.lower_power_limit("L1", gpu, 450.0, OWNER) == 350.0
    assert await link.lower_power_limit("L1", gpu, 300.0, OWNER) == 300.0
    assert await link.lower_power_limit("L1", gpu, None, OWNER) == 350.0
    assert await link.lower_power_limit("L1", gpu, 200.0, OWNER) == 200.0
    site.host.set_power_limit(gpu, 180.0)
    assert await link.lower_power_limit("L1", gpu, 250.0, OWNER) == 180.0
    assert await link.lower_power_limit("L1", gpu, None, OWNER) == 180.0
    site.host.set_power_limit(gpu, 350.0)
    assert await link.lower_power_limit("L1", gpu, 300.0, OWNER) == 300.0
    with pytest.raises(GpuError, match="does not cover"):
        await link.lower_power_limit("L2", gpu, 200.0, OWNER)
    assert {(o.control, o.result) for o in await link.restore([gpu], "end")} == {
        (Control.POWER_LIMIT, RestoreResult.RESTORED)
    }
    assert site.host.power_limit_w(gpu) == 350.0


@with_worker
async def test_a_lease_for_power_limits_sets_no_clock(site: Site, link: WorkerLink) -> None:
    await link.lease("L1", site.gpus[:1], OWNER, sets_clocks=False)
    request_clock(link, site.gpus[0], 1110)
    await until(lambda: bool(site.received.clock_changes))
    assert "no entry" in str(site.received.clock_changes[0].error)
    assert site.locks() == [None, None, None]


def test_a_worker_whose_daemon_ended_before_it_had_started_ends_too(site: Site) -> None:
    with subprocess.Popen(["true"]) as daemon:
        pass

    worker = site.start_worker("--exit-with-daemon", "--parent-pid", str(daemon.pid))

    assert worker.wait(timeout=LIMIT_S) == 0


async def test_second_daemon_is_refused_while_one_is_connected(site: Site) -> None:
    site.start_worker()
    async with site.linked():
        with pytest.raises((GpuError, DriverError), match="another daemon is connected"):
            async with site.linked():
                pass


@pytest.mark.kill
async def test_sentinel_restores_clocks_when_the_worker_is_killed(site: Site) -> None:
    worker = site.start_worker()
    async with site.linked() as (link, _):
        await site.lower_all(link)
        worker.kill()
        await until(lambda: site.locks() == [None, None, None])
        await until(lambda: site.journalled() == set())


async def test_sentinel_ends_with_a_worker_that_stops_in_order_and_not_before(site: Site) -> None:
    worker = site.start_worker()
    async with site.linked() as (link, _):
        pidfd = os.pidfd_open(link.welcome.sentinel_pid)
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        assert (await link.ping()).num_late_ticks >= 0
        assert select.select([pidfd], [], [], 0)[0] == []
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, 20) == 0
        assert (await asyncio.to_thread(select.select, [pidfd], [], [], 20))[0] == [pidfd]
        os.close(pidfd)


def test_death_of_a_process_restores_its_gpus_without_a_request_of_the_daemon(site: Site) -> None:
    """The death of any process of a job counts; other leases stay, and the daemon gets the outcomes afterwards."""
    site.start_worker()
    dying, living = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    pidfds = {process: os.pidfd_open(process.pid) for process in (dying, living)}

    async def main() -> None:
        async with site.linked() as (link, _):
            await link.lease("L1", site.gpus[:2], OWNER, (pidfds[living], pidfds[dying]))
            await link.lease("L2", site.gpus[2:], OWNER, (pidfds[living],))
            for gpu in site.gpus:
                request_clock(link, gpu, 900)
            await until(lambda: site.locks() == [900, 900, 900])
            dying.kill()
            await until(lambda: site.locks() == [None, None, 900])
            outcomes = await link.restore(site.gpus[:2], "the daemon noticed it too")
            assert [(o.gpu_uuid, o.result) for o in outcomes] == [(g, RestoreResult.RESTORED) for g in site.gpus[:2]]
            await link.lease("L3", site.gpus[:2], OWNER)

    run(main())
    for process, pidfd in pidfds.items():
        os.close(pidfd)
        process.kill()
        process.wait()


@pytest.mark.fault(6)
@pytest.mark.kill
async def test_next_worker_restores_what_a_killed_one_left(site: Site) -> None:
    worker = site.start_worker()
    async with site.linked() as (link, received):
        await link.lease("L1", site.gpus, OWNER)
        request_clock(link, site.gpus[2], 900)
        await until(lambda: site.locks()[2] == 900)
        site.kill(worker, link)
        await until(lambda: bool(received.lost))
        with pytest.raises(GpuError, match="the GPU worker is gone"):
            await link.ping()
    worker.wait()

    site.start_worker()

    wait_until(lambda: site.locks() == [None, None, None])
    wait_until(lambda: site.journalled() == set())


@with_worker
async def test_restore_command_overrides_a_running_worker(site: Site, link: WorkerLink) -> None:
    """A worker whose journal entry is gone does not lower the clock again."""
    await link.lease("L1", site.gpus, OWNER)
    request_clock(link, site.gpus[0], 900)
    await until(lambda: site.locks()[0] == 900)
    await asyncio.to_thread(restore, site.folder / "journal.json")
    request_clock(link, site.gpus[0], 800)
    await until(lambda: any(c.error for c in site.received.clock_changes))
    assert "it has been restored" in str(site.received.clock_changes[-1].error)
    assert site.locks() == [None, None, None]


async def test_sigterm_restores_and_ends(site: Site) -> None:
    worker = site.start_worker()
    async with site.linked() as (link, _):
        await link.lease("L1", site.gpus, OWNER)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: site.locks()[0] == 900)
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, 20) == 0
        assert site.locks() == [None, None, None]


@pytest.mark.fault(54)
async def test_worker_starts_with_a_bad_entry_resets_its_gpu_and_says_where_the_journal_is_kept(site: Site) -> None:
    worker = site.start_worker()
    async with site.linked() as (link, _):
        await site.lower_all(link)
        site.kill(worker, link)
    worker.wait()
    path = site.folder / "journal.json"
    document = json.loads(path.read_text())
    document["entries"][0]["saved_value"] = float("nan")
    document["entries"][1]["owner_pid"] = [[]]
    path.write_text(json.dumps(document))

    successor = site.start_worker()
    wait_until(lambda: site.locks() == [None, None, None])
    wait_until(lambda: site.journalled() == set())
    successor.terminate()

    assert successor.wait(20) == 0
    assert successor.stderr is not None
    log = successor.stderr.read().decode()
    (kept,) = site.folder.glob("journal.json.corrupt-*")
    assert f"is damaged: saved_value of an entry is nan, and 1 more; moved it to {kept}; resetting" in log


async def test_samples_carry_the_counter_as_of_its_updates(site: Site) -> None:
    site.start_worker()
    async with site.linked() as (_, received):
        await until(lambda: len({s.energy_edge_mono_ns for s in received.samples if s.gpu_uuid == site.gpus[0]}) > 12)
        mine = [s for s in received.samples if s.gpu_uuid == site.gpus[0] and s.energy_edge_mono_ns is not None]
        assert all(s.read_mono_ns >= (s.energy_edge_mono_ns or 0) for s in mine)
        edges = [
            (before, after)
            for before, after in pairwise(mine)
            if before.energy_edge_mono_ns != after.energy_edge_mono_ns
        ]
        (before_first, first), *_, (before_last, last) = edges
        assert first.energy_edge_mono_ns is not None
        assert last.energy_edge_mono_ns is not None
        assert first.total_energy_j is not None
        assert last.total_energy_j is not None
        passed_s = (last.energy_edge_mono_ns - first.energy_edge_mono_ns) / 1e9
        # An update is known to lie between two readings, which are far apart on a busy machine.
        unknown_ns = first.read_mono_ns - before_first.read_mono_ns + last.read_mono_ns - before_last.read_mono_ns
        expected_s = (last.total_energy_j - first.total_energy_j) / 83.64
        assert passed_s == pytest.approx(expected_s, rel=0.05, abs=unknown_ns / 1e9)
        assert all(s.power_w is not None and s.sm_clock_mhz == 1410 for s in mine)


MALFORMED_DATAGRAMS = (
    b"\0\xff",
    b"[]",
    b"{}",
    b'{"type": "lease"}',
    b'[2,"Ping",1,[]]',
    b'[3,"Nonsense",1,[]]',
    b'[3,["Ping"],1,[]]',
    b'[3,"Ping","1",[]]',
    b'[3,"Ping",1,[1]]',
    b'[3,"Ping",1,{}]',
    b'[3,"RequestClock",null,["GPU-0",[1200]]]',
    b'[3,"RequestClock",null,["GPU-0",["1200",0,0,0,0]]]',
    b'[3,"RequestClock",null,[0,[1200,0,0,0,0]]]',
    b'[3,"HandOver",1,["",NaN]]',
    b'[3,"Hello",1,["",["no-such-policy",{}]]]',
    b'[3,"Hello",1,["",["keep",{"a100":"1200"}]]]',
    b'[3,"Restore",1,[[0],"",false]]',
    b"[" * 10_000,
)


@pytest.mark.parametrize("datagram", MALFORMED_DATAGRAMS)
def test_malformed_datagram_is_a_protocol_error(datagram: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(datagram)


async def test_malformed_datagrams_do_not_disturb_the_worker(site: Site) -> None:
    site.start_worker()
    wait_until((site.folder / "link.sock").is_socket)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        wait_until(lambda: raw.connect_ex(str(site.folder / "link.sock")) == 0)
        for junk in MALFORMED_DATAGRAMS:
            raw.send(junk)
        raw.send(encode(Done(), 1))
        raw.send(encode(Restore(("GPU-none",), "", is_daemon_ending=False), 2))
        raw.settimeout(LIMIT_S)
        replies: dict[int | None, Message] = {}
        while 2 not in replies:
            request_id, message = decode(raw.recv(100_000))
            replies[request_id] = message
        assert replies[1] == Failed("Done is not a request")
        assert str(replies[2]).startswith("Failed(error=\"no GPU 'GPU-none'; known GPUs: ")
    async with site.linked() as (link, _):
        assert len(link.welcome.identities) == 3


def test_socket_is_not_accessible_to_other_users(site: Site) -> None:
    site.start_worker()
    wait_until((site.folder / "link.sock").is_socket)

    assert stat.S_IMODE((site.folder / "link.sock").stat().st_mode) == 0o660


async def test_second_worker_on_a_socket_exits_and_a_stale_socket_is_replaced(site: Site) -> None:
    first = site.start_worker()
    async with site.linked():
        second = site.start_worker()
        assert await asyncio.to_thread(second.wait, 20) == 2
        assert second.stderr is not None
        assert b"a worker already listens" in second.stderr.read()
    first.kill()
    first.wait()
    site.start_worker()
    async with site.linked():
        pass


@pytest.mark.fault(4)
async def test_the_worker_of_the_next_daemon_waits_until_that_of_a_killed_one_has_ended(site: Site) -> None:
    """Killed daemon and next daemon: the old worker restores first, and the new link is one to the new worker."""
    first = site.start_worker("--exit-with-daemon")
    log = first.stderr
    assert log is not None
    async with site.linked() as (link, _):
        await link.lease("L1", site.gpus, OWNER)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: site.locks()[0] == 900)
        second = site.start_worker("--exit-with-daemon")
        # It has found the first one listening.
        assert b"another daemon is connected" in await asyncio.to_thread(log.readline)
        connecting = asyncio.create_task(site.connect(second.pid))
    link = await connecting
    assert (first.wait(LIMIT_S), second.poll()) == (0, None)
    assert link.welcome.pid == second.pid
    assert site.locks() == [None, None, None]
    await link.close()
    assert await asyncio.to_thread(second.wait, 20) == 0


def test_a_listener_in_another_pid_namespace_is_named_in_one_line(tmp_path: Path) -> None:
    """The kernel gives its pid as 0, for which there is no pidfd."""
    needs_namespaces("--pid", "--fork")
    program = (
        "import asyncio, sys; from pathlib import Path; from gpuenergyd.gpu.link.client import WorkerLink;"
        "asyncio.run(WorkerLink.connect(Path(sys.argv[1]), None, timeout_s=0.5, worker_pid=4711))"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "link.sock"))
        listener.listen(100)
        command = [sys.executable, "-I", "-c", program, str(tmp_path / "link.sock")]
        done = subprocess.run(
            ["unshare", "--pid", "--fork", *command], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    assert done.stderr.splitlines()[-1].endswith(
        "link.sock within 0.5 s: a process in another pid namespace still listens"
    )


def test_bad_command_line_is_one_clear_line(site: Site) -> None:
    worker = site.start_worker("--sample-period-s", "0")

    assert worker.wait(timeout=LIMIT_S) == 2
    assert worker.stderr is not None
    (line,) = worker.stderr.read().decode().splitlines()
    assert line.endswith(" gpuenergyd-worker: --sample-period-s 0.0 must be between 0.001 and 10")


def test_health_values_are_stable() -> None:
    values = {"ok", "degraded", "wedged", "lost", "unrestored", "unconfirmed", "observe_only", "released"}
    assert {h.value for h in GpuHealth} == values
