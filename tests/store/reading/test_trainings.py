"""Which jobs are one training: all parts of a run, on every host and after restarts, and nothing of another run."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import permutations
from pathlib import Path

import pytest

from gpuenergyd.client.environment import find_run_key
from gpuenergyd.store import JobSummary, open_history
from gpuenergyd.store.reading.trainings import RunKey, Training, find_trainings, parse_run_key
from gpuenergyd.store.records import RankRecord
from tests.support.sample_history import write_sample_history
from tests.support.training_history import TrainingJob

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
TORCHRUN = "torchelastic_run_id=none,torchelastic_restart_count={},master_addr=10.0.0.1,master_port=29500"


def found(jobs: Sequence[TrainingJob]) -> list[list[str]]:
    """Return the jobs of each training, whatever the order in which the jobs are given."""
    results = [_ids(find_trainings([jobs[k].summary for k in order], _ranks(jobs))) for order in _orders(len(jobs))]
    assert all(result == results[0] for result in results)
    return results[0]


def _orders(num_jobs: int) -> list[Sequence[int]]:
    return [*permutations(range(num_jobs))] if num_jobs < 5 else [range(num_jobs), range(num_jobs)[::-1]]


def _ranks(jobs: Sequence[TrainingJob]) -> list[RankRecord]:
    return [rank for job in jobs for rank in job.ranks]


def _ids(trainings: Sequence[Training]) -> list[list[str]]:
    return [[part.job.job_id for part in training.parts] for training in trainings]


def job(job_id: str, begin_s: float = 0.0, end_s: float | None = 100.0, **fields: object) -> TrainingJob:
    end = None if end_s is None else START + timedelta(seconds=end_s)
    return TrainingJob(job_id, START + timedelta(seconds=begin_s), end, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("mine", RunKey("mine", None, None, 0, is_on_one_host=False)),
        ("pp3,mine", RunKey("mine", 3, 0, 0, is_on_one_host=False)),
        (
            "pp12.1,torchelastic_run_id=a7,torchelastic_restart_count=2,master_addr=node1,master_port=29500",
            RunKey("torchelastic_run_id=a7,master_addr=node1,master_port=29500", 12, 1, 2, is_on_one_host=False),
        ),
        ("pid=17", RunKey("pid=17", None, None, 0, is_on_one_host=True)),
        ("master_addr=localhost,master_port=1", RunKey("master_addr=localhost,master_port=1", None, None, 0, True)),
    ],
)
def test_a_run_key_says_what_the_parts_of_a_training_have_in_common(text: str, key: RunKey) -> None:
    assert parse_run_key(text) == key


@pytest.mark.parametrize(
    ("launcher", "is_on_one_host"),
    [
        ({"TORCHELASTIC_RUN_ID": "a7", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, False),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, True),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "SLURM_JOB_ID": "77"}, False),
    ],
)
def test_the_keys_of_clients_differ_between_restarts_only_in_their_number(
    launcher: Mapping[str, str], *, is_on_one_host: bool
) -> None:
    keys = [find_run_key(environ={**launcher, "TORCHELASTIC_RESTART_COUNT": count}) for count in ("0", "1")]
    first, again = map(parse_run_key, keys)

    assert (first.name, first.is_on_one_host) == (again.name, is_on_one_host)
    assert (first.num_restarts, again.num_restarts) == (0, 1)


def test_without_a_launcher_the_key_of_a_client_is_of_one_host() -> None:
    assert all(parse_run_key(find_run_key(num_processes=num, environ={})).is_on_one_host for num in (1, 4))


def test_replicas_and_members_on_several_hosts_are_one_training() -> None:
    jobs = [
        job(f"r{dp}s{pp}", dp_rank=dp, run_key=f"pp{pp}.0,{TORCHRUN.format(0)}", host=f"host-{pp}", num_gpus=1)
        for dp in range(2)
        for pp in range(4)
    ]

    (training,) = find_trainings([each.summary for each in jobs], _ranks(jobs))

    assert found(jobs) == [sorted(each.job_id for each in jobs)]
    assert training.num_ranks == 8
    assert {part.stage_of(rank.gpu_uuid) for part in training.parts for rank in part.ranks} == set(range(4))


def test_users_names_and_keys_are_different_trainings() -> None:
    jobs = [job("a"), job("b", uid=1001), job("c", job_name="bert"), job("d", run_key="run-2")]

    assert found(jobs) == [["a"], ["b"], ["c"], ["d"]]


def test_a_run_that_begins_after_the_end_of_the_last_one_is_another_training() -> None:
    """`torchrun` without a run id gives every run the same key."""
    key = TORCHRUN.format(0)
    first = [job(f"first-{dp}", dp, 100 + dp, dp_rank=dp, run_key=key) for dp in range(2)]
    second = [job(f"second-{dp}", 200 + dp, None, dp_rank=dp, run_key=key) for dp in range(3)]

    assert found([*first, *second]) == [["first-0", "first-1"], ["second-0", "second-1", "second-2"]]


def test_a_job_without_an_end_has_ended_when_the_next_one_is_in_its_place() -> None:
    """A host that never returns leaves its jobs open in a shared history."""
    jobs = [job("left", 0, None), job("next", 500, 600), job("last", 700, None)]

    assert found(jobs) == [["left"], ["next"], ["last"]]


def test_a_restart_that_torchrun_counts_continues_the_training() -> None:
    """Each host counts its own failures, so that the keys of one training may differ between hosts."""
    jobs = [
        job("a0", 0, 100, run_key=TORCHRUN.format(0), host="a"),
        job("b0", 0, 100, run_key=TORCHRUN.format(0), host="b", dp_rank=1),
        job("b0-again", 120, 200, run_key=TORCHRUN.format(0), host="b", dp_rank=1),
        job("a1", 121, 200, run_key=TORCHRUN.format(1), host="a"),
        job("next", 300, 400, run_key=TORCHRUN.format(0), host="a"),
        job("next-1", 401, 500, run_key=TORCHRUN.format(1), host="a"),
    ]

    assert found(jobs) == [["a0", "b0", "b0-again", "a1"], ["next", "next-1"]]


def test_processes_that_join_again_are_in_the_same_training() -> None:
    """The daemon was down for a while."""
    jobs = [
        job("before", 0, 100, first_pid=7),
        job("after", 400, 500, first_pid=7),
        job("other", 600, 700, first_pid=9),
    ]

    training, _ = find_trainings([each.summary for each in jobs], _ranks(jobs))

    assert found(jobs) == [["before", "after"], ["other"]]
    assert training.num_ranks == 2, "each rank has joined twice"


@pytest.mark.parametrize("key", ["pid=7", "parent=7", TORCHRUN.format(0).replace("10.0.0.1", "localhost")])
def test_runs_on_one_host_each_are_never_one_training(key: str) -> None:
    assert found([job("a", host="a", run_key=key), job("b", host="b", run_key=key)]) == [["a"], ["b"]]


def test_a_training_has_ended_when_all_its_parts_have() -> None:
    running = [job("a", 0, 100), job("b", 1, None, dp_rank=1)]
    ended = [job("a", 0, 100), job("b", 1, 140, dp_rank=1)]

    def training(jobs: Sequence[TrainingJob]) -> Training:
        return find_trainings([each.summary for each in jobs], ())[0]

    assert (training(running).started_at, training(running).ended_at) == (START, None)
    assert training(ended).ended_at == START + timedelta(seconds=140)


@pytest.mark.parametrize(
    ("world_size", "is_incomplete"), [("4", True), ("2", False), (None, False), ("many", False), ("9" * 12, False)]
)
def test_ranks_are_missing_only_where_the_processes_reported_their_number(
    world_size: str | None, *, is_incomplete: bool
) -> None:
    tags = () if world_size is None else (("world_size", world_size),)
    jobs = [job("a", tags=tags)]

    (training,) = find_trainings([jobs[0].summary], _ranks(jobs))

    assert training.is_incomplete is is_incomplete


def test_a_history_returns_the_ranks_and_keys_of_jobs(tmp_path: Path) -> None:
    with open_history(write_sample_history(tmp_path / "history.sqlite3")) as history:
        (summary,) = history.job_summaries()
        ranks = history.ranks([summary.job_id])
        none = history.ranks([])

    assert isinstance(summary, JobSummary)
    assert (summary.run_key, summary.dp_rank) == ("run-1", 0)
    assert [(rank.pp_rank, rank.gpu_uuid, rank.pid) for rank in ranks] == [(k, f"GPU-{k}", 100 + k) for k in range(4)]
    assert none == ()
