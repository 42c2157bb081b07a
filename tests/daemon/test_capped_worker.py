"""Ceilings: for every holder of a lease nothing above the ceiling reaches the driver, and all is restored."""

import asyncio

import pytest

from gpuenergyd.core.clock_request import Ceiling, ClockRequest, TimedClock
from gpuenergyd.daemon.capped_worker import CappedWorker
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link.messages import (
    CEILING_LEASE,
    AcquireLease,
    LeaseOwner,
    LowerPowerLimit,
    PowerLimit,
    Restore,
    SetPowerLimit,
)
from gpuenergyd.gpu.restore.executor import RestoreResult
from tests.support.job_stage import DEFAULT_LIMIT_W, FakeWorker, Stage

JOB = LeaseOwner("job-1", 1, 1)
LOW = Ceiling(900, 250.0)


def _capped(*, may_set_clocks: bool = True) -> tuple[CappedWorker, FakeWorker]:
    worker = FakeWorker()
    return CappedWorker(worker, Stage().gpus, may_set_clocks=may_set_clocks), worker


async def test_a_free_gpu_is_leased_lowered_and_restored() -> None:
    capped, worker = _capped()
    capped.set_ceilings({"GPU-0": LOW})
    await capped.settled()
    assert worker.owner is not None
    assert worker.owner.job_id == CEILING_LEASE
    assert worker.requested_clocks == [("GPU-0", 900, 0)]
    assert worker.power_limits == [("GPU-0", 250.0)]
    capped.set_ceilings({})
    await capped.settled()
    assert worker.calls == [("lease", ("GPU-0",)), ("restore", ("GPU-0",))]


async def test_requests_of_a_job_are_capped_and_come_back_without_the_ceiling() -> None:
    capped, worker = _capped()
    await capped.do(AcquireLease("job-1", ("GPU-0",), JOB))
    capped.set_ceilings({"GPU-0": LOW})
    await capped.settled()
    capped.request_clock("GPU-0", ClockRequest(1200, 1, later=(TimedClock(1410, 10**18), TimedClock(600, 2 * 10**18))))
    assert worker.requested_clocks[-1] == ("GPU-0", 900, 900)
    assert worker.timetables[-1] == (900, 600)
    assert await capped.do(LowerPowerLimit("job-1", "GPU-0", 300.0, JOB)) == PowerLimit(250.0)
    assert await capped.do(LowerPowerLimit("job-1", "GPU-0", 200.0, JOB)) == PowerLimit(200.0)
    capped.set_ceilings({})
    await capped.settled()
    assert worker.requested_clocks[-1] == ("GPU-0", 1200, 1410)
    assert worker.power_limits[-1] == ("GPU-0", 200.0)
    assert ("restore", ("GPU-0",)) not in worker.calls


async def test_a_job_takes_a_lowered_gpu_over_and_a_restore_lowers_it_again() -> None:
    capped, worker = _capped()
    capped.set_ceilings({"GPU-0": LOW})
    await capped.settled()
    await capped.do(AcquireLease("job-1", ("GPU-0",), JOB))
    await capped.settled()
    assert worker.power_limits[-1] == ("GPU-0", 250.0)
    await capped.do(Restore(("GPU-0",), "the job has ended"))
    await capped.settled()
    assert worker.calls[-1] == ("lease", ("GPU-0",))
    assert worker.requested_clocks[-1] == ("GPU-0", 900, 0)
    assert worker.owner is not None
    assert worker.owner.job_id == CEILING_LEASE


async def test_a_new_worker_gets_all_ceilings_again() -> None:
    capped, worker = _capped()
    capped.set_ceilings({"GPU-0": LOW, "GPU-1": Ceiling(None, 300.0)})
    await capped.settled()
    worker.calls.clear()
    capped.handle_worker_ready()
    await capped.settled()
    assert worker.calls == [("lease", ("GPU-0",)), ("lease", ("GPU-1",))]


async def test_without_the_right_to_set_clocks_only_limits_are_lowered() -> None:
    capped, worker = _capped(may_set_clocks=False)
    capped.set_ceilings({"GPU-0": LOW})
    await capped.settled()
    assert worker.requested_clocks == []
    assert worker.power_limits == [("GPU-0", 250.0)]
    assert worker.sets_clocks is False


async def test_a_refusal_is_reported_and_the_next_success_clears_it() -> None:
    capped, worker = _capped()
    worker.refusal = "GPU-0 is leased to job-9"
    capped.set_ceilings({"GPU-0": LOW})
    await capped.settled()
    assert capped.trouble is not None
    assert "GPU-0 is leased to job-9" in capped.trouble
    worker.refusal = None
    capped.set_ceilings({"GPU-0": Ceiling(600, None)})
    await capped.settled()
    assert capped.trouble is None


async def test_a_lease_that_the_worker_has_ended_is_replaced() -> None:
    class Forgetful(FakeWorker):
        async def lower_power_limit(
            self, lease_id: str, gpu_uuid: str, power_limit_w: float | None, owner: LeaseOwner
        ) -> float:
            assert owner.job_id == lease_id
            if lease_id != CEILING_LEASE:
                raise GpuError("the lease has ended: its process died")
            self.power_limits.append((gpu_uuid, power_limit_w))
            return DEFAULT_LIMIT_W if power_limit_w is None else power_limit_w

    worker = Forgetful()
    capped = CappedWorker(worker, Stage().gpus)
    capped.adopt(("GPU-0",), "job-1", JOB)
    capped.set_ceilings({"GPU-0": LOW})
    await capped.settled()
    assert capped.trouble is None
    assert worker.power_limits == [("GPU-0", 250.0)]


async def test_a_ceiling_that_goes_while_a_job_takes_the_gpu_over_is_lifted() -> None:
    worker = FakeWorker()
    capped = CappedWorker(worker, Stage().gpus)
    capped.set_ceilings({"GPU-0": LOW})
    await capped.settled()
    worker.may_lease = asyncio.Event()
    leasing = asyncio.create_task(capped.do(AcquireLease("job-1", ("GPU-0",), JOB)))
    await asyncio.sleep(0)  # the worker has got the request and has not replied
    capped.set_ceilings({})
    await asyncio.sleep(0)
    worker.may_lease.set()
    await leasing
    await capped.settled()
    assert capped.trouble is None
    assert worker.power_limits[-1] == ("GPU-0", None)
    assert worker.requested_clocks[-1][1] == Stage().gpus["GPU-0"].max_sm_clock_mhz


async def test_a_limit_that_could_not_be_lifted_is_lifted_at_the_next_try() -> None:
    capped, worker = _capped()
    await capped.do(AcquireLease("job-1", ("GPU-0",), JOB))
    capped.set_ceilings({"GPU-0": LOW})
    await capped.settled()
    worker.limit_refusal = "the driver is busy"
    capped.set_ceilings({})
    await capped.settled()
    troubles = [capped.trouble]
    for refusal in ("the driver is still busy", None):
        worker.limit_refusal = refusal
        await capped.retry()
        await capped.settled()
        troubles.append(capped.trouble)
    assert [str(trouble).rpartition(": ")[2] for trouble in troubles] == [
        *("the driver is busy", "the driver is still busy", "None")
    ]
    assert [limit_w for _, limit_w in worker.power_limits] == [250.0, None]


async def test_a_request_capped_before_the_ceiling_was_set_is_free_again_once_it_is_gone() -> None:
    capped, worker = _capped()
    await capped.do(AcquireLease("job-1", ("GPU-0",), JOB))
    capped.set_ceilings({"GPU-0": LOW})
    assert await capped.do(LowerPowerLimit("job-1", "GPU-0", 300.0, JOB)) == PowerLimit(250.0)
    capped.set_ceilings({})
    await capped.settled()
    assert worker.power_limits[-1] == ("GPU-0", 300.0)


async def test_administrators_stay_below_the_ceiling() -> None:
    capped, worker = _capped()
    await capped.do(AcquireLease("administrator-1", ("GPU-0",), LeaseOwner("administrator-1", 1, 0)))
    capped.set_ceilings({"GPU-0": Ceiling(None, 250.0)})
    await capped.settled()
    owner = LeaseOwner("administrator-1", 1, 0)
    assert await capped.do(SetPowerLimit("administrator-1", "GPU-0", 380.0, owner)) == PowerLimit(250.0)
    assert worker.power_limits[-1] == ("GPU-0", 250.0)


async def test_an_idle_clock_is_below_a_ceiling_and_gives_way_to_any_lease() -> None:
    capped, worker = _capped()
    capped.set_idle_clock("GPU-0", 600)
    capped.set_ceilings({"GPU-0": Ceiling(900, None)})
    await capped.settled()
    assert worker.requested_clocks[-1] == ("GPU-0", 600, 0)
    worker.calls.clear()
    await capped.do(AcquireLease("job-1", ("GPU-0",), JOB, sets_clocks=False))
    assert worker.requested_clocks[-1] == ("GPU-0", 900, 0)
    assert not capped.idle_clocks
    assert worker.calls == [("lease", ("GPU-0",))]


async def test_an_idle_gpu_is_restored_before_a_lease_that_sets_no_clocks() -> None:
    capped, worker = _capped()
    capped.set_idle_clock("GPU-0", 600)
    await capped.settled()
    await capped.do(AcquireLease("job-1", ("GPU-0",), JOB, sets_clocks=False))
    assert worker.calls == [("lease", ("GPU-0",)), ("restore", ("GPU-0",)), ("lease", ("GPU-0",))]


async def test_a_lease_restores_a_gpu_whose_lift_has_failed() -> None:
    capped, worker = _capped()
    capped.set_idle_clock("GPU-0", 600)
    await capped.settled()
    worker.restore_refusal = "the driver is busy"
    capped.set_idle_clock("GPU-0", None)
    await capped.settled()
    worker.restore_refusal = None
    await capped.do(AcquireLease("job-1", ("GPU-0",), JOB, sets_clocks=False))
    assert worker.calls == [("lease", ("GPU-0",)), ("restore", ("GPU-0",)), ("lease", ("GPU-0",))]


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "failed"])
async def test_an_idle_gpu_that_could_not_be_restored_for_a_lease_is_restored_at_the_next_try(
    *, is_refused: bool
) -> None:
    capped, worker = _capped()
    capped.set_idle_clock("GPU-0", 600)
    await capped.settled()
    worker.restore_refusal = "the driver is busy" if is_refused else None
    worker.restore_result = RestoreResult.FAILED
    with pytest.raises(GpuError, match=r"the driver is busy|sm_clock_lock is not restored: clock lock removed"):
        await capped.do(AcquireLease("job-1", ("GPU-0",), JOB))
    assert capped.trouble is not None
    assert ("lease", ("GPU-0",)) not in worker.calls[1:]
    worker.restore_refusal, worker.restore_result = None, RestoreResult.RESTORED
    await capped.retry()
    await capped.settled()
    assert worker.calls[-1] == ("restore", ("GPU-0",))
    assert capped.trouble is None


async def test_an_idle_gpu_is_lifted_while_the_driver_hangs_for_another() -> None:
    capped, worker = _capped()
    capped.set_idle_clock("GPU-0", 600)
    await capped.settled()
    worker.may_lease = asyncio.Event()
    capped.set_idle_clock("GPU-1", 600)
    await asyncio.sleep(0)
    capped.set_idle_clock("GPU-0", None)
    for _ in range(20):
        await asyncio.sleep(0)
    assert ("restore", ("GPU-0",)) in worker.calls
    worker.may_lease.set()
    await capped.settled()
    assert capped.idle_clocks == {"GPU-1": 600}


async def test_a_new_worker_finds_no_gpu_idle() -> None:
    capped, worker = _capped()
    capped.set_idle_clock("GPU-0", 600)
    await capped.settled()
    worker.calls.clear()
    capped.handle_worker_ready()
    await capped.settled()
    assert not capped.idle_clocks
    assert worker.calls == []
