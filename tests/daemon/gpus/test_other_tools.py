"""Programs that may have changed a GPU are named, with their pids."""

from pathlib import Path

from gpuenergyd.daemon.jobs.audit_log import suspects_text


def proc_with(folder: Path, *names: str) -> Path:
    for pid, name in enumerate(names, 10):
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "comm").write_text(f"{name}\n")
    (folder / "99").mkdir()  # has just ended
    (folder / "self").mkdir()
    return folder


def test_known_programs_are_named(tmp_path: Path) -> None:
    assert suspects_text(proc_with(tmp_path, "bash", "nv-hostengine", "nvidia-smi")) == (
        "nv-hostengine pid 11, nvidia-smi pid 12"
    )


def test_many_are_counted_and_none_is_empty(tmp_path: Path) -> None:
    assert suspects_text(proc_with(tmp_path, *["nvidia-smi"] * 5)).endswith("pid 12 and 2 more")
    (tmp_path / "none").mkdir()
    assert suspects_text(tmp_path / "none") == ""
