"""Tags from the environment and the training program; limited, and never an exception."""

from pathlib import Path

import pytest

from gpuenergyd.client.tags import MAX_TAGS, MAX_VALUE_CHARS, find_git_commit, find_tags
from gpuenergyd.daemon.registration import checked_tags

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "train.py").touch()
    return tmp_path / "tools" / "train.py"


def git_folder(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "files",
    [
        {".git/HEAD": f"{COMMIT}\n"},
        {".git/HEAD": "ref: refs/heads/main\n", ".git/refs/heads/main": f"{COMMIT}\n"},
        {
            ".git/HEAD": "ref: refs/heads/a/b\n",
            ".git/packed-refs": f"# pack\n{OTHER} refs/heads/a\n{COMMIT} refs/heads/a/b\n",
        },
        {
            ".git": "gitdir: bare/worktrees/w\n",
            "bare/worktrees/w/HEAD": "ref: refs/heads/main\n",
            "bare/worktrees/w/commondir": "../..\n",
            "bare/refs/heads/main": f"{COMMIT}\n",
        },
    ],
    ids=["detached", "branch", "packed", "work tree"],
)
def test_the_commit_of_the_training_program_is_read_without_git(program: Path, files: dict[str, str]) -> None:
    git_folder(program.parent.parent, files)

    assert find_git_commit(program) == COMMIT
    assert dict(find_tags({}, str(program))) == {"program": "train.py", "git_commit": COMMIT}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {".git/HEAD": "ref: refs/heads/unborn\n"},
        {".git/HEAD": "rubbish"},
        {".git/HEAD": "ref: ../../../../etc/hostname\n"},
        {".git": "gitdir: nowhere"},
        {".git/HEAD": "ref: \0"},
    ],
    ids=["none", "unborn", "rubbish", "outside", "dangling", "nul"],
)
def test_without_a_readable_commit_there_is_no_such_tag(program: Path, files: dict[str, str]) -> None:
    git_folder(program.parent.parent, files)

    assert "git_commit" not in dict(find_tags({}, str(program)))


def test_user_scheduler_and_container_are_found_in_the_environment() -> None:
    environ = {
        "USER": "root",
        "SLURM_JOB_USER": "ada",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "gpt",
        "WORLD_SIZE": "16",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "HOSTNAME": "trainer-0",
        "PATH": "/bin",
    }

    assert dict(find_tags(environ, "")) == {
        "user": "ada",
        "slurm_job_id": "4711",
        "slurm_job_name": "gpt",
        "world_size": "16",
        "kubernetes_pod": "trainer-0",
    }


def test_the_users_own_tags_come_first_and_invalid_names_are_left_out() -> None:
    environ = {"GPUENERGYD_TAGS": "Team = vision,=x,no value,bad/name=1,user=me", "USER": "ada"}

    assert find_tags(environ, "") == (("team", "vision"), ("user", "me"))


def test_tags_are_limited_in_number_length_and_size_and_printable() -> None:
    own = ",".join(f"t{k}={'x' * 1000}" for k in range(100))
    tags = find_tags({"GPUENERGYD_TAGS": own, "SLURM_JOB_NAME": "a\nb\x1b[31m"}, "")

    many = find_tags({"GPUENERGYD_TAGS": ",".join(f"t{k}={k}" for k in range(100))}, "")

    assert {len(value) for _, value in tags} == {MAX_VALUE_CHARS}
    assert len(tags) == 15, "as many as fit into 4096 bytes"
    assert checked_tags(tags) == tuple(sorted(tags))
    assert len(many) == MAX_TAGS
    assert dict(find_tags({"SLURM_JOB_NAME": "a\nb\x1b[31m"}, "")) == {"slurm_job_name": "a b [31m"}


def test_errors_result_in_no_tags_and_no_exception() -> None:
    class Broken(dict[str, str]):
        def __getitem__(self, name: str) -> str:
            raise RuntimeError(name)

    assert find_tags(Broken({"USER": "ada"}), "") == ()
    assert find_tags({}, "\0") in {(), (("program", ""),)}
