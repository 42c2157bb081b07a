"""Defaults from the environment: socket, run key, rank and GPU of this process; name, options and length of the job.

All adapters use the same precedence: an argument of the program, else the environment (which `gpuenergyd run` sets from
its options), else the daemon's default.
"""

import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from numbers import Integral
from pathlib import Path

from gpuenergyd.core.policy_api.target import LARGE_SLOWDOWN_RATIO, MAX_SLOWDOWN_RATIO, slowdown_problem
from gpuenergyd.count_text import count_text
from gpuenergyd.log_lines import safe_logger

JOB_VARIABLE = "GPUENERGYD_JOB"
POLICY_VARIABLE = "GPUENERGYD_JOB_POLICY"
MAX_SLOWDOWN_VARIABLE = "GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO"
ITERATIONS_VARIABLE = "GPUENERGYD_JOB_ITERATIONS"
HOURS_VARIABLE = "GPUENERGYD_JOB_HOURS"
DEADLINE_VARIABLE = "GPUENERGYD_JOB_DEADLINE"
_MAX_TOKENS = 2**53
REORDER_VARIABLE = "GPUENERGYD_JOB_ALLOW_REORDER"
SYSTEM_SOCKET_PATH = "/run/gpuenergyd/gpuenergyd.sock"
_RUN_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_NUM_RESTARTS = re.compile(r"\btorchelastic_restart_count=\d+,?")
GPU_VARIABLE = "GPUENERGYD_GPU_UUID"
CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
_FULL_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A complete GPU UUID; CUDA also accepts any unique prefix of one."""
_LOCAL_RANK_VARIABLES = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_MAX_RUN_KEY_CHARS = 200
_LOOPBACK = ("localhost", "127.", "::1")

logger = safe_logger("gpuenergyd.client")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Name, policy and permitted slowdown of a job; None for the daemon's default."""

    job_name: str
    policy: str | None
    max_slowdown_ratio: float | None
    from_environment: tuple[str, ...]
    """Which of policy and max_slowdown_ratio the environment gave."""


def find_job_options(
    job_name: str | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> JobOptions:
    """Return a job's options, each from the argument or else the environment; the name defaults to the program's."""
    environ = os.environ if environ is None else environ
    named = None if job_name else environ.get(JOB_VARIABLE) or None
    named_policy = None if policy else environ.get(POLICY_VARIABLE) or None
    ratio = None if max_slowdown_ratio is not None else _max_slowdown(environ)
    found = {"policy": named_policy, "max_slowdown_ratio": ratio}
    return JobOptions(
        job_name=job_name or named or _program_name(),
        policy=policy or named_policy,
        max_slowdown_ratio=ratio if max_slowdown_ratio is None else max_slowdown_ratio,
        from_environment=tuple(name for name, value in found.items() if value is not None),
    )


def _max_slowdown(environ: Mapping[str, str]) -> float | None:
    text = environ.get(MAX_SLOWDOWN_VARIABLE)
    if not text:
        return None
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if slowdown_problem(ratio) is not None:
        valid = f"must be a ratio from 0 to {MAX_SLOWDOWN_RATIO:g}, e.g. 0.05 for 5 %"
        logger.warning("gpuenergyd: %s=%r is ignored: %s", MAX_SLOWDOWN_VARIABLE, text, valid)
        return None
    if ratio > LARGE_SLOWDOWN_RATIO:
        logger.warning(
            "gpuenergyd: %s=%r lets iterations take %g %% longer; 0.05 is 5 %%",
            MAX_SLOWDOWN_VARIABLE,
            text,
            100 * ratio,
        )
    return ratio


def find_num_tokens(num_tokens: object) -> int | None:
    """Return a program's number of tokens; None if it is none that the daemon takes.

    No tensor is converted, since that would wait for the device.
    """
    number = int(num_tokens) if isinstance(num_tokens, Integral) else 0
    return number if 0 < number < _MAX_TOKENS else None


def find_allow_reorder(allow_reorder: bool | None = None, environ: Mapping[str, str] | None = None) -> bool:  # noqa: FBT001  None, True or False as the program has it
    """Return whether plans may reorder instructions: the argument, else GPUENERGYD_JOB_ALLOW_REORDER, else False."""
    if allow_reorder is not None:
        return allow_reorder
    text = (os.environ if environ is None else environ).get(REORDER_VARIABLE, "")
    if text not in {"", "0", "1"}:
        logger.warning("gpuenergyd: %s=%r is ignored: must be 1, or 0 for no", REORDER_VARIABLE, text)
    return text == "1"


def _program_name() -> str:
    """Return the name of the program; an interpreter inside another program may have no arguments."""
    arguments = getattr(sys, "argv", None) or [""]
    return Path(arguments[0]).stem or "python"


def can_see(path: str | Path) -> bool:
    """Return whether a file exists in folders that this user may search; Path.exists() raises where one is closed."""
    return os.access(path, os.F_OK)


def find_socket_path(socket_path: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the daemon's socket: the argument, GPUENERGYD_SOCKET, the system socket, or the user's own socket.

    The path is absolute, so that it stays valid when the program changes its directory.
    """
    named = socket_path or environ.get("GPUENERGYD_SOCKET")
    if named:
        with suppress(FileNotFoundError):  # the program's directory has been removed
            named = str(Path(named).absolute())
        return named
    runtime_folder = environ.get("XDG_RUNTIME_DIR")
    if runtime_folder and not can_see(SYSTEM_SOCKET_PATH):
        users = f"{runtime_folder}/gpuenergyd/gpuenergyd.sock"
        if can_see(users):
            return users
    return SYSTEM_SOCKET_PATH


def find_run_key(run_key: str | None = None, *, num_processes: int = 1, environ: Mapping[str, str] = os.environ) -> str:
    """Return a key that differs between runs with the same name and is equal in all processes of a run.

    Without a launcher's variables it is the pid of a single process, or the parent's pid if there are several. Pids and
    loopback addresses can be the same in many containers, so the key includes the namespace in which they are valid.
    """
    if run_key:
        return run_key
    parts = [f"{name.lower()}={environ[name]}" for name in _RUN_VARIABLES if environ.get(name)]
    if not parts:
        process = f"pid={os.getpid()}" if num_processes == 1 else f"parent={os.getppid()}"
        return process + _namespace("pid")
    is_loopback = environ.get("MASTER_ADDR", "").startswith(_LOOPBACK)
    return ",".join(parts)[:_MAX_RUN_KEY_CHARS] + (_namespace("net") if is_loopback else "")


def _namespace(kind: str) -> str:
    """Return this process's namespace as a part of a run key; empty if it cannot be read."""
    try:
        return f",{kind}_namespace={Path(f'/proc/self/ns/{kind}').stat().st_ino}"
    except OSError:
        return ""


def without_restarts(run_key: str) -> str:
    """Return a run key without the launcher's number of restarts, which may differ between the hosts of a run."""
    return _NUM_RESTARTS.sub("", run_key).strip(",")


def has_other_hosts(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the training has processes on other hosts, by the launcher's LOCAL_WORLD_SIZE and WORLD_SIZE."""
    here, everywhere = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("WORLD_SIZE", "")
    return here.isdecimal() and everywhere.isdecimal() and int(everywhere) > int(here)


def find_gpu_uuid(
    gpu_uuid: str | None = None, *, device: object = None, environ: Mapping[str, str] | None = None
) -> str | None:
    """Return the UUID of this process's GPU: the argument, GPUENERGYD_GPU_UUID, or the CUDA device that torch uses.

    GPUENERGYD_GPU_UUID may be a comma-separated list, indexed by the rank of this process on its host.
    This imports and initializes nothing, so the result is None if torch has not used a GPU yet. Without torch,
    CUDA_VISIBLE_DEVICES is used. If it shows GPUs but does not name exactly one, the result is empty, and the daemon
    asks the driver.
    """
    environ = os.environ if environ is None else environ
    named = gpu_uuid or _gpu_of_list(environ)[0]
    if named:
        return named
    torch = sys.modules.get("torch")
    if torch is None:
        return _visible_gpu(environ)
    try:
        if not torch.cuda.is_initialized():
            return None
        properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
        uuid = str(properties.uuid)
    except Exception:  # noqa: BLE001  torch may raise anything; it must not reach training
        return None
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _visible_gpu(environ: Mapping[str, str]) -> str | None:
    """Return the only GPU visible to CUDA here; empty if there are several or one is named by index, None if none.

    An index counts only this container's GPUs, in CUDA's order, so the daemon cannot use it.
    """
    visible = [entry.strip() for entry in environ.get(CUDA_VARIABLE, "").split(",")]
    if not (visible[0].isdecimal() or visible[0].startswith(("GPU-", "MIG-"))):
        return None  # CUDA ignores everything after an entry that it cannot parse
    return visible[0] if len(visible) == 1 and _FULL_UUID.fullmatch(visible[0]) else ""


def missing_gpu_reason(environ: Mapping[str, str] | None = None) -> str:
    """Return why `find_gpu_uuid` finds no GPU, and what to set."""
    return _gpu_of_list(os.environ if environ is None else environ)[1]


def _gpu_of_list(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return this process's entry of GPUENERGYD_GPU_UUID; else None and the reason."""
    listed = [uuid.strip() for uuid in environ.get(GPU_VARIABLE, "").split(",")]
    if len(listed) == 1:
        missing = f"no gpu_uuid argument, {GPU_VARIABLE} not set, CUDA not in use by this process"
        return (listed[0], "") if listed[0] else (None, missing)
    named = f"{GPU_VARIABLE} lists {count_text(len(listed), 'GPU')}"
    index, origin = _local_rank(environ, len(listed))
    if index is None:
        return None, f"{named}, but this process's local rank is unknown: set LOCAL_RANK, as torchrun does"
    if index >= len(listed):
        return None, f"{named}, but {origin} is {index}"
    return (listed[index], "") if listed[index] else (None, f"{named}, and entry {index} ({origin}) is empty")


def _local_rank(environ: Mapping[str, str], num_gpus: int) -> tuple[int | None, str]:
    """Return the rank of this process on its host, None if unknown, and the variable or library that gives it."""
    if _is_decimal(environ, "LOCAL_RANK"):
        return int(environ["LOCAL_RANK"]), "LOCAL_RANK"
    if (found := _distributed_rank()) is not None:
        # If there are more processes than GPUs, they may be on several hosts, and the global rank is not an index.
        return found[0] if found[1] <= num_gpus else None, "the rank in torch.distributed"
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return None, ""  # the variables below would be the parent's
    for name in _LOCAL_RANK_VARIABLES:
        if _is_decimal(environ, name):
            return int(environ[name]), name
    if _is_decimal(environ, "RANK", "WORLD_SIZE") and int(environ["WORLD_SIZE"]) <= num_gpus:
        return int(environ["RANK"]), "RANK"
    return (0, "a single process") if environ.get("WORLD_SIZE", "1") == "1" else (None, "")


def _is_decimal(environ: Mapping[str, str], *names: str) -> bool:
    return all(environ.get(name, "").isdecimal() for name in names)


def find_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return rank and number of processes in torch.distributed, else from the launcher's variables, else (0, 1).

    Processes that the program starts itself often have no such variables, or those of their parent.
    """
    if (found := _distributed_rank()) is not None:
        return found
    try:
        rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, world_size) if 0 <= rank < world_size else (0, 1)


def find_world_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of processes of the training on all hosts; None without torch.distributed or a launcher."""
    if (found := _distributed_rank()) is not None:
        return found[1]
    return int(environ["WORLD_SIZE"]) if _is_decimal(environ, "WORLD_SIZE") else None


def _distributed_rank() -> tuple[int, int] | None:
    """Return this process's rank and the number of processes in torch.distributed; None if it is not initialized."""
    distributed = sys.modules.get("torch.distributed")
    with suppress(Exception):  # torch may raise anything; it must not reach training
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
    return None


@dataclass(frozen=True, slots=True)
class JobLengthVariables:
    """Length of the job from the environment: iterations, hours at full speed, deadline in UTC; None if not set."""

    iterations: int | None = None
    hours: float | None = None
    deadline: str | None = None


def find_job_length(environ: Mapping[str, str] | None = None) -> JobLengthVariables:
    """Return the job's length from the environment; invalid values are treated as not set."""
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
