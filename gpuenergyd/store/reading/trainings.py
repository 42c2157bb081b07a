"""Trainings: which jobs of a history are parts of one run of a program.

Each replica of a pipeline is a job of its own; in a pipeline across hosts each rank is one, in a plain loop each
process. All parts of a training have the same user, job name and run key, but a key is not unique to one training:

- Without an explicit run id, `torchrun` gives every run the same key, and so do programs that set MASTER_ADDR and
  MASTER_PORT. Jobs with one key are several trainings if the later ones begin after the end of the earlier ones, in
  other processes.
- `torchrun` counts restarts of its workers in the key, separately on each host; a restart continues the training.
- The key of a run on one host (a pid, or a loopback address) may also occur on other hosts.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

from gpuenergyd.store.reading.summaries import JobSummary
from gpuenergyd.store.records import RankRecord

_MEMBER = re.compile(r"pp(\d+)(?:\.(\d+))?,")
"""Prefix of the run key of a member of a pipeline across hosts: its stage and its index in the stage."""
_NUM_RESTARTS = re.compile(r"(?:^|,)torchelastic_restart_count=(\d+)")
_ON_ONE_HOST = re.compile(r"(?:^|,)(?:(?:pid|parent)=\d|master_addr=(?:localhost|127\.|::1))")
_COMPARED_CHARS = 180
"""Long keys are truncated; members' keys earlier, because of their prefix."""
_FOREVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class RunKey:
    """Information in the run key of a job."""

    name: str
    """Equal for all parts of a training."""
    stage: int | None
    """The stage of a member of a pipeline across hosts; None for other jobs."""
    stage_rank: int | None
    """Index of the member in its stage."""
    num_restarts: int
    is_on_one_host: bool
    """Whether the processes of the run are known to be on one host."""


def parse_run_key(text: str) -> RunKey:
    """Return the information in a run key; a key chosen by the user is only a name."""
    member = _MEMBER.match(text)
    name = text[member.end() :] if member else text
    restarts = _NUM_RESTARTS.search(name)
    return RunKey(
        name=_NUM_RESTARTS.sub("", name).lstrip(",")[:_COMPARED_CHARS],
        stage=int(member[1]) if member else None,
        stage_rank=int(member[2] or 0) if member else None,
        num_restarts=int(restarts[1]) if restarts else 0,
        is_on_one_host=_ON_ONE_HOST.search(name) is not None,
    )


@dataclass(frozen=True)
class TrainingPart:
    """One job of a training, with its ranks (values are cached, hence no slots)."""

    job: JobSummary
    ranks: tuple[RankRecord, ...]

    @cached_property
    def key(self) -> RunKey:
        return parse_run_key(self.job.run_key)

    @property
    def place(self) -> tuple[int, int | None, int | None]:
        """Position that no other part has at the same time: the replica and, in a pipeline across hosts, the member."""
        return self.job.dp_rank, self.key.stage, self.key.stage_rank

    @property
    def processes(self) -> frozenset[tuple[str | None, int]]:
        """Host and pid of each rank."""
        return frozenset((self.job.host, rank.pid) for rank in self.ranks)

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the whole training, as reported by its processes; None if not reported."""
        text = dict(self.job.tags).get("world_size", "")
        return int(text) if text.isdecimal() and 0 < len(text) < 10 else None

    def stage_of(self, gpu_uuid: str) -> int | None:
        """Return the pipeline stage of a GPU; None if no rank is known to use it."""
        if self.key.stage is not None:
            return self.key.stage
        return next((rank.pp_rank for rank in self.ranks if rank.gpu_uuid == gpu_uuid), None)


@dataclass(frozen=True)
class Training:
    """All jobs of one training in the history, in order of their start; there is at least one."""

    parts: tuple[TrainingPart, ...]

    @property
    def job_name(self) -> str:
        return self.parts[0].job.job_name

    @property
    def started_at(self) -> datetime:
        """The start of the first part."""
        return self.parts[0].job.started_at

    @property
    def ended_at(self) -> datetime | None:
        """The end of the last part; None while a part has no recorded end."""
        ends = [part.job.ended_at for part in self.parts]
        known = [at for at in ends if at is not None]
        return max(known) if len(known) == len(ends) else None

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the history; a rank that joined several times is counted once."""
        most: dict[tuple[int, int | None, int | None], int] = defaultdict(int)
        for part in self.parts:
            most[part.place] = max(most[part.place], len(part.ranks))
        return sum(most.values())

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the whole training, here and on other hosts; None if not reported by its processes."""
        return max((part.world_size for part in self.parts if part.world_size is not None), default=None)

    @property
    def is_incomplete(self) -> bool:
        """Whether ranks are known to be missing from the history."""
        return self.world_size is not None and self.num_ranks < self.world_size


def find_trainings(jobs: Iterable[JobSummary], ranks: Iterable[RankRecord]) -> tuple[Training, ...]:
    """Return the trainings that the jobs belong to, in order of their start; each job belongs to exactly one."""
    ranks_of: Mapping[str, list[RankRecord]] = defaultdict(list)
    for rank in ranks:
        ranks_of[rank.job_id].append(rank)
    with_one_key: Mapping[tuple[int, str, str, str | None], list[TrainingPart]] = defaultdict(list)
    for job in sorted(jobs, key=lambda job: (job.started_at, job.job_id)):
        part = TrainingPart(job, tuple(ranks_of.get(job.job_id, ())))
        host = job.host if part.key.is_on_one_host else None
        with_one_key[job.uid, job.job_name, part.key.name, host].append(part)
    found = (training for parts in with_one_key.values() for training in _trainings_with_one_key(parts))
    return tuple(sorted(found, key=lambda training: (training.started_at, training.parts[0].job.job_id)))


def _trainings_with_one_key(parts: Sequence[TrainingPart]) -> Iterator[Training]:
    """Yield the trainings of jobs with one key; `parts` are in order of their start."""
    of_one: list[TrainingPart] = []
    num_restarts: dict[str | None, int] = {}
    for some in _connected(parts):
        if of_one and not any(part.key.num_restarts > num_restarts.get(part.job.host, 0) for part in some):
            yield Training(tuple(of_one))
            of_one, num_restarts = [], {}
        of_one += some
        for part in some:
            num_restarts[part.job.host] = max(num_restarts.get(part.job.host, 0), part.key.num_restarts)
    yield Training(tuple(of_one))


def _connected(parts: Sequence[TrainingPart]) -> Iterator[list[TrainingPart]]:
    """Yield groups of jobs that overlap in time, or that the same processes started one after the other."""
    some: list[TrainingPart] = []
    processes: set[tuple[str | None, int]] = set()
    end = _FOREVER
    for part, own_end in zip(parts, _ends(parts), strict=True):
        if some and part.job.started_at >= end and processes.isdisjoint(part.processes):
            yield some
            some, processes = [], set()
        end = max(end, own_end) if some else own_end
        some.append(part)
        processes |= part.processes
    yield some


def _ends(parts: Sequence[TrainingPart]) -> list[datetime]:
    """Return the end of each job; one without a recorded end has ended when the next one begins in its place."""
    ends: list[datetime] = []
    next_start: dict[tuple[int, int | None, int | None], datetime] = {}
    for part in reversed(parts):
        ends.append(part.job.ended_at or next_start.get(part.place, _FOREVER))
        next_start[part.place] = part.job.started_at
    return ends[::-1]
