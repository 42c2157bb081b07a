"""Orders in CSV files: those of all schedules are read back as they were, and bad ones are named by place and value."""

from pathlib import Path

import pytest

from gpuenergyd.core.pipeline.graph import Schedule, dependency_graph
from gpuenergyd.core.pipeline.profile import KIND_OF_WORD
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.errors import ProfileError
from gpuenergyd_plan.profiles.profile_files import read_order_file

HEADER = "rank,position,instruction,microbatch"
ROWS = ["0,0,forward,0", "0,1,backward,0", "1,0,forward,0", "1,1,input,0", "1,2,weight,0"]
WORDS = {kind: word for word, kind in KIND_OF_WORD.items()}


def _written(path: Path, schedule: Schedule) -> Path:
    rows = [f"{HEADER},stage"]
    rows += [
        f"{i.pp_rank},{at},{WORDS[i.kind]},{i.microbatch_index},{schedule.stage_index(i.pp_rank, i.chunk_index)}"
        for order in schedule.orders
        for at, i in enumerate(order)
    ]
    path.write_text("\n".join([rows[0], *reversed(rows[1:])]) + "\n")
    return path


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved", "interleaved-zb", "zbv"])
def test_orders_of_schedules_are_read_back_whatever_the_order_of_rows(tmp_path: Path, name: str) -> None:
    schedule = make_schedule(name, 3, 6, None)

    read = read_order_file(_written(tmp_path / "order.csv", schedule), schedule.num_stages)

    assert read.orders == schedule.orders
    assert (read.num_microbatches, read.num_chunks) == (6, schedule.num_chunks)
    ours, theirs = dependency_graph(read), dependency_graph(schedule)
    assert (ours.instructions, ours.predecessors) == (theirs.instructions, theirs.predecessors)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no instructions below the header"),
        (["0,0,forward"], "order.csv:2: 3 values, the header has 4 columns"),
        (["0,0,optimizer,0"], "order.csv:2: instruction 'optimizer': must be forward, backward, input or weight"),
        (["0,0,forward,-1"], "order.csv:2: microbatch '-1': must be 0 to 999999"),
        (["0,first,forward,0"], "order.csv:2: position 'first': not a number"),
        (["2,0,forward,0"], "order.csv:2: stage '2': must be 0 to 1"),
        ([*ROWS, "1,2,weight,0"], "order.csv:7: position 2 of rank 1 is given twice"),
        ([*ROWS[:4], "1,3,weight,0"], "rank 1 has no position 2; positions count from 0 without gaps"),
        (ROWS[:2], "no rank runs stage 1; the profile has stages 0 to 1"),
        (ROWS[2:], "rank 0 has no position 0; positions count from 0 without gaps"),
        (["0,0,forward,0", *ROWS[2:]], "rank 0 has no backward of microbatch 0 of stage 0"),
        (ROWS[:4], "rank 1 has no weight of microbatch 0 of stage 1"),
        ([*ROWS, "0,2,forward,0"], "order.csv:7: forward of microbatch 0 of stage 0 is given twice"),
        (
            ["0,1,forward,0", "0,0,backward,0", *ROWS[2:]],
            "backward of microbatch 0 of stage 0 comes before its forward",
        ),
        ([*ROWS, "1,3,backward,0"], "order.csv:7: the backward of microbatch 0 is both whole and split"),
        ([*ROWS, "0,2,forward,1", "0,3,backward,1"], "rank 1 has no forward of microbatch 1 of stage 1"),
    ],
)
def test_bad_orders_are_one_clear_line(tmp_path: Path, rows: list[str], message: str) -> None:
    path = tmp_path / "order.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")

    with pytest.raises(ProfileError) as raised:
        read_order_file(path, 2)

    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_stages_must_run_on_one_rank_each_and_as_many_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"

    def message(*stages: tuple[int, int]) -> str:
        rows = [HEADER + ",stage"]
        for rank in sorted({rank for rank, _ in stages}):
            own = [stage for r, stage in stages if r == rank]
            words = [(word, stage) for word in ("forward", "backward") for stage in own]
            rows += [f"{rank},{at},{word},0,{stage}" for at, (word, stage) in enumerate(words)]
        path.write_text("\n".join(rows) + "\n")
        with pytest.raises(ProfileError) as raised:
            read_order_file(path, 3)
        return str(raised.value)

    assert "stage 0 runs on rank 0 and on rank 1" in message((0, 0), (1, 0), (2, 2))
    assert "rank 0 runs 2 stages, another rank 1; all ranks must run equally many" in message((0, 0), (0, 1), (1, 2))
    assert "each stage must run on the rank of its own number" in message((0, 1), (1, 0), (2, 2))


def test_missing_files_and_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none\.csv: no such file"):
        read_order_file(tmp_path / "none.csv", 1)
    with pytest.raises(ProfileError, match="is a directory; expected an order CSV"):
        read_order_file(tmp_path, 1)
    path = tmp_path / "order.csv"
    path.write_text("rank,instruction,microbatch\n0,forward,0\n")
    with pytest.raises(ProfileError, match="no column 'position'; expected the header rank,position,"):
        read_order_file(path, 1)
