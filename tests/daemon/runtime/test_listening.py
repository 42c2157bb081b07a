"""Listening sockets and the instance lock: stale sockets are replaced, other files are refused."""

import os
import socket
from pathlib import Path

import pytest

from gpuenergyd.daemon.runtime.listening import InstanceLock, listen
from gpuenergyd.errors import GpuEnergyError, UsageError

KINDS = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET]


@pytest.mark.fault(39)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stale_socket_is_replaced(tmp_path: Path, kind: socket.SocketKind) -> None:
    path = tmp_path / "s"
    first = listen(path, kind, group=None)
    first.close()

    second = listen(path, kind, group=None)

    with socket.socket(socket.AF_UNIX, kind) as client:
        client.connect(str(path))
    second.close()
    assert path.stat().st_mode & 0o777 == 0o660


@pytest.mark.fault(39)
@pytest.mark.parametrize("kind", KINDS)
def test_a_socket_in_use_is_not_replaced(tmp_path: Path, kind: socket.SocketKind) -> None:
    path = tmp_path / "s"
    first = listen(path, kind, group=None)

    with pytest.raises(GpuEnergyError, match="another process is already listening on"):
        listen(path, kind, group=None)

    with socket.socket(socket.AF_UNIX, kind) as client:
        client.connect(str(path))
    first.close()


@pytest.mark.fault(39, 43)
def test_files_and_symbolic_links_are_not_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    link = tmp_path / "link"
    link.symlink_to(precious)

    for path in (precious, link):
        with pytest.raises(GpuEnergyError, match="exists and is not a socket; remove it"):
            listen(path, socket.SOCK_STREAM, group=None)

    assert precious.read_text() == "data"
    assert link.is_symlink()


def test_an_unknown_group_is_refused_with_the_command_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"create it with `groupadd --system no-such-group`"):
        listen(tmp_path / "s", socket.SOCK_STREAM, group="no-such-group")

    assert not (tmp_path / "s").exists()


def test_the_socket_belongs_to_the_group_of_the_settings(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a file to a group one is not in needs root")
    import grp  # noqa: PLC0415  this test alone

    group = next(g for g in grp.getgrall() if g.gr_gid != 0)

    listener = listen(tmp_path / "s", socket.SOCK_STREAM, group=group.gr_name)
    listener.close()

    assert (tmp_path / "s").stat().st_gid == group.gr_gid


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GpuEnergyError, match=r"cannot listen on .*too long"):
        listen(tmp_path / ("x" * 120), socket.SOCK_STREAM, group=None)


def test_one_daemon_at_a_time_uses_a_runtime_directory(tmp_path: Path) -> None:
    first = InstanceLock(tmp_path / "run" / "lock").acquire()

    with pytest.raises(GpuEnergyError, match=rf"a daemon with pid {os.getpid()} already uses .*run"):
        InstanceLock(tmp_path / "run" / "lock").acquire()
    first.release()
    InstanceLock(tmp_path / "run" / "lock").acquire().release()


@pytest.mark.fault(43)
def test_a_world_writable_runtime_directory_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)

    with pytest.raises(GpuEnergyError, match="has mode 777; it must belong to uid"):
        InstanceLock(folder / "lock").acquire()


def test_a_runtime_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a folder away needs root")
    folder = tmp_path / "run"
    folder.mkdir()
    os.chown(folder, 65534, 65534)

    with pytest.raises(GpuEnergyError, match="belongs to uid 65534"):
        InstanceLock(folder / "lock").acquire()
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    InstanceLock(folder / "lock").acquire().release()
