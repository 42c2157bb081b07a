"""Shared by all tests: fixed hypothesis examples, the order of files, fault numbers in ids, a check for leaks."""

import asyncio
import gc
import inspect
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.closing import AT_END, close_all
from tests.support.examples import THOROUGH, USUAL
from tests.support.faults import fault_id
from tests.support.fork_server import SERVER
from tests.support.leaks import PendingTasks, leaked_since, open_resources
from tests.support.waiting import LIMIT_S

pytest_plugins = ["tests.support.forked_workers"]

# As in the policy host: threads of the linear algebra libraries cost CPU time and save none on such small matrices.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# Imports and test items are permanent: searching them for garbage takes a quarter of the collection's time.
gc.disable()

# Most daemons of the tests need neither seconds for imports nor others than the usual policies.
SERVER.has_policies = True

# A busy machine must not fail what is right: no deadlines, and the same examples each time.
settings.register_profile(
    "thorough",
    deadline=None,
    derandomize=True,
    max_examples=THOROUGH,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("tests", settings.get_profile("thorough"), max_examples=USUAL)
settings.load_profile("tests")

# A shell without job control starts what runs in the background with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST_FILES = (
    "trainers/test_frameworks.py", "daemon/test_whole_daemon.py", "systemd/test_real_systemd.py",
    "plugins/sim/demo/test_command.py", "policies/bubble_aware/test_control_loop.py",
    "plugins/carbon/test_targets.py", "plugins/carbon/policy/test_forecast.py", "plugins/prove/test_job_blocks.py",
    "plugins/formats/test_every_page.py", "plugins/idle/test_idle_daemon.py", "gpu/test_daemon_on_nvml.py",
    "benchmarks/test_host_bound.py", "gpu/worker/threads/test_kept_clocks.py",
    "policies/bubble_aware/test_loop_phases.py", "project/test_packaging.py",
    "policies/bubble_aware/test_reordering.py", "trainers/test_torch_pipelining.py",
    "gpu/restore/test_kill_matrix.py", "plugins/plan/test_running_job.py", "project/test_documents.py",
    "plugins/carbon/test_carbon_daemon.py", "tools/test_release.py",
    "plugins/across_hosts/ranks/test_torch_across_hosts.py", "gpu/worker/test_worker_faults.py",
    "plugins/command_driver/test_driver.py", "plugins/prove/test_training_blocks.py",
    "policies/bubble_aware/test_disturbances.py", "plugins/across_hosts/ranks/test_two_hosts.py",
    "plugins/across_hosts/host/test_training_budget.py", "store/writing/test_kills.py",
    "trainers/test_torch_reorder.py", "trainers/test_torch_schedules.py",
    "trainers/test_parallel_phases.py", "plugins/across_hosts/ranks/test_virtual_stragglers.py",
    "plugins/across_hosts/host/test_batch_ramp_up.py", "policies/bubble_aware/test_past_jobs.py",
    "gpu/test_demo_on_nvml.py",
)  # fmt: skip
"""Files that take more than 10 s, of the usual run and then of the thorough one, longest first: begun last, one of them
would keep one worker busy alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, then keep the order."""
    folder = Path(__file__).parent
    missing = [name for name in LONGEST_FILES if not (folder / name).exists()]
    if missing:
        raise pytest.UsageError(f"tests/conftest.py lists files that do not exist: {', '.join(missing)}")
    position = {folder / name: index for index, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: position.get(item.path, len(position)))
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Put the fault numbers of `@pytest.mark.fault(7, 12)` into the test's id: `test_...[F07+F12]`."""
    numbers = [n for marker in metafunc.definition.iter_markers("fault") for n in marker.args]
    if numbers:
        metafunc.fixturenames.append("_fault")
        metafunc.parametrize("_fault", [numbers], indirect=True, ids=["+".join(map(fault_id, sorted(numbers)))])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on an event loop of its own, and end it if it hangs."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            try:
                await test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters})
            finally:
                await close_all()

    asyncio.run(bounded())
    return True


@pytest.fixture
def _fault(request: pytest.FixtureRequest) -> list[int]:
    """Return the numbers of the faults that this test provokes."""
    numbers: list[int] = request.param
    return numbers


@pytest.fixture(autouse=True)
def _no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves a child process, a thread, a socket or a pending asyncio task behind."""
    AT_END.clear()
    pending = PendingTasks()
    run = asyncio.run

    def watched_run(main: Coroutine[Any, Any, Any], **options: Any) -> Any:
        return run(pending.watched(main), **options)

    monkeypatch.setattr(asyncio, "run", watched_run)
    before = open_resources()
    yield
    leaked = [*leaked_since(before), *pending.names]
    assert not leaked, f"this test leaked: {leaked}"
