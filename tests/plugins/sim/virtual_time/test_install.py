"""Programs that use Python's clocks, threads, sockets and event loops live in virtual time without knowing it.

Nothing restores what is replaced, so every program runs in an interpreter of its own.
"""

import subprocess
import sys
import textwrap

import pytest

BEGIN = """
import time
real_s = time.monotonic()
real_sleep, real_mono_s = time.sleep, time.monotonic
from gpuenergyd_sim.virtual_time.install import install
from gpuenergyd_sim.virtual_time.kernel import VirtualKernel
kernel = VirtualKernel(mono_ns=10**12, utc_ns=1_800_000_000 * 10**9)
install(kernel)
import asyncio, datetime, os, queue, random, secrets, select, signal, socket, threading, uuid
from concurrent.futures import ThreadPoolExecutor
"""
END = """
import sys
process = kernel.start_process("main", main)
kernel.run_until(process)
sys.stdout.flush()
os._exit(process.exit_status)  # threads that still wait never end
"""


def output_of(program: str) -> list[str]:
    """Return the lines that a program prints whose `main` runs in virtual time."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(program) + END], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_day_of_sleep_takes_a_day_of_virtual_time() -> None:
    lines = output_of("""
        def main():
            begun_s, begun_at = time.monotonic(), datetime.datetime.now(tz=datetime.UTC)
            time.sleep(86400)
            print(round(time.monotonic() - begun_s), datetime.datetime.now(tz=datetime.UTC) - begun_at)
            print(round(time.time()) - 1_800_000_000, time.process_time(), time.thread_time_ns())
            print(time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 10**12)
    """)

    assert lines[0].startswith("86400 1 day, 0:00:0")
    assert lines[1:] == ["86400 0.0 0", "87"]


def test_conditions_events_queues_and_joins_keep_their_time_limits() -> None:
    lines = output_of("""
        def main():
            event, results, condition = threading.Event(), queue.SimpleQueue(), threading.Condition()
            def late():
                time.sleep(3)
                event.set()
                with condition:
                    condition.notify_all()
            thread = threading.Thread(target=late, name="late")
            thread.start()
            begun = round(time.monotonic())
            print(event.wait(1), round(time.monotonic()) - begun)
            print(thread.is_alive(), threading.current_thread() is threading.main_thread())
            with condition:
                print(condition.wait(60), round(time.monotonic()) - begun)
            thread.join()
            print(event.is_set(), thread.is_alive())
            try:
                results.get(timeout=5)
            except queue.Empty:
                print("empty", round(time.monotonic()) - begun)
            timer = threading.Timer(7, results.put, ("on time",))
            timer.start()
            print(results.get(), round(time.monotonic()) - begun)
            lock = threading.Lock()
            lock.acquire()
            print(lock.acquire(timeout=2), lock.acquire(blocking=False), round(time.monotonic()) - begun)
            with ThreadPoolExecutor(2) as pool:
                print(list(pool.map(lambda n: (time.sleep(n), threading.get_ident() != 1)[1], [1, 1, 1])))
            print(round(time.monotonic()) - begun)
            local = threading.local()
            local.value = "mine"
            other = threading.Thread(target=lambda: print(hasattr(local, "value")))
            other.start()
            other.join()
    """)

    assert lines == [
        "False 1", "True True", "True 3", "True False", "empty 8", "on time 15", "False False 17", "[True, True, True]",
        "19", "False",
    ]  # fmt: skip


def test_an_event_loop_serves_threads_with_blocking_sockets() -> None:
    lines = output_of("""
        async def serve(path):
            async def answer(reader, writer):
                while line := await reader.readline():
                    await asyncio.sleep(2)
                    writer.write(line.upper())
                    await writer.drain()
                writer.close()
            server = await asyncio.start_unix_server(answer, path)
            print(await asyncio.to_thread(lambda: threading.current_thread().name[:7]))
            loop, stop = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(signal.SIGTERM, stop.set)
            await stop.wait()
            server.close()

        def main():
            path = f"/tmp/virtual-time-{os.getpid()}"
            server = kernel.start_process("server", lambda: asyncio.run(serve(path)))
            time.sleep(1)
            begun = round(time.monotonic())
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(1)
                client.connect(path)
                client.sendall(b"hello\\n")
                try:
                    client.recv(10)
                except TimeoutError as error:
                    print(error, round(time.monotonic()) - begun)
                client.settimeout(None)
                print(client.recv(10), round(time.monotonic()) - begun, client.getblocking())
            server.signal(signal.SIGTERM)
            readable, _, _ = select.select([server.ended_fd], [], [], 100)
            print(bool(readable), server.exit_status)
            if os.path.exists(path):  # from Python 3.13 on the server removes it
                os.unlink(path)
    """)

    assert lines == ["asyncio", "[Errno 110] timed out 1", "b'HELLO\\n' 2 True", "True 0"]


def test_unguessable_values_are_the_same_in_every_run() -> None:
    program = """
        def main():
            print(uuid.uuid4(), secrets.token_hex(4), os.urandom(3))
    """

    assert output_of(program) == output_of(program)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_killed_process_is_gone_for_its_peers(*, is_killed: bool) -> None:
    lines = output_of(f"""
        def serve(path):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen()
                connection, _ = listener.accept()
                connection.sendall(b"begun")
                time.sleep(10)
                connection.sendall(b"done")

        def main():
            path = f"/tmp/virtual-time-{{os.getpid()}}"
            server = kernel.start_process("server", lambda: serve(path))
            time.sleep(1)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                print(client.recv(10))
                if {is_killed}:
                    server.kill()
                print(client.recv(10))
            os.unlink(path)
    """)

    assert lines == ["b'begun'", "b''" if is_killed else "b'done'"]


def test_after_its_end_a_held_program_keeps_real_time() -> None:
    lines = output_of("""
        def main():
            kernel.keep_real_time(lambda: round(real_mono_s() * 10**9))
            begun, real_begun = time.monotonic(), real_mono_s()
            time.sleep(0.2)
            print(time.monotonic() - begun >= 0.2, real_mono_s() - real_begun >= 0.2)
    """)

    assert lines == ["True True"]
