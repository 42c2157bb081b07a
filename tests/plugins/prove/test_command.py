"""`gpuenergyd prove` as a command: checks, refusals, exit codes."""

import json
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd_prove.folder import VERDICT, read_registration
from tests.plugins.prove.tampering import edited_energy, proved
from tests.plugins.prove.virtual_training import VirtualTraining


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    path = tmp_path / "proof"
    proved(path, VirtualTraining(seed=3))
    return path


def test_check_prints_the_verdict_and_the_key_to_compare(proof: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["prove", "--check", str(proof)])

    out = capsys.readouterr().out
    assert status == 0
    assert out.startswith("SIMULATED: arm 'ours': saves; GPU energy per iteration -1")
    assert "byte for byte" in out
    assert read_registration(proof).public_key in out


def test_check_with_the_published_key_says_so(proof: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", "--check", str(proof), "--key", read_registration(proof).public_key.upper()]) == 0

    assert "checked with the published key" in capsys.readouterr().out


def test_json_of_a_check_holds_the_verdict_of_the_folder(proof: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", "--check", str(proof), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is True
    assert found["verdict"] == json.loads((proof / VERDICT).read_text())


def test_tampered_proof_fails_with_the_file_and_without_a_verdict(
    proof: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited_energy(proof)

    assert run(["prove", "--check", str(proof)]) == 1

    assert capsys.readouterr().out == "does not hold: raw/blocks.jsonl is not as it was signed\nno verdict\n"


def test_another_key_fails(proof: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", "--check", str(proof), "--key", "00" * 32]) == 1

    assert "not with 0000000000000000..." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the training program after --, or --job JOB, or --simulated, or --check DIR"),
        (["--job", "gpt", "--", "train.py"], "give the training program after --, or --job JOB"),
        (["--job", "gpt", "--losses", "losses.txt"], "--losses belongs to a training program after --"),
        (["--simulated", "--", "train.py"], "give the training program after --"),
        (["--check", "x", "--simulated"], "--check takes no COMMAND, no --job and no --simulated"),
        (["--key", "ab", "--", "train.py"], "--key belongs to --check"),
        (["--check", "/no/such/folder"], "no registration.json; must be the folder of a proof"),
        (["--policy", "nope", "--", "train.py"], "no policy 'nope'"),
        (["--policy", "full-speed", "--", "train.py"], "never full-speed, the arm to compare with"),
        (["--against", "bubble-aware", "--", "train.py"], "each policy once"),
        (["--meter", "multimeter", "--", "train.py"], "must be redfish:URL"),
    ],
)
def test_usage_errors_name_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prove", *arguments]) == 2

    assert message in capsys.readouterr().err


def test_without_a_daemon_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run(["prove", "--socket", str(tmp_path / "none.sock"), "--", "train.py"]) == 3

    assert "daemon" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
