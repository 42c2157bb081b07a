"""Trainings: which jobs of a history are parts of one run of a program.

Each replica of a pipeline is a job of its own, of a pipeline across hosts each rank, and of a plain loop each process.
All parts of a training have the same user, job name and run key, but the key does not always differ between trainings:

- Without a run id of its own, `torchrun` gives every run the same key, and so do programs that set MASTER_ADDR and
  MASTER_PORT. Jobs with one key are several trainings if the later ones begin after the end of the earlier ones, in
  other processes.
- `torchrun` counts restarts of its workers in the key, on each host for itself: a restart continues the training.
- The key of a run on one host (a pid, or a loopback address) may occur on other hosts too.
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
"""What the run key of a member of a pipeline across hosts begins with: its stage and its number in the stage."""
_NUM_RESTARTS = re.compile(r"(?:^|,)torchelastic_restart_count=(\d+)")
_ON_ONE_HOST = re.compile(r"(?:^|,)(?:(?:pid|parent)=\d|master_addr=(?:localhost|127\.|::1))")
_COMPARED_CHARS = 180
"""Long keys are cut, those of members earlier because of what they begin with."""
_FOREVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class RunKey:
    """What the run key of a job says."""

    name: str
    """The same for all parts of a training."""
    stage: int | None
    """The stage of a member of a pipeline across hosts; None for other jobs."""
    stage_rank: int | None
    """The member's number in its stage."""
    num_restarts: int
    is_on_one_host: bool
    """Whether the processes of the run are certainly on one host."""


def parse_run_key(text: str) -> RunKey:
    """Return what a run key says; one that the user has chosen is a name and nothing else."""
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
        """What its run key says."""
        return parse_run_key(self.job.run_key)

    @property
    def place(self) -> tuple[int, int | None, int | None]:
        """What no other part has at the same time: the replica and, of a pipeline across hosts, the member."""
        return self.job.dp_rank, self.key.stage, self.key.stage_rank

    @property
    def processes(self) -> frozenset[tuple[str | None, int]]:
        """The host and the pid of each rank."""
        return frozenset((self.job.host, rank.pid) for rank in self.ranks)

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the whole training, as its processes reported it; None if they did not."""
        text = dict(self.job.tags).get("world_size", "")
        return int(text) if text.isdecimal() and 0 < len(text) < 10 else None

    def stage_of(self, gpu_uuid: str) -> int | None:
        """Return the pipeline stage of a GPU; None if no rank is known to use it."""
        if self.key.stage is not None:
            return self.key.stage
        return next((rank.pp_rank for rank in self.ranks if rank.gpu_uuid == gpu_uuid), None)


@dataclass(frozen=True)
class Training:
    """All jobs of one training that a history has, in order of their start; there is at least one."""

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
        """Number of ranks that the history knows; one that has joined several times counts once."""
        most: dict[tuple[int, int | None, int | None], int] = defaultdict(int)
        for part in self.parts:
            most[part.place] = max(most[part.place], len(part.ranks))
        return sum(most.values())

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the whole training, here and elsewhere; None if its processes did not report it."""
        return max((part.world_size for part in self.parts if part.world_size is not None), default=None)

    @property
    def is_incomplete(self) -> bool:
        """Whether ranks are known to be missing from the history."""
        return self.world_size is not None and self.num_ranks < self.world_size


def find_trainings(jobs: Iterable[JobSummary], ranks: Iterable[RankRecord]) -> tuple[Training, ...]:
    """Return the trainings that jobs are parts of, in order of their start; each job is a part of exactly one."""
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
    """Yield the trainings of jobs with one key, which are given in order of their start."""
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
    """Yield jobs that overlap in time, or that the same processes have begun one after the other."""
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
    """Return the end of each job; one whose end was never recorded has ended when the next one begins in its place."""
    ends: list[datetime] = []
    next_start: dict[tuple[int, int | None, int | None], datetime] = {}
    for part in reversed(parts):
        ends.append(part.job.ended_at or next_start.get(part.place, _FOREVER))
        next_start[part.place] = part.job.started_at
    return ends[::-1]
