"""Defaults from the environment: the daemon's socket, the run key, rank and GPU of this process, the job's length."""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ITERATIONS_VARIABLE = "GPUENERGYD_JOB_ITERATIONS"
HOURS_VARIABLE = "GPUENERGYD_JOB_HOURS"
DEADLINE_VARIABLE = "GPUENERGYD_JOB_DEADLINE"
SYSTEM_SOCKET_PATH = "/run/gpuenergyd/gpuenergyd.sock"
_RUN_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_MAX_RUN_KEY_CHARS = 200


def find_socket_path(socket_path: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the daemon's socket: the argument, GPUENERGYD_SOCKET, the system socket, or the user's own socket.

    The path is absolute, so that it still leads there when the program changes its directory.
    """
    named = socket_path or environ.get("GPUENERGYD_SOCKET")
    if named:
        return str(Path(named).absolute())
    runtime_folder = environ.get("XDG_RUNTIME_DIR")
    if runtime_folder and not Path(SYSTEM_SOCKET_PATH).exists():
        users = f"{runtime_folder}/gpuenergyd/gpuenergyd.sock"
        if Path(users).exists():
            return users
    return SYSTEM_SOCKET_PATH


def find_run_key(run_key: str | None = None, *, num_processes: int = 1, environ: Mapping[str, str] = os.environ) -> str:
    """Return a key that differs between runs of the same name and is equal in all processes of a run.

    Without a launcher's variables it is the pid of a single process, or the parent's pid of several.
    """
    if run_key:
        return run_key
    parts = [f"{name.lower()}={environ[name]}" for name in _RUN_VARIABLES if environ.get(name)]
    if not parts:
        return f"pid={os.getpid()}" if num_processes == 1 else f"parent={os.getppid()}"
    return ",".join(parts)[:_MAX_RUN_KEY_CHARS]


def find_gpu_uuid(
    gpu_uuid: str | None = None, *, device: object = None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return the UUID of this process's GPU: the argument, GPUENERGYD_GPU_UUID, or the CUDA device that torch uses.

    GPUENERGYD_GPU_UUID may be a comma-separated list, which LOCAL_RANK indexes.
    Imports and initialises nothing: None if torch is not loaded or has not used a GPU yet.
    """
    named = gpu_uuid or _of_local_rank(environ.get("GPUENERGYD_GPU_UUID", ""), environ)
    if named:
        return named
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
        uuid = str(properties.uuid)
    except Exception:  # noqa: BLE001  torch may raise anything; it must not reach training
        return None
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _of_local_rank(uuids: str, environ: Mapping[str, str]) -> str | None:
    listed = [uuid.strip() for uuid in uuids.split(",")]
    if len(listed) == 1:
        return listed[0] or None
    local_rank = environ.get("LOCAL_RANK", "")
    return listed[int(local_rank)] if local_rank.isdecimal() and int(local_rank) < len(listed) else None


def find_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return rank and number of processes from the launcher's variables; (0, 1) without a launcher."""
    try:
        rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, world_size) if 0 <= rank < world_size else (0, 1)


@dataclass(frozen=True, slots=True)
class JobLengthVariables:
    """Length of the job from the environment: iterations, hours at full speed, deadline in UTC; None if not set."""

    iterations: int | None = None
    hours: float | None = None
    deadline: str | None = None


def find_job_length(environ: Mapping[str, str] | None = None) -> JobLengthVariables:
    """Return the job's length from the environment; invalid values count as not set."""
    environ = os.environ if environ is None else environ
    iterations = _number(environ.get(ITERATIONS_VARIABLE))
    return JobLengthVariables(
        int(iterations) if iterations is not None and iterations >= 1 else None,
        _number(environ.get(HOURS_VARIABLE)),
        utc_text(environ.get(DEADLINE_VARIABLE)),
    )


def utc_text(text: str | None) -> str | None:
    """Return an ISO 8601 instant in UTC, None if invalid; without an offset it is in this host's time zone."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).isoformat() if text else None
    except (ValueError, OverflowError, OSError):
        return None


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
