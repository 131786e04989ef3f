"""A real Ray cluster of two nodes on this machine: two node daemons with a CPU each, which share nothing but its address."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

#: Ray asks every node and driver for this token; whoever listens on this machine's network gets nothing without it.
AUTHENTICATION = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, Path]]:
    """Start the cluster; yields the address of its head and its folder. The environment must hold AUTHENTICATION."""
    with tempfile.TemporaryDirectory(prefix="tk-", ignore_cleanup_errors=True) as name, contextlib.ExitStack() as nodes:
        folder = Path(name)
        port = free_ports(1)[0]
        head = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
        nodes.enter_context(node(folder, *head))
        nodes.enter_context(node(folder, f"--address=127.0.0.1:{port}"))
        yield f"127.0.0.1:{port}", folder


@contextlib.contextmanager
def node(folder: Path, *arguments: str, num_cpus: int = 1) -> Iterator[subprocess.Popen[str]]:
    """Run a node daemon of the cluster in `folder`."""
    node_id, port = secrets.token_hex(28), free_ports(1)[0]
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats", f"--num-cpus={num_cpus}",
        "--object-store-memory=100000000", f"--runtime-env-agent-port={port}", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id, "RAY_raylet_start_wait_time_s": "120"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=_end_with_the_parent,
    )  # fmt: skip
    try:
        threading.Thread(target=_answer_for_the_agents, args=(process, folder, node_id, port), daemon=True).start()
        assert process.stdout is not None
        log: list[str] = []
        for line in process.stdout:
            log.append(line)
            if "Ray runtime started" in line:
                break
        else:
            raise AssertionError("".join(log))
        threading.Thread(target=process.stdout.read, daemon=True).start()  # so that it never waits for a reader
        yield process
    finally:
        _stop(process)


def _end_with_the_parent() -> None:
    """Have the system end this process if the tests are killed (prctl's PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _answer_for_the_agents(process: subprocess.Popen[str], folder: Path, node_id: str, port: int) -> None:
    """Write the port files for which a raylet waits.

    Its agents, Python processes that import Ray, write them within 15 s on an idle machine; on a busy one the raylet aborts
    (ray-project/ray#65983). The contents are the agents' own: without ray[default] they serve nothing but runtime
    environments.
    """
    session = folder / "session_latest"
    while not session.exists() and process.poll() is None:
        time.sleep(0.05)
    for name in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
        (session / f"{name}_{node_id}").write_text("-1")
    (session / f"runtime_env_agent_port_{node_id}").write_text(str(port))


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()  # `ray start --block` ends what it started
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def free_ports(n: int) -> list[int]:
    """Ports of this machine that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in sockets]
