"""Where the daemon, this run and this process's GPU are, from arguments, environment and loaded modules."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

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
    """Return the daemon's socket: as asked for, as GPUENERGYD_SOCKET says, the system's, else this user's own."""
    named = socket_path or environ.get("GPUENERGYD_SOCKET")
    if named:
        return named
    runtime_folder = environ.get("XDG_RUNTIME_DIR")
    if runtime_folder and not Path(SYSTEM_SOCKET_PATH).exists():
        users = f"{runtime_folder}/gpuenergyd/gpuenergyd.sock"
        if Path(users).exists():
            return users
    return SYSTEM_SOCKET_PATH


def find_run_key(run_key: str | None = None, *, num_processes: int = 1, environ: Mapping[str, str] = os.environ) -> str:
    """Return what tells this run from others of its name; all processes of one run find the same.

    Without a launcher's variables, a run of one process is known by its pid and one of several by their parent's.
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
    """Return the UUID of this process's GPU: as given, from GPUENERGYD_GPU_UUID, or from CUDA where torch uses it.

    GPUENERGYD_GPU_UUID may name several with commas between; LOCAL_RANK then says which of them is meant.
    Imports nothing and initialises nothing: None when torch is not loaded or has not touched a GPU yet.
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
    except Exception:  # noqa: BLE001  whatever a foreign module raises here, training must not see it
        return None
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _of_local_rank(uuids: str, environ: Mapping[str, str]) -> str | None:
    listed = [uuid.strip() for uuid in uuids.split(",")]
    if len(listed) == 1:
        return listed[0] or None
    local_rank = environ.get("LOCAL_RANK", "")
    return listed[int(local_rank)] if local_rank.isdecimal() and int(local_rank) < len(listed) else None


def find_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return this process's rank and the number of processes, as launchers export them; (0, 1) without a launcher."""
    try:
        rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, world_size) if 0 <= rank < world_size else (0, 1)
