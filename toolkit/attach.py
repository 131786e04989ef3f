"""This kernel's connection to a Ray cluster that runs already, shared by all its sessions.

Ray is an extra and is imported by the first launch with `cluster=`. The toolkit never starts, grows or stops a cluster.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import SpecError


class _Connection:
    """What this kernel is attached to: the address, who uses it, and whether it was opened here."""

    lock = threading.RLock()
    users: set[object] = set()  # noqa: RUF012 (one connection per process, as in Ray itself)
    opened_here = False


def attach(cluster: str) -> Callable[[], None]:
    """Attach this kernel to a running cluster, unless it is; returns what to call when done (twice is fine).

    The last to leave closes the connection, if it was opened here: a driver that stays attached dies with the cluster.

    Args:
        cluster: "host:port" of the head, or "auto" for the address in RAY_ADDRESS.

    Raises:
        SpecError: Ray is not installed, the address is not one, no cluster answers, or Ray refuses this machine.
    """
    host, port = _address(cluster)
    ray = _import_ray(cluster)
    user = object()
    with _Connection.lock:
        if ray.is_initialized():
            there = ray.get_runtime_context().gcs_address
            if there not in (f"{host}:{port}", f"{_own_address(host)}:{port}"):
                raise SpecError(
                    f"cluster={cluster!r}: this kernel is attached to the cluster at {there} already. Close its sessions "
                    "first, or call ray.shutdown()."
                )
        else:
            _open_connection(ray, cluster, host, port)
            _Connection.opened_here = True
        _Connection.users.add(user)

    def leave() -> None:
        with _Connection.lock:
            if user in _Connection.users:
                _Connection.users.remove(user)
                if not _Connection.users and _Connection.opened_here:
                    _Connection.opened_here = False
                    ray.shutdown()

    return leave


@contextlib.contextmanager
def attached(cluster: str) -> Iterator[None]:
    """Be attached for the time of a block."""
    leave = attach(cluster)
    try:
        yield
    finally:
        leave()


def device_on(cluster: str, num_ranks: int, device: str | None) -> str:
    """The device of ranks on the attached cluster: as asked for, or GPUs if it has any.

    Raises:
        SpecError: it has fewer of them than ranks.
    """
    import ray

    have = ray.cluster_resources()
    device = device or ("cuda" if have.get("GPU") else "cpu")
    num_cpus, num_gpus = int(have.get("CPU", 0)), int(have.get("GPU", 0))
    room = min(num_cpus, num_gpus) if device == "cuda" else num_cpus
    if num_ranks > room:
        nodes = sum(node["Alive"] for node in ray.nodes())
        each = "a GPU and a CPU" if device == "cuda" else "a CPU"
        has = f"the cluster at {cluster} has {num_gpus} GPUs and {num_cpus} CPUs on {nodes} nodes"
        ways_out = [f"ranks={room} or fewer"] if room else []
        ways_out += ["device='cpu'"] if device == "cuda" and num_cpus else []
        raise SpecError(
            f"ranks={num_ranks} on device={device!r} needs {each} for each rank; {has}. "
            + (f"Use {', or '.join(ways_out)}." if ways_out else "Add nodes.")
        )
    return device


def _import_ray(cluster: str) -> Any:
    try:
        import ray
    except ImportError:
        raise SpecError(f"cluster={cluster!r} needs Ray, which is not installed: pip install 'toolkit[ray]'") from None
    return ray


def _address(cluster: str) -> tuple[str, int]:
    address = cluster
    if cluster == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
        if not address:  # Ray itself would take the last cluster started here, even one that is gone
            raise SpecError(
                "cluster='auto' takes the address in RAY_ADDRESS, which is not set; give it: cluster='host:6379'."
            )
    if address.startswith("ray://"):
        raise SpecError(
            f"cluster={address!r}: Ray's client protocol cannot stream what ranks say. Start the notebook on a node of the "
            "cluster (its head, say) and give 'host:port' of the head (port 6379 unless chosen otherwise)."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise SpecError(f"cluster={address!r} is not an address; give 'host:port' of the head, or 'auto' for RAY_ADDRESS.")
    return host, int(port)


def _own_address(host: str) -> str:
    """The address Ray knows a host by: it turns loopback into that of this machine."""
    import ray

    found = socket.gethostbyname(host)
    return str(ray.util.get_node_ip_address()) if found.startswith("127.") else found


def _open_connection(ray: Any, cluster: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=5).close()  # Ray would try for minutes
    except OSError as error:
        raise SpecError(
            f"cluster={cluster!r}: nothing answers at {host}:{port} ({error}). `ray status` on the head shows its address; "
            "`ray start --head` starts a cluster."
        ) from None
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=f"{host}:{port}", log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises five kinds here, bare Exception among them
        raise SpecError(
            f"cluster={cluster!r}: Ray refused this kernel: {error} The kernel must run on a node of the cluster, with the "
            "cluster's Python and Ray, and, where it asks for a token, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN set."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray puts its own in its place


def versions() -> dict[str, str]:
    """What has to be the same in the kernel and on every node."""
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "nemo-automodel")}
    toolkit = f"{importlib.metadata.version('toolkit')} (source {hashlib.sha256(source).hexdigest()[:8]})"
    return {"Python": ".".join(map(str, sys.version_info[:2])), "toolkit": toolkit, **packages}
