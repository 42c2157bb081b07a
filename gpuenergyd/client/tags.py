"""Tags of a run: user, scheduler ids, number of ranks and git commit, from the environment and the program's folder.

Never starts a process, uses the network or raises; unreadable values are left out.
"""

import os
import string
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gpuenergyd.client.environment import find_world_size

MAX_TAGS = 32
MAX_NAME_CHARS = 64
MAX_VALUE_CHARS = 256
MAX_TAGS_BYTES = 4096

OWN_TAGS_VARIABLE = "GPUENERGYD_TAGS"
"""Variable with the user's own tags, e.g. `team=vision,experiment=a7`."""

_VARIABLES = {
    "SLURM_JOB_ID": "slurm_job_id",
    "SLURM_JOB_NAME": "slurm_job_name",
    "SLURM_JOB_ACCOUNT": "slurm_account",
    "SLURM_JOB_PARTITION": "slurm_partition",
    "SLURM_CLUSTER_NAME": "slurm_cluster",
    "SLURM_ARRAY_JOB_ID": "slurm_array_job_id",
    "SLURM_ARRAY_TASK_ID": "slurm_array_task_id",
    "PBS_JOBID": "pbs_job_id",
    "LSB_JOBID": "lsf_job_id",
    "FLUX_JOB_ID": "flux_job_id",
    "RAY_JOB_ID": "ray_job_id",
    "TORCHELASTIC_RUN_ID": "torchelastic_run_id",
    "POD_NAMESPACE": "kubernetes_namespace",
    "WANDB_RUN_ID": "wandb_run_id",
    "MLFLOW_RUN_ID": "mlflow_run_id",
}
_USER_VARIABLES = ("SLURM_JOB_USER", "USER", "LOGNAME")
_NAME_CHARS = frozenset(string.ascii_lowercase + string.digits + "_.-")
_MAX_PARENTS = 12
_MAX_FILE_BYTES = 4096
_MAX_PACKED_REFS_BYTES = 2**20
_COMMIT_DIGITS = (40, 64)


def find_tags(environ: Mapping[str, str] | None = None, program: str | None = None) -> tuple[tuple[str, str], ...]:
    """Return tags by name, the user's own first; `program` is the file of the training program.

    Names consist of lower-case letters, digits, `_`, `.` and `-`. Long values are cut. Tags beyond the maximum number,
    or beyond 4096 bytes in total, are dropped.
    """
    try:
        environ = os.environ if environ is None else environ
        program = getattr(sys.modules.get("__main__"), "__file__", None) if program is None else program
        found: dict[str, str] = {}
        for name, value in (*_own(environ), *_of_environment(environ), *_of_program(program)):
            text = "".join(c if c.isprintable() else " " for c in value).strip()[:MAX_VALUE_CHARS]
            if text and is_tag_name(name):
                found.setdefault(name, text)
        return tuple(_fitting(list(found.items())[:MAX_TAGS]))
    except Exception:  # noqa: BLE001  must not reach training
        return ()


def _fitting(tags: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    left_bytes = MAX_TAGS_BYTES
    for name, value in tags:
        size_bytes = len(name.encode()) + len(value.encode())
        if size_bytes <= left_bytes:
            left_bytes -= size_bytes
            yield name, value


def is_tag_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARS and _NAME_CHARS.issuperset(name)


def _own(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for part in environ.get(OWN_TAGS_VARIABLE, "").split(","):
        name, separator, value = part.partition("=")
        if separator:
            yield name.strip().lower(), value


def _of_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    user = next((environ[name] for name in _USER_VARIABLES if environ.get(name)), None)
    if user:
        yield "user", user
    for variable, name in _VARIABLES.items():
        if value := environ.get(variable):
            yield name, value
    if (world_size := find_world_size(environ)) is not None:
        yield "world_size", str(world_size)
    if environ.get("KUBERNETES_SERVICE_HOST") and (pod := environ.get("POD_NAME") or environ.get("HOSTNAME")):
        yield "kubernetes_pod", pod


def _of_program(program: str | None) -> Iterator[tuple[str, str]]:
    if not program:
        return
    path = Path(program)
    yield "program", path.name
    commit = find_git_commit(path)
    if commit is not None:
        yield "git_commit", commit


def find_git_commit(program: Path) -> str | None:
    """Return the checked-out commit of a file's git work tree; None if there is none or it is unreadable."""
    try:
        for folder in [*program.resolve().parents][:_MAX_PARENTS]:
            mark = folder / ".git"
            if mark.is_dir():
                return _head(mark)
            if mark.is_file():  # a linked work tree or a submodule
                where = _text(mark).removeprefix("gitdir:").strip()
                return _head(folder / where)
    except (OSError, ValueError):
        return None
    return None


def _head(git: Path) -> str | None:
    head = _text(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return _commit(head)
    name = head.removeprefix("ref:").strip()
    common = git / "commondir"
    folders = [git, git / _text(common).strip()] if common.is_file() else [git]
    for folder in folders:
        if (folder / name).is_file():
            return _commit(_text(folder / name).strip())
    for folder in folders:
        packed = folder / "packed-refs"
        if packed.is_file():
            for line in _text(packed, _MAX_PACKED_REFS_BYTES).splitlines():
                commit, _, ref = line.partition(" ")
                if ref == name:
                    return _commit(commit)
    return None


def _commit(text: str) -> str | None:
    return text if len(text) in _COMMIT_DIGITS and set(text) <= set("0123456789abcdef") else None


def _text(path: Path, max_bytes: int = _MAX_FILE_BYTES) -> str:
    with path.open("rb") as file:
        return file.read(max_bytes).decode("utf-8", "replace")
