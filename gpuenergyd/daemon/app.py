"""Composition root of the daemon: starts all components in order, supervises them, and restores GPUs on stop.

Longer than 400 lines, since only this module knows all services: it builds, starts, hands over and stops them.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from socket import SOCK_SEQPACKET, SOCK_STREAM, gethostname
from typing import assert_never

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.api.clock_socket import ClockSocket
from gpuenergyd.daemon.api.server import ManualChanges, Server, UserLimits
from gpuenergyd.daemon.api.status import daemon_status, job_detail
from gpuenergyd.daemon.capped_worker import CappedWorker
from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.gpus.host_energy import HostEnergy
from gpuenergyd.daemon.gpus.inventory import Gpus, utc_at
from gpuenergyd.daemon.gpus.proof_of_use import ProofOfUse
from gpuenergyd.daemon.gpus.switching_file import SwitchingFile
from gpuenergyd.daemon.handover.file import consume_hand_over, write_hand_over
from gpuenergyd.daemon.handover.jobs import hand_over_jobs, take_over_job
from gpuenergyd.daemon.host_services import HostParts, HostService, check_services, host_services
from gpuenergyd.daemon.jobs.operators import JobFits, Operators, OrderFile
from gpuenergyd.daemon.jobs.past_jobs import PastJobStore
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.jobs.replicas import TimeAccounts
from gpuenergyd.daemon.manual_leases.leases import ManualLeases
from gpuenergyd.daemon.manual_leases.releases import GpuReleases
from gpuenergyd.daemon.periodic import Periodic
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.daemon.processes.gpu_worker import GpuWorker, WorkerEvent, WorkerReady
from gpuenergyd.daemon.processes.launch import StartChild, process_launchers
from gpuenergyd.daemon.processes.plugins import PolicyNames, check_policy_name, is_shipped, with_default_options
from gpuenergyd.daemon.processes.policy_client import PolicyClient
from gpuenergyd.daemon.runtime.listening import InstanceLock, open_listener
from gpuenergyd.daemon.runtime.log_rate_limit import LogRateLimit
from gpuenergyd.daemon.runtime.process_tuning import limit_malloc_to_one_arena, shorten_event_loop_pauses
from gpuenergyd.daemon.runtime.sleep_watch import SleepWatch
from gpuenergyd.daemon.settings import SIMULATED, Processes, Settings
from gpuenergyd.errors import GpuEnergyError, GpuError, UnknownPolicyError
from gpuenergyd.gpu.link.client import WorkerLost
from gpuenergyd.gpu.link.messages import (
    ClockChangeReport,
    GpuHealthChange,
    GpuSettingsRead,
    HandOver,
    ListProcesses,
    Restore,
    Samples,
)
from gpuenergyd.log_lines import configure_logging
from gpuenergyd.service_manager import Watchdog, notify
from gpuenergyd.store import HistoryWriter, WriterOptions, WriterStatus
from gpuenergyd.store.maintenance.retention import Retention

log = logging.getLogger("gpuenergyd")

_SUPERVISION_PERIOD_S = 0.5
_OBSERVATION_LIMIT_S = 1.0
_FLUSH_LIMIT_S = 5.0
_SWITCHING_PERIOD_S = 60.0
_ACCOUNTS_PERIOD_S = 2.0
_TOKEN_BYTES = 32
_PLUGINS_ARE_ROOT = (
    "started by root, so policies and other plugins run as root, too; `gpuenergyd install` sets up services in which"
    " they have no rights"
)


class Daemon:
    """The daemon process and its components."""

    def __init__(
        self,
        settings: Settings,
        *,
        start_child: StartChild = asyncio.create_subprocess_exec,
        host_energy: HostEnergy | None = None,
    ) -> None:
        self.settings = settings
        self.started_mono_s = time.monotonic()
        self._switching_file = SwitchingFile(settings.switch_latencies_path)
        host = f"{settings.host_name or gethostname()}:{settings.socket_path}"
        self.gpus = Gpus(self._switching_file.read(), host=host, host_power_w=settings.carbon_host_power_w)
        self.gpus.measured = self._switching_file.measured_gpus
        start = process_launchers(settings, start_child)
        self.worker = GpuWorker(settings, start.worker, self._handle)
        self.policy = PolicyClient(start.policy_host)
        capped = CappedWorker(self.worker, self.gpus, may_set_clocks=Lever.CLOCKS in settings.levers)
        self._capped_worker = capped
        self._history = HistoryWriter(
            settings.database_url,
            WriterOptions(
                host=settings.host_name,
                server_batch_s=settings.database_batch_s,
                reserve_bytes=settings.history_reserve_bytes,
                retention=Retention(
                    samples=timedelta(hours=settings.history_samples_kept_hours),
                    seconds=timedelta(days=settings.history_seconds_kept_days),
                    minutes=timedelta(days=settings.history_minutes_kept_days),
                    timelines=timedelta(days=settings.history_timelines_kept_days),
                    max_bytes=settings.history_max_bytes,
                ),
            ),
        )
        past_jobs = PastJobStore(settings.database_url, self._history)
        self.jobs = Jobs(
            services=JobServices(
                worker=capped,
                policy=self.policy,
                history=self._history,
                gpus=self.gpus,
                observation_limit_s=_OBSERVATION_LIMIT_S + 3 * settings.sample_period_s,
                is_observing=settings.is_observing,
                levers=frozenset(settings.levers),
                past_jobs=past_jobs,
            ),
            rules=JobRules(
                warmup_iterations=settings.warmup_iterations, baseline_iterations=settings.baseline_iterations
            ),
            default_policy=settings.policy,
            default_max_slowdown_ratio=settings.default_budget_ratio,
            policies=PolicyNames(),
            clock_socket_path=str(settings.clock_socket_path),
            max_ranks_per_user=settings.max_ranks_per_user,
            max_jobs_per_user_per_h=settings.max_jobs_per_user_per_h,
            silence_limit_s=settings.silence_limit_s,
            policy_options=settings.policy_options,
            accounts=TimeAccounts(settings.time_accounts_path),
        )
        self._operators = Operators(self.jobs, self.policy.check, OrderFile(settings.operator_orders_path))
        self.leases = ManualLeases(capped, self.gpus, self._history)
        self.releases = GpuReleases(self.worker, self.gpus, self._history, self.jobs.spawn)
        parts = HostParts(
            settings,
            self.gpus,
            self.jobs,
            capped,
            self.policy.divide_power,
            self._history,
            self.policy.next_target,
            start.policy_host,
        )
        self.services: Mapping[str, HostService] = {name: service(parts) for name, service in host_services().items()}
        self._server = Server(
            self.jobs,
            ManualChanges(self.worker, self.leases, self.releases),
            self._operators,
            JobFits(self.jobs, self.policy.fitted),
            status=lambda: daemon_status(self),
            job_detail=lambda job_id: job_detail(self, job_id),
            past_jobs=past_jobs,
            proof_of_use=ProofOfUse(_access_rules(settings), self._pids_on),
            host_services=self.services,
            limits=UserLimits(settings.max_connections_per_user, settings.max_requests_per_user_per_s),
        )
        self.host_energy = host_energy or HostEnergy()
        self._clock_socket: ClockSocket | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._periodic = Periodic()

    async def _pids_on(self, gpu_uuid: str) -> tuple[int, ...]:
        return (await self.worker.do(ListProcesses(gpu_uuid))).pids

    def history_status(self) -> WriterStatus:
        return self._history.status()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then restore all GPUs or hand the jobs over.

        Raises:
            UnknownPolicyError: the default policy is a plugin that cannot be imported.
            GpuEnergyError: a socket cannot be created.
        """
        settings = self.settings
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        # Open both sockets first, so that an early client waits in the queue instead of being refused.
        clock_listener = open_listener(settings.clock_socket_path, SOCK_SEQPACKET, group=settings.socket_group)
        listener = open_listener(settings.socket_path, SOCK_STREAM, group=settings.socket_group)
        try:
            self._history.start()
            self._loading = asyncio.create_task(self._load_policy(), name="start the policy host")
            await self._take_over()
            if not is_shipped(settings.policy) or settings.policy_options:
                await self._loading
            self._clock_socket = ClockSocket(
                clock_listener.socket,
                self.jobs.clock_requests,
                max_connections_per_user=settings.max_connections_per_user,
            )
            await self._server.start(listener.socket)
            for service in self.services.values():
                await service.start()
            self._periodic.every(_SWITCHING_PERIOD_S, "save switch latencies", self._save_switching)
            self._periodic.every(_ACCOUNTS_PERIOD_S, "save time accounts", self._save_accounts)
            self._periodic.start()
            self._supervision = asyncio.create_task(self._supervise(), name="supervise")
            log.info("serving on %s (pid in %s)", settings.socket_path, settings.lock_path)
            shorten_event_loop_pauses()
            notify("READY=1")
            await stop.wait()
            log.info("stopping")
        finally:
            notify("STOPPING=1")
            await self._stop()
            clock_listener.close()
            listener.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _load_policy(self) -> None:
        """Start the policy host, import the default policy if it is a plugin, and have policies check their options.

        Raises:
            UnknownPolicyError: the plugin is broken, or an option is invalid; without this check every job would run
                at full speed.
        """
        await self.policy.start()
        for name in self.settings.policy_options:
            full_name = with_default_options(name, self.settings.policy_options)
            if (error := await self.policy.check(full_name)) is not None:
                raise UnknownPolicyError(f"[policy.{name}]: {error}")
        policy = self.settings.policy
        if not is_shipped(policy) and (error := await self.policy.preload(policy)) is not None:
            raise UnknownPolicyError(f"policy {policy!r} is broken: {error}")

    async def _stop(self) -> None:
        self._operators.is_stopping = True
        for task in (self._supervision, self._loading):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._periodic.close()
        await self._server.close()
        if self._clock_socket is not None:
            self._clock_socket.close()
        await self._save_accounts()
        await self.leases.close("the daemon was stopped")
        for service in self.services.values():
            await service.close()
        await self._capped_worker.close()
        if not await self._hand_over():
            log.info("restoring all GPUs")
            self.worker.announce_shutdown()
            await self.jobs.close("the daemon was stopped")
        # When the link closes, the GPU worker restores what is left, such as GPUs of a job that did not end in time.
        await self.worker.close()
        await self._save_switching()
        await self.policy.close()
        await asyncio.to_thread(self._history.close, _FLUSH_LIMIT_S)

    async def _save_accounts(self) -> None:
        await self.jobs.accounts.save(self.jobs.with_targets())

    async def _save_switching(self) -> None:
        """Save the measured clock changes, and what `doctor --measure` found, for the next daemon."""
        measured, self._switching_file.measured_gpus = self.gpus.measured_switches(), self.gpus.measured
        await asyncio.to_thread(self._switching_file.save, measured)

    async def _hand_over(self) -> bool:
        """Hand the jobs over to the next daemon if the GPU worker keeps running; return whether that succeeded."""
        settings = self.settings
        if settings.processes is not Processes.UNITS or not settings.keep_on_restart_s or not list(self.jobs):
            return False
        token = secrets.token_hex(_TOKEN_BYTES)
        try:
            handed = await hand_over_jobs(self.jobs)
            write_hand_over(settings.hand_over_path, token, handed)
            await self.worker.do(HandOver(token, settings.keep_on_restart_s))
        except (GpuEnergyError, TypeError, ValueError) as error:
            log.warning("hand-over failed, the jobs end: %s", error)
            settings.hand_over_path.unlink(missing_ok=True)
            return False
        log.info(
            "handed over %s; the GPU worker keeps their leases for %g s",
            count_text(len(handed), "job"),
            settings.keep_on_restart_s,
        )
        return True

    async def _take_over(self) -> None:
        """Start the GPU worker, and continue the jobs that an earlier daemon handed over."""
        try:
            handed = consume_hand_over(self.settings.hand_over_path)
        except GpuEnergyError as error:
            log.warning("cannot continue the jobs of an earlier daemon: %s", error)
            handed = None
        await self.worker.start(handed.worker_token if handed is not None else "")
        for job in handed.jobs if handed is not None else ():
            try:
                take_over_job(self.jobs, job, holds_leases=self.worker.has_taken_over)
            except GpuEnergyError as error:
                log.warning("cannot continue job %s of an earlier daemon: %s", job.description.job_id, error)
        for runner in self.jobs:
            if runner.leases.are_held:
                self._capped_worker.adopt(runner.job.ranks.gpu_uuids, runner.job_id, runner.owner)
        if self.worker.has_taken_over:
            unclaimed = tuple(gpu.identity.gpu_uuid for gpu in self.gpus if gpu.claim is None)
            with contextlib.suppress(GpuError):
                await self.worker.do(Restore(unclaimed, "no job continued on it after the restart"))

    async def _supervise(self) -> None:
        """Check time limits about twice a second, and notify the service manager's watchdog.

        The watchdog is fed while this loop runs and the history writer's thread is alive, so that the service manager
        restarts a daemon that hangs. A hanging driver call blocks the GPU worker only, which supervises itself.
        """
        watchdog = Watchdog()
        asleep = SleepWatch()
        while True:
            try:
                if slept_s := asleep.slept_s():
                    log.warning("the host slept for %.0f s: every job falls back to full speed", slept_s)
                    self.jobs.host_slept(slept_s)
                self.jobs.check_time_limits()
                self.releases.check_time_limits()
                now_ns = time.monotonic_ns()
                for record in self.host_energy.records(now_ns, utc_at(now_ns)):
                    self._history.write(record)
            except Exception:
                log.exception("checking the jobs failed")
            if self._history.is_alive():
                watchdog.feed()
            await asyncio.sleep(min(_SUPERVISION_PERIOD_S, watchdog.period_s or _SUPERVISION_PERIOD_S))

    def _handle(self, event: WorkerEvent) -> None:
        """Pass an event of the GPU worker on to the components that it concerns."""
        match event:
            case WorkerReady():
                self.gpus.update(event.identities)
                self._capped_worker.handle_worker_ready()
                self.leases.handle_worker_ready()
                self.releases.handle_worker_ready()
            case Samples():
                self.jobs.handle_samples(event.samples)
                for service in self.services.values():
                    service.handle_samples(event.samples)
            case ClockChangeReport():
                self.jobs.handle_clock_change(event)
                self.leases.handle_clock_change(event)
            case GpuHealthChange():
                self.jobs.handle_gpu_health(event)
                self.leases.handle_gpu_health(event)
            case GpuSettingsRead():
                self.jobs.handle_gpu_settings(event)
            case WorkerLost():
                self.jobs.handle_worker_lost(event.reason)
            case _:
                assert_never(event)


def serve(
    settings: Settings,
    *,
    start_child: StartChild = asyncio.create_subprocess_exec,
    host_energy: HostEnergy | None = None,
) -> int:
    """Run the daemon in the foreground until a signal stops it; return its exit code.

    `start_child` starts its helper processes, and `host_energy` reads the energy of CPUs and memory.

    Raises:
        UnknownPolicyError: the default policy is not installed, or it is a plugin that cannot be imported.
        UsageError: a group or user of the settings does not exist.
        GpuEnergyError: another daemon runs in the same folder, or a socket cannot be created.
    """
    limit_malloc_to_one_arena()
    configure_logging("gpuenergyd", logging.INFO, LogRateLimit())
    if settings.mode_note is not None:
        log.warning("%s", settings.mode_note)
    if os.geteuid() == 0 and settings.processes is Processes.CHILDREN and settings.driver != SIMULATED:
        log.warning("%s", _PLUGINS_ARE_ROOT)
    check_policy_name(settings.policy)
    for name in settings.policy_options:
        check_policy_name(name)
    check_services(settings)
    _access_rules(settings)
    lock = InstanceLock(settings.lock_path).acquire()
    try:
        asyncio.run(Daemon(settings, start_child=start_child, host_energy=host_energy).run())
    finally:
        lock.release()
    return 0


def _access_rules(settings: Settings) -> AccessRules:
    return AccessRules.from_names(
        control_groups=settings.control_groups,
        control_users=settings.control_users,
        admin_groups=settings.admin_groups,
        requires_gpu_use=settings.requires_gpu_use,
    )
