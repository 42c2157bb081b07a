"""Phases of the Hugging Face Trainer in real processes; requires the package."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.trainers.parallel_phases import check_phases

pytestmark = [pytest.mark.torch, pytest.mark.thorough]


def test_ranks_of_a_framework_register_their_phases(tmp_path: Path) -> None:
    check_phases("huggingface", tmp_path)
