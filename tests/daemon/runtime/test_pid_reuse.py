"""Reuse of a client's pid: the pidfd still refers to the process that connected."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.daemon_process import ROOT

REUSE = """
import os, signal, socket, tempfile
from pathlib import Path
from gpuenergyd.daemon.runtime.peer_credentials import is_dead, open_pidfd, peer_credentials
from gpuenergyd.errors import JobError

folder = tempfile.mkdtemp()
listener = socket.socket(socket.AF_UNIX)
listener.bind(folder + "/s")
listener.listen()
client = os.fork()
if client == 0:
    for _ in range(2):
        held = socket.socket(socket.AF_UNIX)
        held.connect(folder + "/s")
        held.detach()
    signal.pause()
first, second = listener.accept()[0], listener.accept()[0]
peer = peer_credentials(first)
assert peer.pid == client
known = open_pidfd(first, peer)
assert not is_dead(known)
os.kill(client, 9)
os.waitpid(client, 0)
Path("/proc/sys/kernel/ns_last_pid").write_text(str(client - 1))
another = os.fork()
if another == 0:
    signal.pause()
assert another == client, (another, client)
told_apart = is_dead(known)
try:
    late = open_pidfd(second, peer_credentials(second))
    refused_late = is_dead(late)
except JobError:
    refused_late = True
os.kill(another, 9)
print(told_apart, refused_late)
"""


@pytest.mark.fault(38)
def test_a_process_with_the_reused_pid_of_a_client_is_not_mistaken_for_it() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("giving a process id out again needs root and unshare(1)")
    command = [unshare, "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", REUSE]

    seen = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, check=False)
    if "unshare failed" in seen.stderr or "Operation not permitted" in seen.stderr:
        pytest.skip(f"namespaces are refused here: {seen.stderr.strip()}")

    assert seen.stdout.split() == ["True", "True"], seen.stderr
