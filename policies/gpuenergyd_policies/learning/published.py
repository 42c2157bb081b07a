"""Coefficients of curves that others measured, by GPU model and family of models, and the prior for a GPU model.

Each entry describes one published table by six numbers (see `shape`), found by least squares over all its stages and
clocks. Source: the SOSP'24 artifact of Perseus, repository ml-energy/zeus, branch kronos, commit 1b1c4a9d, Apache-2.0:
GPT-3 175B on A100-SXM and A40 from stage profiles, all others from iterations during training.
"""

from collections.abc import Collection
from dataclasses import dataclass

from gpuenergyd.count_text import count_text
from gpuenergyd_policies.learning.shape import GENERIC, Coefficients, CurvePrior, pooled

_OTHER_BOARD_FACTOR = 2.0
"""On the spread where only another board of the chip was measured: its power limit and voltages differ."""


@dataclass(frozen=True, slots=True)
class PublishedCurve:
    """One table: chip and board of the GPU, family of models, and its coefficients."""

    chip: str
    board: str
    family: str
    time: tuple[float, float, float]
    power: tuple[float, float, float]


PUBLISHED = (
    PublishedCurve("A100", "SXM", "gpt3", (0.924, 0.066, 0.003), (-2.411, 2.064, -1.040)),
    PublishedCurve("A100", "PCIE", "bert", (0.881, 0.062, -0.003), (-1.118, 0.827, -0.984)),
    PublishedCurve("A100", "PCIE", "gpt3", (0.748, 0.055, -0.017), (-1.194, 0.854, -0.868)),
    PublishedCurve("A100", "PCIE", "t5", (0.720, 0.048, -0.003), (-1.249, 0.839, -0.969)),
    PublishedCurve("A40", "", "gpt3", (0.563, 0.018, -0.012), (-1.589, 1.187, -0.045)),
    PublishedCurve("A40", "", "bert", (0.651, 0.037, -0.008), (-1.544, 0.860, -1.000)),
    PublishedCurve("A40", "", "gpt3", (0.462, 0.019, -0.021), (-1.366, 1.046, -0.957)),
    PublishedCurve("A40", "", "t5", (0.505, 0.018, -0.008), (-2.042, 1.291, -1.381)),
)


def prior_for(gpu_model_name: str, *, without_families: Collection[str] = ()) -> CurvePrior:
    """Return the prior for a GPU model as the driver names it; the generic one if nothing was measured on its chip."""
    words = gpu_model_name.upper().replace("_", "-").replace("-", " ").split()
    of_chip = [own for own in PUBLISHED if own.chip in words and own.family not in without_families]
    if not of_chip:
        return GENERIC
    of_board = [own for own in of_chip if not own.board or any(word.startswith(own.board) for word in words)]
    used = of_board or of_chip
    families = sorted({own.family for own in used})
    prior = pooled(
        [(own.time, own.power) for own in used],
        basis=f"published curves of {count_text(len(used), 'training')} on {used[0].chip} ({', '.join(families)})",
    )
    return prior if of_board else CurvePrior(_wider(prior.time), _wider(prior.power), prior.basis)


def _wider(own: Coefficients) -> Coefficients:
    a, b, c = own.sigma
    return Coefficients(own.mean, (_OTHER_BOARD_FACTOR * a, _OTHER_BOARD_FACTOR * b, _OTHER_BOARD_FACTOR * c))
