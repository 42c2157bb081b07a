"""The carbon fetcher as a child process of the daemon: the only process with network access, restarted when it exits.

It gets its configuration on standard input, a minimal environment and no way to gain privileges, and writes its results
to one file. With `processes = "units"` it runs as a systemd unit instead, with this module as main program.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
from typing import Any

from gpuenergyd.daemon.settings import Processes, Settings, load_settings
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.log_lines import configure_logging

log = logging.getLogger(__name__)

_FETCHER = ("-I", "-m", "gpuenergyd_carbon.fetching.fetcher")
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 600.0
_MAX_REFUSAL_BYTES = 4096
_END_LIMIT_S = 2.0
_KEPT_VARIABLES = ("PATH", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "HTTPS_PROXY", "https_proxy", "NO_PROXY")
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)


def fetcher_configuration(settings: Settings) -> dict[str, Any]:
    """Return the fetcher's configuration, in the form that `gpuenergyd_carbon.fetching.fetcher` reads."""
    configuration = {
        "zone": settings.carbon_zone,
        "out_path": str(settings.carbon_file_path),
        "source": settings.carbon_source,
        "key_path": str(settings.carbon_key_path) if settings.carbon_key_path is not None else None,
        "base_url": settings.carbon_base_url,
        "kind": settings.carbon_kind,
        "factor": settings.carbon_factor,
        "g_per_kwh": settings.carbon_fixed_g_per_kwh,
    }
    return {name: value for name, value in configuration.items() if value is not None}


class CarbonFetcher:
    """The daemon's carbon fetcher across restarts of the process."""

    def __init__(self, settings: Settings) -> None:
        self._configuration = json.dumps(fetcher_configuration(settings)).encode()
        self._process: asyncio.subprocess.Process | None = None
        self._supervision: asyncio.Task[None] | None = None
        self.num_restarts = 0
        self.refusal: str | None = None
        """Why the fetcher does not accept its settings, such as an unknown zone; None if it does."""

    @property
    def pid(self) -> int | None:
        """The fetcher's process id, None while none runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        self._supervision = asyncio.create_task(self._supervise(), name="carbon fetcher supervision")

    async def close(self) -> None:
        """End the fetcher: SIGTERM, then SIGKILL after 2 s."""
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_LIMIT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _supervise(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            status: object
            try:
                status, refusal = await self._run_once()
            except OSError as error:
                status, refusal = error.strerror, ""
            if status == UsageError.exit_code and refusal:
                await self._wait_after_refusal(refusal)
                continue
            self.refusal = None
            log.warning("the carbon fetcher exited (status %s); restarting it in %g s", status, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
            self.num_restarts += 1

    async def _wait_after_refusal(self, refusal: str) -> None:
        """Log a refusal once, then wait long: only a change outside the daemon, for example of a key file, can help."""
        if refusal != self.refusal:
            log.error(
                "the carbon fetcher does not start: %s; correct the setting and restart the daemon, which tries again"
                " every %g min for changes of files",
                refusal,
                _MAX_DELAY_S / 60,
            )
        self.refusal = refusal
        await asyncio.sleep(_MAX_DELAY_S)

    async def _run_once(self) -> tuple[int, str]:
        """Run the fetcher until it exits; return its status, and why it refused its settings."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *_FETCHER,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            start_new_session=True,
            preexec_fn=_confine,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(self._configuration)
            await process.stdin.drain()
        process.stdin.close()
        refusal = await process.stdout.read(_MAX_REFUSAL_BYTES)
        return await process.wait(), " ".join(refusal.decode("utf-8", "replace").split())


def _confine() -> None:
    """In the child process: die with the daemon, and never gain privileges."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def main() -> int:
    """Execute the fetcher in its systemd unit, with the settings of the daemon; return only if it cannot run.

    Without a configured source the status is 0, and systemd starts the unit again only with the daemon.
    """
    configure_logging("gpuenergyd-carbon")
    try:
        settings = load_settings(processes=Processes.UNITS)
    except GpuEnergyError as error:
        log.error("%s", error)  # noqa: TRY400  one line that names the key, no traceback
        return error.exit_code
    if not settings.needs_carbon_fetcher:
        log.info("nothing to fetch: carbon_zone is not set")
        return 0
    reads, writes = os.pipe()
    os.write(writes, json.dumps(fetcher_configuration(settings)).encode())
    os.close(writes)
    os.dup2(reads, sys.stdin.fileno())
    return os.execv(sys.executable, (sys.executable, *_FETCHER))  # noqa: S606  our own interpreter and module


if __name__ == "__main__":
    sys.exit(main())
