"""Commands for past jobs: show them and the prior that policies derive from them, export, import and delete them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pwd import getpwuid
from typing import TYPE_CHECKING, Self

import typer

from gpuenergyd.cli.output import json_text, people_console, print_json
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.core.policy_api.past_jobs import PastJob, problem_of
from gpuenergyd.core.policy_api.prior_policy import PriorView
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.processes.plugins import load_policy
from gpuenergyd.errors import GpuEnergyError, ProtocolError, UsageError
from gpuenergyd.wire import MAX_ITERATION_REPORT_BYTES, MAX_REPLY_BYTES
from gpuenergyd.wire.daemon_codec import decode
from gpuenergyd.wire.operator_messages import FILE_FORMAT, MAX_IMPORTED, OwnedPastJob, PastJobFile, PastJobList

if TYPE_CHECKING:
    from rich.table import Table

_POLICY = "learning"
_PATH = "/v1/past-jobs"
_NAME_CHARS = 32
_MAX_REQUEST_BYTES = MAX_ITERATION_REPORT_BYTES - 1024
"""Size limit for the past jobs in one import request; the rest is for the text around them."""
_MAX_FILE_BYTES = 2 * MAX_REPLY_BYTES
"""Size limit of a file: enough for the longest list from the daemon, even if all characters of names are escaped."""


@dataclass(frozen=True, slots=True)
class PriorClient:
    """The operations of one command on past jobs, through the daemon."""

    daemon: DaemonClient
    is_for_all_users: bool
    as_json: bool

    @classmethod
    @contextmanager
    def open(cls, socket: str | None, *, is_for_all_users: bool, as_json: bool) -> Iterator[Self]:
        """Connect to the daemon."""
        with closing(DaemonClient(find_socket_path(socket))) as daemon:
            yield cls(daemon, is_for_all_users, as_json)

    def show(self) -> None:
        """Print the past jobs, and the prior of each GPU model that this host or a past job has."""
        owned = self._past_jobs()
        models = [gpu["model_name"] for gpu in self.daemon.get_status()["gpus"]]
        models += [past.job.learned.gpu_model_name for past in owned]
        views = _priors(list(dict.fromkeys(models)), [past.job for past in owned])
        if self.as_json:
            rows = [{"uid": past.uid, **asdict(past.job)} for past in owned]
            print_json({"priors": [asdict(view) for view in views], "past_jobs": rows})
            return
        console = people_console()
        for view in views:
            console.print(_prior_table(view))
        if not views:
            console.print("no GPU on this host and no past job")
        if owned:
            console.print(_jobs_table(owned))
        else:
            console.print(f"no past job: a job with the policy {_POLICY} leaves its curves once a plan has run")

    def export_to(self, path: Path) -> None:
        """Write past jobs to a file that must not exist yet."""
        jobs = [replace(past.job, gpu_uuids=()) for past in self._past_jobs()]
        if not jobs:
            raise GpuEnergyError("there is no past job to export")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json_text(PastJobFile(FILE_FORMAT, tuple(jobs))) + "\n")
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        self._report(len(jobs), f"exported to {path}; the file names the jobs, no users and no GPUs")

    def import_from(self, path: Path) -> None:
        """Send the past jobs of a file to the daemon, in as many requests as needed; none if any of them is invalid."""
        num_imported = 0
        for message in _requests(_read(path).past_jobs):
            num_imported += self.daemon.post(f"{_PATH}/import", message)["num_past_jobs"]
        self._report(num_imported, "imported for all users of this host")

    def forget(self) -> None:
        """Delete past jobs."""
        answer = self.daemon.post(f"{_PATH}/forget", {"is_for_all_users": self.is_for_all_users})
        self._report(answer["num_past_jobs"], "forgotten")

    def _past_jobs(self) -> tuple[OwnedPastJob, ...]:
        answer = self.daemon.get(f"{_PATH}/all" if self.is_for_all_users else _PATH)
        return decode(json.dumps(answer).encode(), PastJobList, max_bytes=_MAX_FILE_BYTES).past_jobs

    def _report(self, num_past_jobs: int, what: str) -> None:
        if self.as_json:
            print_json({"num_past_jobs": num_past_jobs})
            return
        typer.echo(f"{count_text(num_past_jobs, 'past job')} {what}")


def _read(path: Path) -> PastJobFile:
    try:
        with path.open("rb") as file:
            body = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    try:
        content = decode(body, PastJobFile, max_bytes=_MAX_FILE_BYTES)
    except ProtocolError as error:
        raise UsageError(f"{path}: no exported past jobs: {error}") from None
    if content.format != FILE_FORMAT:
        raise UsageError(f"{path}: format {content.format[:40]!r}; {FILE_FORMAT!r} is valid")
    for number, job in enumerate(content.past_jobs, start=1):
        if (problem := problem_of(job)) is not None:
            raise UsageError(f"{path}: past job {number}: {problem}")
    return content


def _requests(jobs: Sequence[PastJob]) -> Iterator[dict[str, object]]:
    """Yield import requests with the past jobs, each within the daemon's limits of number and size."""
    some: list[object] = []
    num_bytes = 0
    for job in jobs:
        text = json_text(job)  # ASCII
        size = len(text) + len(",")
        if some and (len(some) == MAX_IMPORTED or num_bytes + size > _MAX_REQUEST_BYTES):
            yield {"format": FILE_FORMAT, "past_jobs": some}
            some, num_bytes = [], 0
        some.append(json.loads(text))
        num_bytes += size
    yield {"format": FILE_FORMAT, "past_jobs": some}


def _priors(models: Sequence[str], jobs: Sequence[PastJob]) -> list[PriorView]:
    prior = getattr(load_policy(_POLICY), "prior", None)
    if prior is None:
        raise UsageError(f"the installed policy {_POLICY} does not show its prior")
    return [prior(model, [job for job in jobs if job.learned.gpu_model_name == model]) for model in models]


def _prior_table(view: PriorView) -> "Table":
    from rich import box  # noqa: PLC0415  start fast
    from rich.table import Table  # noqa: PLC0415

    basis = f"{view.basis}; {count_text(view.num_past_jobs, 'past job')}"
    table = Table(title=f"{view.gpu_model_name}: {basis}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("instruction")
    for heading in ("clock", "time", "power"):
        table.add_column(heading, justify="right")
    for curve in view.curves:
        for point in curve.points[1:]:
            table.add_row(
                str(curve.kind),
                f"{100 * point.clock_ratio:.0f} %",
                f"{100 * point.time_ratio:.1f} ± {100 * point.time_ratio * point.time_sigma_ratio:.1f} %",
                f"{100 * point.power_ratio:.0f} ± {100 * point.power_ratio * point.power_sigma_ratio:.0f} %",
            )
    return table


def _jobs_table(owned: Sequence[OwnedPastJob]) -> "Table":
    from rich import box  # noqa: PLC0415  start fast
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(title="past jobs", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("job", "user", "GPU model", "learned"):
        table.add_column(heading)
    for heading in ("stages", "power", "clocks tried"):
        table.add_column(heading, justify="right")
    for past in owned:
        learned = past.job.learned
        clocks = {point.sm_clock_mhz for curve in learned.curves for point in curve.points[1:]}
        table.add_row(
            Text(past.job.job_name[:_NAME_CHARS]),
            _user(past.uid),
            Text(learned.gpu_model_name),
            f"{past.job.learned_at:%Y-%m-%d}",
            str(learned.num_stages),
            f"{learned.power_w:.0f} W",
            str(len(clocks)),
        )
    return table


def _user(uid: int | None) -> str:
    if uid is None:
        return "imported"
    try:
        return getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
