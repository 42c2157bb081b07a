"""`gpuenergyd run`: unmodified programs join; without a daemon they run unchanged."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd_trainers.autostart.launching import HOOK_FOLDER, ROOTS_VARIABLE, launch_environment
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon

RUN_LIMIT_S = 400.0
NUM_RANKS = 2
NUM_MICROBATCHES = 6
NUM_STEPS = 12
UNMODIFIED = f"""
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
stage = PipelineStage(model, rank, world_size, torch.device("cpu"))
schedule = Schedule1F1B(stage, {NUM_MICROBATCHES}, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for _ in range({NUM_STEPS}):
    batch = torch.randn({NUM_MICROBATCHES}, 8, generator=generator)
    losses = []
    if rank == 0:
        schedule.step(batch)
    elif rank == world_size - 1:
        schedule.step(target=batch, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
    with open(sys.argv[1] + str(rank), "a") as out:
        print(*(float(loss.detach()).hex() for loss in losses), file=out)
    dist.barrier()
dist.destroy_process_group()
"""


def environment(*folders: Path, **overrides: str) -> dict[str, str]:
    """Return this process's environment without settings of the job, with folders first in PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")}
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **overrides}


def run(command: Sequence[str], environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )


def torchrun(script: Path, out: Path) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS),
        str(script), str(out),
    ]  # fmt: skip


def losses_of(folder: Path, name: str) -> list[str]:
    return [(folder / f"{name}{rank}").read_text() for rank in range(NUM_RANKS)]


@pytest.mark.thorough
@pytest.mark.torch
def test_an_unmodified_pipeline_under_torchrun_joins_with_equal_losses(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.pipelining")  # for the forks too
    from tests.trainers.forked_programs import run_forked  # noqa: PLC0415  imports torch

    script = tmp_path / "train.py"
    script.write_text(UNMODIFIED)
    run_forked(tmp_path, script, [str(tmp_path / "plain-")], num_ranks=NUM_RANKS)
    with FakeDaemon(tmp_path) as daemon:
        hooked = launch_environment(
            environment(
                GPUENERGYD_SOCKET=daemon.socket_path,
                GPUENERGYD_GPU_UUID=",".join(f"GPU-{rank}" for rank in range(NUM_RANKS)),
                GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO="0.02",
                GPUENERGYD_JOB_POLICY="uniform",
            )
        )
        joined = run(torchrun(script, tmp_path / "joined-"), hooked, tmp_path)
        registrations = [daemon.registrations.get(timeout=WAIT_LIMIT_S) for _ in range(NUM_RANKS)]
        reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]

    assert joined.returncode == 0, joined.stderr
    assert losses_of(tmp_path, "joined-") == losses_of(tmp_path, "plain-")
    assert losses_of(tmp_path, "plain-")[-1].strip()
    planned = make_schedule("1f1b", NUM_RANKS, NUM_MICROBATCHES)
    for registration in registrations:
        rank = registration["pp_rank"]
        order = [[str(i.kind), i.microbatch_index, 0] for i in planned.orders[rank]]
        tokens = {token for token, owner in daemon.tokens.items() if owner == rank}
        mine = [report for report in reports if report["rank_token"] in tokens]
        assert registration["order"] == order
        assert (registration["job_name"], registration["gpu_uuid"]) == ("train", f"GPU-{rank}")
        assert (registration["policy"], registration["max_slowdown_ratio"]) == ("uniform", 0.02)
        assert mine
        assert all([row[:3] for row in report["instructions"]] == order for report in mine)


def fake_module(folder: Path, module: str) -> Path:
    """Create the packages around a module and return the path of its file."""
    *parents, name = module.split(".")
    for parent in parents:
        folder /= parent
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    return folder / f"{name}.py"


PRINTS_ENVIRONMENT = """
import json, sys
import torch.distributed.pipelining.schedules as schedules
print(json.dumps({
    "hidden": getattr(sys.modules.get("sitecustomize"), "MARK", None),
    "path": [entry for entry in sys.path if "autostart" in entry],
    "step": schedules.PipelineScheduleSingle.step.__code__.co_filename,
    "finders": [type(finder).__name__ for finder in sys.meta_path],
}))
"""


def look(environ: dict[str, str], folder: Path) -> dict[str, Any]:
    done = run([sys.executable, "-c", PRINTS_ENVIRONMENT], environ, folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply


def test_without_a_daemon_no_framework_is_patched(tmp_path: Path) -> None:
    """With a stand-in for torch, which is quicker to import; the test above joins the real one."""
    fake = fake_module(tmp_path / "fake", "torch.distributed.pipelining.schedules")
    fake.write_text("class PipelineScheduleSingle:\n    def step(self): return 'stepped'\n")
    there = tmp_path / "there.sock"
    there.touch()
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("MARK = 'the one that was there before'\n")
    base = environment(hidden, tmp_path / "fake")

    absent = look(launch_environment({**base, "GPUENERGYD_SOCKET": str(tmp_path / "nobody.sock")}), tmp_path)
    present = look(launch_environment({**base, "GPUENERGYD_SOCKET": str(there)}), tmp_path)

    assert absent["step"].endswith("pipelining/schedules.py")
    assert present["step"].endswith("autostart/joining.py")
    assert absent["hidden"] == present["hidden"] == "the one that was there before"
    assert absent["path"] == present["path"] == []


def test_the_hook_finds_only_this_projects_packages(tmp_path: Path) -> None:
    environ = {**launch_environment(environment()), "PYTHONPATH": ""}
    find = "import importlib.util as u; print(*(u.find_spec(n) is not None for n in {names!r}))"
    bare = [sys.executable, "-S", "-c"]
    setup = f"import sys; sys.path.insert(0, {str(HOOK_FOLDER)!r}); import sitecustomize; "
    names = ("gpuenergyd", "gpuenergyd_trainers", "gpuenergyd_policies", "typer", "torch")

    hooked = run([*bare, setup + find.format(names=names)], environ, tmp_path)
    broken = run([*bare, setup + find.format(names=names)], {**environ, ROOTS_VARIABLE: "/nowhere"}, tmp_path)

    assert (hooked.stdout.split(), hooked.stderr) == (["True", "True", "False", "False", "False"], "")
    assert (broken.stdout.split(), broken.stderr) == (["False"] * 5, "")


def test_the_hook_imports_next_to_nothing(tmp_path: Path) -> None:
    program = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    plain = json.loads(run([sys.executable, "-c", program], environment(), tmp_path).stdout)
    hooked = json.loads(run([sys.executable, "-c", program], launch_environment(environment()), tmp_path).stdout)

    added = {name.partition(".")[0] for name in set(hooked) - set(plain)}
    assert added <= {"gpuenergyd_trainers", "sitecustomize", "importlib", "collections", "warnings", "_collections_abc"}


@pytest.mark.parametrize("module", ["torch.distributed.pipelining.schedules", "lightning.pytorch.trainer.trainer"])
def test_an_unknown_framework_version_is_not_patched_and_logged_once(tmp_path: Path, module: str) -> None:
    there = tmp_path / "there.sock"
    there.touch()
    fake_module(tmp_path / "fake", module).write_text(
        "class Strange:\n    __slots__ = ()\n"
        "    def step(self): return 'stepped'\n"
        "    def fit(self): return 'stepped'\n"
    )
    environ = launch_environment(environment(tmp_path / "fake", GPUENERGYD_SOCKET=str(there)))
    method = "step" if module.endswith("schedules") else "fit"
    program = f"from {module} import Strange; strange = Strange(); print(strange.{method}(), strange.{method}())"

    done = run([sys.executable, "-c", program], environ, tmp_path)

    assert done.stdout.split() == ["stepped", "stepped"]
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "cannot be joined" in done.stderr
