"""Restore policies and baselines, as applied by the worker, the restore command and the daemon."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpuenergyd.gpu.link.codec import decode, encode
from gpuenergyd.gpu.link.messages import Hello
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd.gpu.restore.executor import RestoreResult
from gpuenergyd.gpu.restore.journal import Control, Journal, JournalEntry, KnownBy
from gpuenergyd.gpu.restore.policy import RestorePolicy, RestoreRules
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.gpu.restore.test_journal import entry
from tests.support.daemon_process import DaemonProcess, training
from tests.support.waiting import wait_until
from tests.support.worker_site import OWNER, Site, request_clock, until

_TRIES = 8
KEEP = RestoreRules(RestorePolicy.KEEP)


@pytest.fixture
def journal(site: Site) -> Journal:
    return Journal(site.folder / "journal.json")


def _ours(site: Site, **changes: object) -> JournalEntry:
    """Return an entry for the first GPU whose owner is this living process."""
    mine = entry(site.gpus[0])
    return replace(
        mine,
        world_path=str(site.host.path),
        owner_pid=os.getpid(),
        owner_start_ticks=process_start_ticks(os.getpid()),
        **changes,  # type: ignore[arg-type]  # named where it is called
    )


def _limited(site: Site, policy: RestorePolicy) -> JournalEntry:
    return _ours(
        site,
        control=Control.POWER_LIMIT,
        saved_value=480.0,
        known_by=KnownBy.READ,
        intended_value=300.0,
        restore_policy=policy,
    )


def test_change_of_another_program_is_kept_and_reported(site: Site, journal: Journal) -> None:
    journal.add([_limited(site, RestorePolicy.ONLY_IF_OURS)])
    site.host.set_power_limit(site.gpus[0], 250.0)

    (outcome,) = restore(journal.path)

    assert outcome.result is RestoreResult.CHANGED_BY_OTHER
    assert "another program set the power limit to 250 W" in outcome.detail
    assert site.host.power_limit_w(site.gpus[0]) == 250.0


def test_policy_restore_also_restores_changes_of_other_programs(site: Site, journal: Journal) -> None:
    journal.add([_limited(site, RestorePolicy.RESTORE)])
    site.host.set_power_limit(site.gpus[0], 250.0)

    (outcome,) = restore(journal.path)

    assert outcome.result is RestoreResult.RESTORED
    assert site.host.power_limit_w(site.gpus[0]) == 480.0


def test_policy_keep_keeps_the_clock_of_a_running_job_unless_overridden(site: Site, journal: Journal) -> None:
    journal.add([_ours(site, restore_policy=RestorePolicy.KEEP)])
    site.host.lock_sm_clock(site.gpus[0], 900)

    (kept,) = restore(journal.path)
    kept_at = site.locks()[0]
    (restored,) = restore(journal.path, policy=RestorePolicy.ONLY_IF_OURS)

    assert (kept.result, kept_at) == (RestoreResult.KEPT, 900)
    assert f"pid {os.getpid()}) is still running" in kept.detail
    assert (restored.result, site.locks()[0]) == (RestoreResult.RESTORED, None)


def test_policy_keep_keeps_nothing_for_a_process_that_has_ended(site: Site, journal: Journal) -> None:
    journal.add([replace(_ours(site, restore_policy=RestorePolicy.KEEP), owner_start_ticks=1)])
    site.host.lock_sm_clock(site.gpus[0], 900)

    (outcome,) = restore(journal.path)

    assert (outcome.result, site.locks()[0]) == (RestoreResult.RESTORED, None)


def test_baseline_of_a_gpu_wins_over_that_of_its_model_and_is_rounded_down_to_a_supported_clock(site: Site) -> None:
    first, second = site.host.identities()
    rules = RestoreRules(baseline_sm_clock_mhz={first.gpu_uuid: 1201, first.model_name: 1005})

    assert (rules.baseline_of(first), rules.baseline_of(second)) == (1200, 1005)
    assert RestoreRules().baseline_of(first) is None
    assert decode(encode(Hello("", rules))) == (None, Hello("", rules))


async def test_worker_restores_the_configured_baseline(site: Site) -> None:
    site.start_worker()
    rules = RestoreRules(baseline_sm_clock_mhz={site.gpus[0]: 1305})
    async with site.linked(rules) as (link, _):
        await site.lower_all(link)
        await link.restore(site.gpus, "end")
        assert site.locks() == [1305, None]


async def test_policy_restore_removes_a_foreign_lock_only_at_the_end(site: Site) -> None:
    site.start_worker()
    async with site.linked(RestoreRules(RestorePolicy.RESTORE)) as (link, received):
        await link.lease("L1", site.gpus, OWNER)
        request_clock(link, site.gpus[0], 900)
        await until(lambda: site.locks()[0] == 900)
        site.host.lock_sm_clock(site.gpus[0], 1305)
        await until(lambda: bool(received.health_changes))
        assert "another program changed its clock lock" in received.health_changes[-1].detail
        assert site.locks()[0] == 1305
        await link.restore(site.gpus, "end")
        assert site.locks() == [None, None]


async def test_policy_keep_restores_clocks_when_the_next_daemon_connects(site: Site) -> None:
    """The next daemon measures its jobs at full speed."""
    site.start_worker()
    async with site.linked(KEEP) as (link, _):
        await site.lower_all(link)
        outcomes = await link.restore(site.gpus, "the daemon was stopped", is_daemon_ending=True)
        assert {o.result for o in outcomes} == {RestoreResult.KEPT}
    assert site.locks() == [900, 900]
    async with site.linked(KEEP):
        await until(lambda: site.locks() == [None, None])
        await until(lambda: site.journalled() == set())


def test_daemon_with_policy_keep_stops_without_changing_a_running_job(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, overrides={"restore_policy": "keep"}, kind=WorldKind.KIND).start()
    with training(daemon, arguments=("--policy", "uniform")):
        for _ in range(_TRIES):  # the job may be at full speed by itself as the daemon ends
            wait_until(daemon.is_lowered)
            assert daemon.stop() == 0
            was_kept = daemon.is_lowered()
            if was_kept:
                break
            daemon.start()
        outcomes = restore(daemon.journal_path)

    assert was_kept
    assert RestoreResult.KEPT in {o.result for o in outcomes}
    assert RestoreResult.FAILED not in {o.result for o in restore(daemon.journal_path)}
    assert daemon.is_as_found()
