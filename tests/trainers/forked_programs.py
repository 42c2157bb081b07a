"""Runs of a program in forks of the test's process, which has imported torch and the framework already.

Importing them takes most of the time of a new interpreter. What depends on the import, such as `gpuenergyd run`, needs
one: see tests/trainers/unchanged_programs.py.
"""

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

RUN_LIMIT_S = 400.0


def run_forked(
    folder: Path, script: Path, arguments: Sequence[str] = (), *, num_ranks: int = 1, **variables: str
) -> list[str]:
    """Run a script once per rank, with the environment that torchrun gives it; return the outputs by rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        **variables,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_RUN_ID": folder.name,
    }
    context = multiprocessing.get_context("fork")
    outputs = [folder / f"output-{rank}" for rank in range(num_ranks)]
    ranks: list[BaseProcess] = []
    for rank, output in enumerate(outputs):
        own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else variables
        ranks.append(context.Process(target=_run, args=(script, arguments, output, own)))
        ranks[-1].start()
    try:
        for process in ranks:
            process.join(RUN_LIMIT_S)
        texts = [output.read_text(encoding="utf-8") for output in outputs]
        errors = [output.with_suffix(".errors").read_text(encoding="utf-8") for output in outputs]
        assert [process.exitcode for process in ranks] == [0] * num_ranks, "\n".join([*texts, *errors])
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return texts


def _run(script: Path, arguments: Sequence[str], output: Path, variables: dict[str, str]) -> None:
    torch.set_num_threads(1)
    for name in [name for name in os.environ if name.startswith("GPUENERGYD_")]:
        del os.environ[name]
    os.environ.update(variables)
    os.chdir(output.parent)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    with (
        output.open("w", buffering=1, encoding="utf-8") as sys.stdout,
        output.with_suffix(".errors").open("w", buffering=1, encoding="utf-8") as sys.stderr,
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as error:
            os._exit(1 if error.code else 0)
        except BaseException as error:  # noqa: BLE001  the parent asserts the exit status
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            os._exit(1)
