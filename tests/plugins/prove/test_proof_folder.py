"""Proofs from calibration to check: a stranger recomputes the verdict, and tampering costs it."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gpuenergyd.errors import UsageError
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.folder import BLOCKS, PAGE, PILOT, REGISTRATION, VERDICT, check_folder, read_registration
from gpuenergyd_prove.procedure import prove
from gpuenergyd_prove.proof.measurements import Block
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm
from gpuenergyd_prove.proof.verdict import Conclusion, Verdict
from tests.plugins.prove.tampering import (
    OURS,
    TAMPERING,
    is_caught,
    proved,
    removed_repetition,
    request,
    signed_by_a_stranger,
)
from tests.plugins.prove.virtual_training import VirtualMeter, VirtualTraining
from tests.support.processes import finished

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proofs") / "proof"
    found = proved(path, VirtualTraining(seed=0))
    assert found.conclusion is Conclusion.SAVES
    return path


def test_stranger_recomputes_verdict_and_page_byte_for_byte(proof: Path, tmp_path: Path) -> None:
    there = shutil.copytree(proof, tmp_path / "elsewhere")

    checked = check_folder(there, public_key=read_registration(proof).public_key)

    assert checked.holds
    assert checked.verdict is not None
    assert checked.verdict.conclusion is Conclusion.SAVES
    for name in (VERDICT, PAGE):
        assert (there / name).read_bytes() == (proof / name).read_bytes()


@pytest.mark.parametrize("change", TAMPERING.values(), ids=TAMPERING.keys())
def test_tampering_costs_the_verdict(proof: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    assert is_caught(proof, change, tmp_path / "copy") is not None


def test_simulated_proof_says_so_wherever_it_could_be_quoted(proof: Path) -> None:
    assert '"simulated": true' in (proof / VERDICT).read_text()
    assert '"sentence": "SIMULATED: ' in (proof / VERDICT).read_text()
    page = (proof / PAGE).read_text()
    assert page.count("SIMULATED") >= 4
    assert "<title>SIMULATED" in page


def test_every_step_is_announced_with_its_mark(tmp_path: Path) -> None:
    lines: list[str] = []
    training = VirtualTraining(seed=1)
    prove(request(), training, tmp_path / "proof", now_s=training.time, announce=lines.append)

    assert [line for line in lines if "block" not in line and not line.startswith("SIMULATED: ")] == []
    assert "registered" in next(line for line in lines if "SHA-256" in line)


def test_too_noisy_pilot_registers_nothing(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match=r"rounds to show a saving of 2\.0%, and 60 may run"):
        proved(tmp_path / "proof", VirtualTraining(seed=1, block_sigma_ratio=0.1))

    assert not (tmp_path / "proof" / REGISTRATION).exists()


class Undated(VirtualTraining):
    """Energies of some blocks are not measured, of the first ones unless the range is changed."""

    undated_blocks = range(3)
    num_blocks = 0

    def run_block(self, arm: Arm, *, num_iterations: int) -> Block:
        block = super().run_block(arm, num_iterations=num_iterations)
        self.num_blocks += 1
        if self.num_blocks - 1 not in self.undated_blocks:
            return block
        return replace(block, iterations=tuple(replace(own, gpu_energy_j=None) for own in block.iterations))


def test_pilot_repeats_rounds_that_cannot_be_used(tmp_path: Path) -> None:
    found = proved(tmp_path / "proof", Undated(seed=3))

    assert found.conclusion is Conclusion.SAVES
    assert read_registration(tmp_path / "proof").design.pilot_rounds == 4
    assert len((tmp_path / "proof" / PILOT).read_text().splitlines()) == 2 * (4 + 2)
    assert check_folder(tmp_path / "proof").holds


def test_pilot_without_usable_rounds_ends(tmp_path: Path) -> None:
    training = Undated(seed=3)
    training.undated_blocks = range(10_000)

    with pytest.raises(ProofError, match="0 usable pilot rounds; at least 4 are needed"):
        proved(tmp_path / "proof", training)

    assert len((tmp_path / "proof" / PILOT).read_text().splitlines()) == 2 * 8


def without_energies(undated: range, path: Path) -> Verdict:
    """Run a proof whose pilot, of eight blocks, is sound, and some of whose blocks have no energies."""
    training = Undated(seed=3)
    training.undated_blocks = undated
    return cast("Verdict", proved(path, training))


def test_void_rounds_are_repeated_until_as_many_as_registered_are_sound(tmp_path: Path) -> None:
    path = tmp_path / "proof"

    found = without_energies(range(9, 10), path)

    registration = read_registration(path)
    lines = (path / BLOCKS).read_text().splitlines()
    assert found.conclusion is Conclusion.SAVES
    assert (found.num_rounds, found.num_void_rounds) == (registration.design.num_rounds, 1)
    assert len(lines) == 2 * (registration.design.num_rounds + 1)
    assert check_folder(path).holds
    fewer = is_caught(path, removed_repetition, tmp_path / "copy")
    assert fewer is not None
    assert f"{len(lines) - 2} blocks; {len(lines)} were registered" in fewer


def test_with_too_many_void_rounds_there_is_no_verdict(tmp_path: Path) -> None:
    found = without_energies(range(8, 10_000), tmp_path / "proof")

    registration = read_registration(tmp_path / "proof")
    assert found.conclusion is Conclusion.NO_VERDICT
    assert f"{registration.most_rounds} rounds are void: too few iterations with a measured energy" in found.sentence
    assert check_folder(tmp_path / "proof").verdict is not None


@pytest.mark.parametrize(
    ("error", "in_pilot_ratio", "later_ratio", "reason"),
    [("block_sigma_ratio", 0.002, 0.08, "underpowered"), ("disturbed_ratio", 0.02, 0.4, "void")],
)
def test_a_proof_that_becomes_noisier_than_its_pilot_has_no_verdict(
    error: str, in_pilot_ratio: float, later_ratio: float, reason: str, tmp_path: Path
) -> None:
    class Worsening(VirtualTraining):
        def run_block(self, arm: Arm, *, num_iterations: int) -> Block:
            setattr(self, error, in_pilot_ratio if self.num_iterations < 8 * 22 else later_ratio)
            return super().run_block(arm, num_iterations=num_iterations)

    found = proved(tmp_path / "proof", Worsening(seed=4))

    assert found.conclusion is Conclusion.NO_VERDICT
    assert reason in found.sentence


def test_losses_that_differ_are_no_saving(tmp_path: Path) -> None:
    class Wrong(VirtualTraining):
        def run_block(self, arm: Arm, *, num_iterations: int) -> Block:
            self.loss_noise = 0.3 if arm.name == OURS else 1e-6
            return super().run_block(arm, num_iterations=num_iterations)

    found = proved(tmp_path / "proof", Wrong(seed=4))

    assert found.conclusion is Conclusion.LOSSES_DIFFER


@pytest.mark.parametrize(
    ("saving_ratio", "slowdown_ratio", "conclusion"),
    [(0.1, 0.05, Conclusion.SAVES_BUT_SLOWER), (0.0, 0.0, Conclusion.NOT_SHOWN), (-0.1, 0.0, Conclusion.COSTS)],
)
def test_conclusion_follows_from_both_intervals(
    tmp_path: Path, saving_ratio: float, slowdown_ratio: float, conclusion: Conclusion
) -> None:
    training = VirtualTraining(seed=2, saving_ratio=saving_ratio, slowdown_ratio=slowdown_ratio)

    assert proved(tmp_path / "proof", training).conclusion is conclusion


def test_host_energy_is_measured_in_the_meters_own_windows(tmp_path: Path) -> None:
    training = VirtualTraining(seed=6, meter=VirtualMeter(lag_s=3.2, gain=1.07))

    found = proved(tmp_path / "proof", training)

    assert found.alignment is not None
    assert found.alignment.is_aligned
    assert abs(found.alignment.lag_s - 3.2) <= found.alignment.lag_error_s < 0.5
    assert abs(found.alignment.gain - 1.07) <= found.alignment.gain_error < 0.02
    host = found.arms[0].host_saving
    assert host is not None
    true_saving = 0.12 * 1.07 * 1200 / (1.07 * 1200 + 250)  # the rest of the host draws 250 W all the time
    assert host.low < true_saving < host.high


def test_three_arms_are_each_compared_with_the_first(tmp_path: Path) -> None:
    arms = (Arm(BASELINE_ARM, "full-speed"), Arm(OURS, "bubble-aware"), Arm("uniform", "uniform"))

    found = proved(tmp_path / "proof", VirtualTraining(seed=6), arms=arms)

    assert [own.arm for own in found.arms] == [OURS, "uniform"]
    assert all(own.saving is not None for own in found.arms)


def test_folder_that_is_no_proof_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no registration\.json"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (lambda values: values["design"].update(num_rounds=10**9), "1000000000 rounds; from 8 to 10000"),
        (lambda values: values["design"].update(num_rounds="many"), "num_rounds is 'many'; expected"),
        (lambda values: values["design"].update(block_iterations=10**12), "iterations per block"),
        (lambda values: values["rules"].update(max_void_ratio=1e300), "max_void_ratio"),
        (lambda values: values.update(order_seed=[1]), "order_seed is [1]"),
        (lambda values: values.update(hypothesis="a\x1b[2J" * 10, surprise="\u202e"), "unknown field"),
        (lambda values: values.update(arms=values["arms"] * 20), "arms"),
    ],
)
def test_registration_of_a_stranger_is_refused_in_one_line(
    proof: Path, tmp_path: Path, changed: Callable[[dict[str, Any]], None], problem: str
) -> None:
    there = shutil.copytree(proof, tmp_path / "there")
    signed_by_a_stranger(there, registration=changed)

    (found,) = check_folder(there).problems

    assert problem in found
    assert found.isprintable()


@pytest.mark.parametrize(
    "block",
    [
        lambda _: "[" * 100_000,
        lambda _: '{"a":' * 100_000,
        lambda _: "",
        lambda _: [],
        lambda values: values | {"iterations": 5},
        lambda values: values | {"iterations": [[1, 2]]},
        lambda values: values | {"iterations": [["x", "y", "z", None]] * 40},
        lambda values: values | {"iterations": [[k, 1e15, 0, 0] for k in range(40)]},
        lambda values: values | {"gpu_power": [[float("inf"), 1]]},
        lambda values: values | {"gpu_power": [[1, 1], [1, 1e15], [0, -1]]},
        lambda values: values | {"losses": [None]},
        lambda values: values | {"begun_at_s": None},
        lambda values: values | {"arm": 7},
    ],
)
def test_raw_data_of_a_stranger_never_raise(
    proof: Path, tmp_path: Path, block: Callable[[dict[str, Any]], object]
) -> None:
    there = shutil.copytree(proof, tmp_path / "there")
    signed_by_a_stranger(there, block=block)

    checked = check_folder(there)

    assert checked.problems
    assert all(problem.isprintable() for problem in checked.problems)


def test_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be a folder that does not exist yet"):
        proved(tmp_path, VirtualTraining(seed=1))


def test_check_does_not_depend_on_the_host(proof: Path, tmp_path: Path) -> None:
    """Another working directory, locale, time zone, hash seed, and none of the variables of this process."""
    program = (
        "import sys; from pathlib import Path; from gpuenergyd_prove.folder import check_folder;"
        " found = check_folder(Path(sys.argv[1])); sys.exit(0 if found.holds else '; '.join(found.problems))"
    )
    environ = {"PYTHONHASHSEED": "17", "LC_ALL": "C", "TZ": "Pacific/Chatham", "PYTHONPATH": str(ROOT)}

    done = finished([sys.executable, "-c", program, str(proof)], cwd=tmp_path, env=environ)

    assert done.returncode == 0, done.stderr
