"""The history as rows and as a pandas frame, and the SPDX document, each by the real library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.house_map import PYTHON_PATH
from gpuenergyd import history
from gpuenergyd.cli.main import run
from gpuenergyd.errors import UsageError
from gpuenergyd.report.job import job_reports
from gpuenergyd.report.plugin_formats import ReportedJobs
from gpuenergyd.store import open_history
from gpuenergyd_formats.spdx import spdx_text
from tests.support.framework_environments import is_built, python_of
from tests.support.processes import finished
from tests.support.sample_history import START, write_sample_history
from tests.support.tools_environment import SPDX, tools_environment

FRAME = """
import sys
from gpuenergyd import history
jobs = history.frame(history.jobs(sys.argv[1]))
energy = history.frame(history.energy(sys.argv[1]))
assert str(jobs["started_at"].dtype).startswith("datetime64"), jobs.dtypes
print(float(jobs["gpu_energy_j"].sum()), float(energy.groupby("state")["energy_j"].sum()["idle"]))
"""
NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "energy_of_a_training.ipynb"
RUN_NOTEBOOK = """
import json, sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, resources={"metadata": {"path": sys.argv[2]}}).execute()
print(json.dumps([[o.output_type for o in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]))
"""
READ_CARD = """
import json, sys
from huggingface_hub import ModelCard
card = ModelCard("---\\nlicense: mit\\n" + open(sys.argv[1]).read() + "---\\n# A model\\n")
print(json.dumps(card.data.to_dict()["co2_eq_emissions"]))
"""
READ_SPDX = """
import sys
from spdx_python_model import v3_0_1 as spdx
objects = spdx.SHACLObjectSet()
with open(sys.argv[1], "rb") as file:
    spdx.JSONLDDeserializer().read(file, objects)
(package,) = objects.foreach_type(spdx.ai_AIPackage)
(used,) = package.ai_energyConsumption.ai_trainingEnergyConsumption
assert package.suppliedBy.name == "ada", package.suppliedBy
spdx.JSONLDSerializer().write(objects, sys.stdout.buffer)  # checks that nothing required is missing
sys.stderr.write(f"{package.name} {used.ai_energyQuantity} {used.ai_energyUnit}")
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return write_sample_history(tmp_path / "history.sqlite3")


def test_rows_have_jobs_iterations_and_energy_by_state(database: Path) -> None:
    (job,) = history.jobs(database)
    iterations = history.iterations(job["job_id"], database)
    by_state = dict.fromkeys(("working", "idle"), 0.0)
    for row in history.energy(database):
        by_state[row["state"]] += row["energy_j"] or 0.0
        assert (row["job_id"] is None) is (row["state"] == "idle")

    assert job["is_saving_significant"] is True
    assert len(iterations) == job["num_iterations"]
    assert iterations[0]["iteration_time_s"] > 0
    assert by_state == {"working": job["gpu_energy_j"], "idle": 480.0}


def test_pandas_reads_the_rows(database: Path) -> None:
    if not is_built("huggingface"):
        pytest.skip("no environment with pandas here; `make frameworks` builds one")
    done = finished([python_of("huggingface"), "-c", FRAME, database], env={"PYTHONPATH": PYTHON_PATH})

    assert done.stdout.split() == ["2884.0", "480.0"], done.stderr


def test_the_hub_s_own_library_reads_the_emissions_of_a_model_card(tmp_path: Path) -> None:
    written = write_sample_history(tmp_path / "grid.sqlite3", has_grid=True)
    card = tmp_path / "README.md"
    assert (
        run(["report", "--job", "gpt", "--format", "model-card", "--out", str(card), "--database", str(written)]) == 0
    )
    if not is_built("huggingface"):
        pytest.skip("no environment with huggingface_hub here; `make frameworks` builds one")
    done = subprocess.run(
        [python_of("huggingface"), "-c", READ_CARD, card], capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout or done.stderr)
    (job,) = history.jobs(written)

    assert found.pop("source").startswith("gpuenergyd ")
    assert found == {
        "emissions": pytest.approx(job["carbon_g"], rel=1e-5),
        "geographical_location": job["carbon_zone"],
        "hardware_used": "4 x A100",
    }


def test_without_emissions_there_is_no_model_card(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--job", "gpt", "--format", "model-card", "--database", str(database)]) == 2
    assert "no emissions of this job are known" in capsys.readouterr().err


def test_the_notebook_runs_and_is_stored_with_its_outputs(tmp_path: Path) -> None:
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    (tmp_path / "demo" / "state").mkdir(parents=True)
    write_sample_history(tmp_path / "demo" / "state" / "history.sqlite3")
    if not is_built("huggingface"):
        pytest.skip("no environment with nbclient here; `make frameworks` builds one")
    done = finished(
        [python_of("huggingface"), "-W", "ignore", "-c", RUN_NOTEBOOK, NOTEBOOK, tmp_path],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "HOME": str(tmp_path)},
    )

    kinds = [[output["output_type"] for output in cell["outputs"]] for cell in stored["cells"] if "outputs" in cell]
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == kinds
    assert [len(own) for own in kinds] == [0, 1, 1, 1, 1]


def test_without_pandas_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(UsageError, match="pip install pandas"):
        history.frame([])


def test_spdx_s_own_model_reads_the_training_energy(database: Path, tmp_path: Path) -> None:
    python, written = tools_environment(SPDX) / "python", tmp_path / "training.spdx.json"
    arguments = ["report", "--job", "gpt", "--format", "spdx", "--out", str(written), "--database", str(database)]
    assert run(arguments) == 0
    done = subprocess.run([python, "-c", READ_SPDX, written], capture_output=True, text=True, check=False)

    assert done.stderr == "gpt 0.000801111 https://spdx.org/rdf/3.0.1/terms/AI/EnergyUnitType/kilowattHour"
    package = next(each for each in json.loads(written.read_text())["@graph"] if each["type"] == "ai_AIPackage")
    assert "4 GPUs" in package["ai_informationAboutTraining"]
    assert "simulated" in package["ai_informationAboutTraining"]


def test_spdx_counts_the_gpus_of_a_continued_training_once(database: Path) -> None:
    with open_history(database) as opened:
        (report,) = job_reports(opened)
        text = spdx_text(ReportedJobs(history=opened, reports=[report, report], made_at=START))

    assert "Energy of 4 GPUs" in text


def test_spdx_needs_a_job_with_energy(database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write_sample_history(tmp_path / "empty.sqlite3", is_measured=False)

    assert run(["report", "--format", "spdx", "--database", str(database)]) == 2
    assert run(["report", "--format", "spdx", "--job", "gpt", "--database", str(empty)]) == 2
    errors = capsys.readouterr().err
    assert "--format spdx is of one job: give --job ID" in errors
    assert "no energy of this job is known" in errors
