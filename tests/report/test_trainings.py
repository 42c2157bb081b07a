"""A training's joules are those of its GPUs, and its parts add up to them exactly: by replica, stage, host and GPU."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import hypot
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.quantities.energy_use import add_known
from gpuenergyd.quantities.tariff import Tariff
from gpuenergyd.report.group_keys import GroupBy
from gpuenergyd.report.groups import IDLE_GROUP, EnergyQuery, grouped
from gpuenergyd.report.job import job_reports
from gpuenergyd.report.trainings import trainings_report
from gpuenergyd.store import open_history
from gpuenergyd.store.records import EstimateRecord, Record, RollupRecord, pipeline_id_of
from tests.support.sample_history import write_sample_history
from tests.support.stored_history import write_records
from tests.support.training_history import BASELINE_J, NUM_TUNED, TrainingJob

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
END = START + timedelta(minutes=10)
PARTS = ("by_replica", "by_stage", "by_host", "by_gpu")
NUM_STAGES = 3
SAVED_J = BASELINE_J * NUM_TUNED


def replica(dp_rank: int, *, host: str | None = "host-0", num_gpus: int = 2, **fields: Any) -> TrainingJob:
    return TrainingJob(f"gpt-{dp_rank}", START, END, dp_rank=dp_rank, host=host, num_gpus=num_gpus, **fields)


def idle_minute(energy_j: float) -> RollupRecord:
    return RollupRecord(3600, "GPU-idle", START, "", energy_j, None, None, 210.0, 60, None, 60.0, 0.0, 0.0)


def rows_of(path: Path, *records: Record, tariff: Tariff | None = None, job: str | None = None) -> list[dict[str, Any]]:
    """Write records to a history and return the rows of its report."""
    write_records(path, *records)
    with open_history(path) as history:
        reports = job_reports(history, tariff=tariff, job=job)
        report = trainings_report(EnergyQuery(history, tariff=tariff, only_jobs=job is not None), reports)
        return report.rows(has_parts=True)


def incomplete_line(path: Path, *records: Record) -> str:
    write_records(path, *records)
    with open_history(path) as history:
        return trainings_report(EnergyQuery(history), job_reports(history)).incomplete_line()


def total(rows: list[dict[str, Any]], name: str = "energy_j") -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return sum(known) if known else None


def random_training(number: int, noise: random.Random) -> tuple[list[Record], list[float | None]]:
    """Return the records of some replicas of three stages, whole or as members across hosts, and what each GPU used."""
    records: list[Record] = []
    energies_j: list[float | None] = []
    key, are_members = f"run-{number}", noise.random() < 0.5
    for dp_rank in range(noise.randint(1, 4)):
        of_replica = [noise.choice([None, 0.0, 10 ** noise.uniform(-6, 8)]) for _ in range(NUM_STAGES)]
        energies_j += of_replica
        jobs = [
            TrainingJob(
                f"t{number}-{dp_rank}-{stage}",
                START,
                END,
                run_key=f"pp{stage}.0,{key}" if are_members else key,
                dp_rank=dp_rank,
                num_gpus=1 if are_members else NUM_STAGES,
            )
            for stage in range(NUM_STAGES if are_members else 1)
        ]
        of_jobs = [[energy_j] for energy_j in of_replica] if are_members else [of_replica]
        records += [record for job, used in zip(jobs, of_jobs, strict=True) for record in job.records(used)]
    return records, energies_j


def test_the_parts_of_a_training_add_up_exactly(tmp_path: Path) -> None:
    """One row per training, and its lists add up to the energy of its GPUs, each joule once."""
    noise = random.Random(7)
    drawn = {f"run-{number}": random_training(number, noise) for number in range(60)}
    records = [record for of_training, _ in drawn.values() for record in of_training]

    *trainings, idle = rows_of(tmp_path / "h.sqlite3", idle_minute(7.0), *records)

    with open_history(tmp_path / "h.sqlite3") as history:
        everything_j = sum(group.energy_j or 0.0 for group in grouped(EnergyQuery(history), (), [GroupBy.GPU]))
    assert sorted(training["run_key"] for training in trainings) == sorted(drawn)
    for training in trainings:
        energies_j = drawn[training["run_key"]][1]
        known_j = [energy_j for energy_j in energies_j if energy_j is not None]
        assert training["num_gpus"] == len(energies_j)
        assert training["energy_j"] == (pytest.approx(sum(known_j), abs=1e-3 * len(known_j)) if known_j else None)
        assert training["missing_s"] == 60.0 * energies_j.count(None)
        num_replicas = len(energies_j) // NUM_STAGES
        assert [len(training[name]) for name in PARTS] == [num_replicas, NUM_STAGES, 1, len(energies_j)]
        assert [total(training[name]) for name in PARTS] == [training["energy_j"]] * len(PARTS)
        assert sum(row["num_gpus"] for row in training["by_stage"]) == len(energies_j)
    assert (idle["group"], idle["energy_j"], idle["job_energy_j"]) == (IDLE_GROUP, 7.0, None)
    assert (total(trainings) or 0.0) + idle["energy_j"] == pytest.approx(everything_j)


def test_a_replica_on_each_host_is_a_part_of_one_training(tmp_path: Path) -> None:
    for number, host in enumerate(("a", "b")):
        write_records(tmp_path / "h.sqlite3", *replica(number).records([1.0 + number, 10.0]), host=host)

    (training,) = rows_of(tmp_path / "h.sqlite3", tariff=Tariff(0.36))

    assert (training["num_jobs"], training["num_hosts"], training["num_replicas"]) == (2, 2, 2)
    assert [(row["host"], row["energy_j"], row["num_gpus"]) for row in training["by_host"]] == [
        ("a", 11.0, 2),
        ("b", 12.0, 2),
    ]
    assert [(row["dp_rank"], row["energy_j"]) for row in training["by_replica"]] == [(0, 11.0), (1, 12.0)]
    assert [(row["pp_rank"], row["energy_j"]) for row in training["by_stage"]] == [(0, 3.0), (1, 20.0)]
    assert (training["started_at"], training["ended_at"]) == (START, END)
    assert training["cost"] == pytest.approx(23.0 * 1e-7) == total(training["by_stage"], "cost")


def test_only_significant_savings_are_added_with_independent_intervals(tmp_path: Path) -> None:
    savings = [(0.2, 0.1, 0.3), (0.1, 0.05, 0.15), (0.02, -0.05, 0.09)]
    records = [record for k, saving in enumerate(savings) for record in replica(k).records([1.0, 2.0], saving)]

    (training,) = rows_of(tmp_path / "h.sqlite3", *records)

    assert training["saved_energy_j"] == pytest.approx(0.3 * SAVED_J)
    width_j = hypot(0.1 * SAVED_J, 0.05 * SAVED_J)
    assert training["saved_energy_low_j"] == pytest.approx(0.3 * SAVED_J - width_j)
    assert training["saved_energy_high_j"] == pytest.approx(0.3 * SAVED_J + width_j)
    assert (training["num_jobs_counted"], training["num_not_significant"]) == (2, 1)
    assert training["saving_ratio"] is None, "not known of the third replica"
    assert [row["saved_energy_j"] for row in training["by_replica"]] == [
        pytest.approx(0.2 * SAVED_J), pytest.approx(0.1 * SAVED_J), None
    ]  # fmt: skip
    assert [row["saved_energy_j"] for row in training["by_stage"]] == [None, None], "a pipeline saves as a whole"


def test_the_saving_of_a_training_is_a_share_of_all_its_jobs_at_full_speed(tmp_path: Path) -> None:
    records = [*replica(0).records([1.0, 2.0], (0.2, 0.1, 0.3)), *replica(1).records([1.0, 2.0], (0.1, 0.05, 0.15))]

    (training,) = rows_of(tmp_path / "h.sqlite3", *records)

    assert training["saving_ratio"] == pytest.approx(0.15)


def members(world_size: int = 2, **second: Any) -> list[Record]:
    """Return two members of a pipeline across hosts, whose own savings differ, and the estimate of their leader."""
    tags = (("world_size", str(world_size)),)
    records: list[Record] = []
    for stage, saving in enumerate([(0.2, 0.1, 0.3), (0.02, -0.05, 0.09)]):
        job = TrainingJob(
            f"gpt-{stage}", START, END, run_key=f"pp{stage}.0,run-1", num_gpus=1, host=f"host-{stage}", tags=tags
        )
        records += job.records([10.0 * (stage + 1)], saving)
    whole = EstimateRecord(
        pipeline_id_of("gpt-0"), 0, 1.0, 2 * BASELINE_J, 1.0, 178.0, 9, 9, 0.11, 0.1, 0.12, 0.0, 0.0, 0.0
    )
    return [*records, replace(whole, **second)]


def test_the_saving_of_a_pipeline_across_hosts_is_that_of_the_whole(tmp_path: Path) -> None:
    (training,) = rows_of(tmp_path / "h.sqlite3", *members())

    assert training["energy_j"] == 30.0 == total(training["by_gpu"])
    ratios = [training[name] for name in ("saving_ratio", "saving_low_ratio", "saving_high_ratio")]
    assert ratios == [pytest.approx(0.11), pytest.approx(0.1), pytest.approx(0.12)]
    assert training["saved_energy_j"] == pytest.approx(0.11 * 2 * SAVED_J)
    assert (training["num_jobs_counted"], training["num_not_significant"]) == (1, 0)
    assert [row["saved_energy_j"] for row in training["by_replica"]] == [training["saved_energy_j"]]
    assert [row["saved_energy_j"] for row in training["by_stage"]] == [pytest.approx(0.2 * SAVED_J), None]
    (pipeline,) = training["pipelines"]
    assert (pipeline["dp_rank"], pipeline["saving_low_ratio"], pipeline["baseline_energy_j"]) == (0, 0.1, 200.0)


def test_a_whole_saving_that_may_be_chance_is_not_counted(tmp_path: Path) -> None:
    (training,) = rows_of(tmp_path / "h.sqlite3", *members(saving_low_ratio=-0.01))

    assert (training["saved_energy_j"], training["saving_ratio"]) == (None, None)
    assert (training["num_jobs_counted"], training["num_not_significant"]) == (0, 1)


def test_the_whole_is_not_compared_with_the_gpus_of_a_part(tmp_path: Path) -> None:
    (training,) = rows_of(tmp_path / "h.sqlite3", *members(world_size=3))

    assert training["saved_energy_j"] == pytest.approx(0.2 * SAVED_J), "members count, as far as they are known"
    assert training["pipelines"][0]["saving_ratio"] == 0.11


def test_what_was_not_measured_is_missing_and_never_zero(tmp_path: Path) -> None:
    (training,) = rows_of(tmp_path / "h.sqlite3", *replica(0).records([None, None]))

    assert [training[name] for name in ("energy_j", "saved_energy_j", "saving_ratio", "carbon_g", "cost")] == [None] * 5
    assert [row["energy_j"] for name in PARTS for row in training[name]] == [None] * 6
    assert (training["num_gpus"], training["missing_s"], training["world_size"]) == (2, 120.0, None)


def test_a_job_without_known_ranks_counts_as_a_part(tmp_path: Path) -> None:
    (training,) = rows_of(tmp_path / "h.sqlite3", replica(0).record, replica(1).record)

    assert (training["num_jobs"], training["num_replicas"], training["num_gpus"]) == (2, 2, None)
    assert [row["energy_j"] for row in training["by_replica"]] == [None, None]
    assert [row["pp_rank"] for row in training["by_stage"]] == [None]


def test_a_gpu_that_two_trainings_used_is_in_both_with_its_own_joules(tmp_path: Path) -> None:
    job, later = replica(0), TrainingJob("gpt-0", START + timedelta(hours=2), END + timedelta(hours=2))
    shared = [record for record in later.records([3.0, 4.0]) if isinstance(record, RollupRecord)]
    renamed = [record._replace(job_id="gpt-later") for record in shared]
    again = TrainingJob("gpt-later", later.started_at, later.ended_at)

    rows = rows_of(tmp_path / "h.sqlite3", *job.records([1.0, 2.0]), again.record, *renamed)

    assert [row["energy_j"] for row in rows] == [3.0, 7.0]


def test_the_part_of_one_host_is_marked_as_a_part(tmp_path: Path) -> None:
    first, second = (replica(k, tags=(("world_size", "4"),)).records([1.0, 2.0]) for k in (0, 1))

    assert incomplete_line(tmp_path / "h.sqlite3", *first) == (
        "only a part of these trainings is in this history and period: gpt 2026-03-01 12:00 (2 of 4 ranks); other"
        " ranks are in the histories of their own hosts, or have not joined"
    )
    assert incomplete_line(tmp_path / "h.sqlite3", *second) == ""


def test_many_partly_known_trainings_are_still_one_line(tmp_path: Path) -> None:
    jobs = [TrainingJob(f"gpt-{k}", START, END, run_key=f"run-{k}", tags=(("world_size", "4"),)) for k in range(5)]

    line = incomplete_line(tmp_path / "h.sqlite3", *(record for job in jobs for record in job.records([1.0, 2.0])))

    assert " and 2 more; " in line


def test_energy_without_known_emissions_is_reported_beside_them(tmp_path: Path) -> None:
    """One replica ran while an intensity was known, the other one had none for any of its iterations."""
    path = write_sample_history(tmp_path / "h.sqlite3", has_grid=True)
    later = TrainingJob("gpt-2", START + timedelta(seconds=13), END, dp_rank=1, uid=0)

    (training, *_) = rows_of(path, *later.records([1.0, 2.0]))

    with open_history(path) as history:
        known, unknown = job_reports(history)
    assert training["num_jobs"] == 2
    assert training["carbon_g"] == pytest.approx(add_known(known.energy_use.carbon_g, unknown.energy_use.carbon_g))
    assert training["unpriced_energy_j"] == pytest.approx(
        add_known(known.energy_use.unpriced_j, unknown.energy_use.unpriced_j)
    )
    assert training["unpriced_energy_j"] > 0.0


def test_one_job_of_a_name_leaves_out_idle_energy(tmp_path: Path) -> None:
    records = [idle_minute(7.0), *replica(0).records([1.0, 2.0])]

    rows = rows_of(tmp_path / "h.sqlite3", *records, job="gpt")

    assert [row["group"] for row in rows] == ["gpt 2026-03-01 12:00"]
