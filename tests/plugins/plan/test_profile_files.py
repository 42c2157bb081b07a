"""Profile tables and planner instances: valid files are read, invalid ones are named with place and value."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.timeline import iteration_energy_j, timeline
from gpuenergyd.errors import ProfileError
from gpuenergyd_plan.profiles.profile_files import PlannerInstance, ProfileTable, read_pipeline_file
from tests.support.measured_tables import DATA

F, B, I, W, *_ = InstructionKind  # noqa: E741  torch's own names
HEADER = "stage,instruction,frequency,time,energy"
ROWS = [
    "0,forward,1400,0.10,30",
    "0,forward,1200,0.12,25",
    "0,backward,1400,0.20,60",
    "1,forward,1400,0.11,31",
    "1,backward,1395,0.21,61",
]


def _table(tmp_path: Path, lines: list[str], name: str = "profile.csv") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def _instance_data() -> dict[str, Any]:
    table = {"freq_mhz": [1400, 1200], "time_s": [1.0, 1.5], "energy_j": [100.0, 80.0]}
    return {
        "name": "two",
        "stages": 2,
        "microbatches": 1,
        "schedule": "1f1b",
        "p_block_w": 50.0,
        "ops": [
            {"id": 0, "stage": 0, "op": "F", "microbatch": 0},
            {"id": 1, "stage": 0, "op": "B", "microbatch": 0},
            {"id": 2, "stage": 1, "op": "F", "microbatch": 0},
            {"id": 3, "stage": 1, "op": "B", "microbatch": 0},
        ],
        "edges": [[0, 1], [0, 2], [2, 3], [3, 1]],
        "edge_latency_s": [0.0, 0.25, 0.0, 0.25],
        "profiles": {f"{stage}/{op}": copy.deepcopy(table) for stage in range(2) for op in "FB"},
    }


def _instance(tmp_path: Path, data: object) -> Path:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(data))
    return path


def test_rows_may_come_in_any_order_and_each_class_has_its_own_clocks(tmp_path: Path) -> None:
    rows = ROWS.copy()
    random.Random(1).shuffle(rows)

    table = read_pipeline_file(_table(tmp_path, [HEADER, *rows]))

    assert isinstance(table, ProfileTable)
    assert table.num_stages == 2
    assert [o.sm_clock_mhz for o in table.classes[InstructionClass(0, F)].options] == [1400, 1200]
    assert [o.sm_clock_mhz for o in table.classes[InstructionClass(1, B)].options] == [1395]
    assert table.classes[InstructionClass(0, F)].at_clock(1200).energy_j == 25.0


def test_columns_are_found_by_name_and_additional_ones_are_ignored(tmp_path: Path) -> None:
    lines = ["energy,note,time,frequency,instruction,stage"]
    lines += [f"{e},x,{t},{f},{i},{s}" for s, i, f, t, e in (row.split(",") for row in ROWS)]

    table = read_pipeline_file(_table(tmp_path, lines))

    assert isinstance(table, ProfileTable)
    assert table.classes[InstructionClass(1, F)].at_max_clock.time_s == 0.11


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty"),
        ([HEADER], "no measurements below the header"),
        (["stage,instruction,frequency,energy", "0,forward,1400,30"], ":1: no column 'time'"),
        ([HEADER + ",time", *ROWS], ":1: more than one column 'time'"),
        ([HEADER, "0,forward,1400,-0.1,30"], r":2: time -0.1: must be > 0"),
        ([HEADER, "0,forward,1400,0,30"], r":2: time 0: must be > 0"),
        ([HEADER, ROWS[0], "0,forward,1200,0.1,-3"], r":3: energy -3: must be >= 0"),
        ([HEADER, "0,forward,1400,nan,30"], ":2: time 'nan': must be a finite number"),
        ([HEADER, "0,forward,1400,0.1,inf"], ":2: energy 'inf': must be a finite number"),
        ([HEADER, "0,forward,fast,0.1,30"], ":2: frequency 'fast': not a number"),
        ([HEADER, "0,forward,1400.5,0.1,30"], ":2: frequency '1400.5': must be a whole number"),
        ([HEADER, "0,forward,-1400,0.1,30"], ":2: frequency -1400: must be > 0"),
        ([HEADER, "-1,forward,1400,0.1,30"], ":2: stage -1: must be 0"),
        ([HEADER, "0,sideways,1400,0.1,30"], ":2: instruction 'sideways': must be forward, backward, input or weight"),
        ([HEADER, "0,forward,1400"], ":2: 3 values, the header has 5 columns"),
        ([HEADER, *ROWS, ROWS[1]], ":7: forward of stage 0 at 1200 MHz is given twice"),
        (
            [HEADER, *ROWS[:3], "2,forward,1400,0.1,30", "2,backward,1400,0.1,30"],
            "no forward of stage 1; stages given: 0, 2",
        ),
        ([HEADER, *ROWS[:4]], "no backward of stage 1"),
        ([HEADER, '"0,forward'], "not CSV"),
    ],
)
def test_an_invalid_table_is_rejected_with_line_and_value(tmp_path: Path, lines: list[str], message: str) -> None:
    path = _table(tmp_path, lines)

    with pytest.raises(ProfileError, match=message) as caught:
        read_pipeline_file(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"stage,\xff\xfe")

    with pytest.raises(ProfileError, match="not UTF-8 text"):
        read_pipeline_file(binary)
    with pytest.raises(ProfileError, match="is a directory"):
        read_pipeline_file(tmp_path)
    with pytest.raises(ProfileError, match="no such file"):
        read_pipeline_file(tmp_path / "absent.csv")


def test_an_instance_has_its_own_order_edges_and_blocking_power(tmp_path: Path) -> None:
    instance = read_pipeline_file(_instance(tmp_path, _instance_data()))

    assert isinstance(instance, PlannerInstance)
    assert [str(i) for i in instance.graph.instructions] == ["F0@0", "B0@0", "F0@1", "B0@1"]
    assert timeline(instance.graph, [1.0] * 4).iteration_time_s == pytest.approx(4.5)
    assert instance.profile.blocking_power_w == 50.0
    assert (instance.schedule.name, instance.schedule.num_microbatches) == ("1f1b", 1)


def test_instance_ops_are_sorted_rank_by_rank_and_edges_follow(tmp_path: Path) -> None:
    data = _instance_data()
    data["ops"] = [dict(data["ops"][old], id=new) for new, old in enumerate([2, 0, 3, 1])]
    data["edges"] = [[1, 3], [1, 0], [0, 2], [2, 3]]

    instance = read_pipeline_file(_instance(tmp_path, data))

    assert isinstance(instance, PlannerInstance)
    assert [str(i) for i in instance.graph.instructions] == ["F0@0", "B0@0", "F0@1", "B0@1"]
    assert instance.graph.predecessors == (((), ((0, 0.0), (3, 0.25)), ((0, 0.25),), ((2, 0.0),)))


def test_backward_beside_weight_gradients_is_the_input_gradient(tmp_path: Path) -> None:
    data = _instance_data()
    data["ops"] += [
        {"id": 4, "stage": 0, "op": "W", "microbatch": 0},
        {"id": 5, "stage": 1, "op": "W", "microbatch": 0},
    ]
    data["edges"] += [[1, 4], [3, 5]]
    data["edge_latency_s"] += [0.0, 0.0]
    data["profiles"] |= {f"{stage}/W": data["profiles"]["0/B"] for stage in range(2)}

    instance = read_pipeline_file(_instance(tmp_path, data))

    assert isinstance(instance, PlannerInstance)
    assert [i.kind for i in instance.graph.instructions] == [F, I, W, F, I, W]
    assert set(instance.profile.classes) == {InstructionClass(r, k) for r in range(2) for k in (F, I, W)}


def test_chunks_are_read_from_op_names(tmp_path: Path) -> None:
    data = _instance_data()
    for op in data["ops"]:
        op["op"] += "1"
    data["profiles"] = {f"{stage}/{op}1": data["profiles"]["0/F"] for stage in range(2) for op in "FB"}

    instance = read_pipeline_file(_instance(tmp_path, data))

    assert isinstance(instance, PlannerInstance)
    assert {i.chunk_index for i in instance.graph.instructions} == {1}
    assert instance.schedule.num_chunks == 2


def _set(*keys: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        at: Any = data
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("ops"), "missing key 'ops'"),
        (lambda d: d.pop("p_block_w"), "missing key 'p_block_w'"),
        (_set("stages", to=0), "stages 0: must be a whole number from 1"),
        (_set("stages", to=3), "no op of stage 2; the file declares 3 stages"),
        (_set("stages", to="two"), "stages 'two': not a number"),
        (_set("microbatches", to=True), "microbatches True: not a number"),
        (_set("p_block_w", to=-5), "p_block_w -5.0: must be >= 0"),
        (_set("p_block_w", to=float("nan")), "p_block_w nan: must be a finite number"),
        (_set("p_block_w", to=None), "p_block_w None: not a number"),
        (_set("ops", to=[]), "the list is empty"),
        (_set("ops", to="F B"), "ops 'F B': must be a list"),
        (_set("ops", 1, to=7), r"ops\[1\]: 7: must be an object"),
        (_set("ops", 1, "op", to="Q"), r"ops\[1\]: op 'Q': must be F, B, I or W"),
        (_set("ops", 1, "op", to="F"), r"ops\[1\]: F0@0 is given twice"),
        (_set("ops", 1, "stage", to=2), r"ops\[1\]: stage 2: must be 0 to 1"),
        (_set("ops", 1, "microbatch", to=1), r"ops\[1\]: microbatch 1: must be 0 to 0"),
        (_set("ops", 1, "id", to=9), r"ops\[1\]: id 9: must be its position"),
        (_set("edges", 0, to=[1, 0]), "cyclic"),
        (_set("edges", 0, to=[0, 4]), r"edges\[0\]: \[0, 4\]: op ids are 0 to 3"),
        (_set("edges", 0, to=[0]), r"edges\[0\]: \[0\]: must be a pair"),
        (_set("edge_latency_s", 1, to=-1), r"edge_latency_s\[1\]: -1.0: must be >= 0"),
        (_set("edge_latency_s", to=[0.0]), "1 value for 4 edges"),
        (lambda d: d["profiles"].pop("1/B"), "no table '1/B'"),
        (_set("profiles", to=[]), r"profiles \[\]: must be an object"),
        (_set("profiles", "1/B", to={}), "must be an object with the lists"),
        (_set("profiles", "1/B", "time_s", to=[1.0]), "2 clocks, 1 time, 2 energies"),
        (_set("profiles", "1/B", "time_s", to=[1.0, -2.0]), "1/B.*time -2.0 s at 1200 MHz"),
        (_set("profiles", "1/B", "energy_j", to=[float("inf"), 2.0]), "1/B.*energy_j inf: must be a finite number"),
        (_set("profiles", "1/B", "freq_mhz", to=[1400, 1400]), "1/B.*1400 MHz is given twice"),
        (_set("profiles", "1/B", to={"freq_mhz": [], "time_s": [], "energy_j": []}), "1/B.*no measurements"),
    ],
)
def test_an_invalid_instance_is_rejected_with_key_and_value(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    data = _instance_data()
    change(data)
    path = _instance(tmp_path, data)

    with pytest.raises(ProfileError, match=message) as caught:
        read_pipeline_file(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"stages": ' + "9" * 5000 + "}", "[" * 100_000])
def test_other_json_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)

    with pytest.raises(ProfileError) as caught:
        read_pipeline_file(path)

    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared instances are not on this machine")
def test_shared_instances_match_their_published_costs_at_full_speed() -> None:
    bounds = json.loads((DATA / "instances" / "bounds.json").read_text())
    for name, expected in bounds.items():
        if name.startswith("_"):
            continue
        instance = read_pipeline_file(DATA / "instances" / f"{name}.json")
        assert isinstance(instance, PlannerInstance)
        options = [instance.profile[i.instruction_class].at_max_clock for i in instance.graph.instructions]
        durations_s = [o.time_s for o in options]
        iteration_time_s = timeline(instance.graph, durations_s).iteration_time_s

        assert iteration_time_s == pytest.approx(expected["T_at_all_max_freq_s"], rel=1e-9)
        assert iteration_energy_j(
            energies_j=[o.energy_j for o in options],
            durations_s=durations_s,
            iteration_time_s=iteration_time_s,
            num_ranks=instance.graph.num_ranks,
            blocking_power_w=instance.profile.blocking_power_w,
        ) == pytest.approx(expected["E_all_max_freq_J"], rel=1e-9)
