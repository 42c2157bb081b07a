"""The carbon fetcher as a child of the core: the only process that asks the network, replaced when it dies.

It gets its configuration on standard input, an environment without anything of ours, and no way to gain privileges;
what it finds it writes into one file. As a unit of the service manager it is not started here.
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

from gpuenergyd.daemon.settings import Settings

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LAST_PAUSE_S = 600.0
_END_LIMIT_S = 2.0
_KEPT_VARIABLES = ("PATH", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "HTTPS_PROXY", "https_proxy", "NO_PROXY")
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)


def fetcher_configuration(settings: Settings) -> dict[str, Any]:
    """Return what the fetcher is told, as `carbon.fetcher` reads it."""
    given = {
        "zone": settings.carbon_zone,
        "out_path": str(settings.carbon_file_path),
        "source": settings.carbon_source,
        "key_path": str(settings.carbon_key_path) if settings.carbon_key_path is not None else None,
        "base_url": settings.carbon_base_url,
        "kind": settings.carbon_kind,
        "factor": settings.carbon_factor,
        "g_per_kwh": settings.carbon_fixed_g_per_kwh,
    }
    return {name: value for name, value in given.items() if value is not None}


class CarbonFetcher:
    """The one fetcher of this daemon, whichever process that is now."""

    def __init__(self, settings: Settings) -> None:
        self._configuration = json.dumps(fetcher_configuration(settings)).encode()
        self._process: asyncio.subprocess.Process | None = None
        self._supervision: asyncio.Task[None] | None = None
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """The fetcher's process id, None when there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        """Start the fetcher and keep one running."""
        self._supervision = asyncio.create_task(self._supervise(), name="carbon fetcher supervision")

    async def close(self) -> None:
        """End it."""
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
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                status: object = await self._run_once()
            except OSError as error:
                status = error.strerror
            log.warning("the carbon fetcher ended (%s); the next one starts in %g s", status, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            self.num_restarts += 1

    async def _run_once(self) -> int:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-m",
            "gpuenergyd.carbon.fetcher",
            stdin=asyncio.subprocess.PIPE,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            start_new_session=True,
            preexec_fn=_confine,
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(self._configuration)
            await process.stdin.drain()
        process.stdin.close()
        return await process.wait()


def _confine() -> None:
    """In the child: die with the core, and gain nothing by any program that is run."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
