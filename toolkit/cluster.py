"""The third engine: ranks on a cluster, as Ray actors.

Ray places the processes and moves the bytes; the gang rules are those of `ranks.Ranks`.

One bundle of a placement group per rank: a CPU, and a GPU where the ranks compute on GPUs. Ray shows each actor only its
own GPU, so every rank calls it device 0. Ranks are numbered node by node: neighbours in an FSDP shard share a node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pickle
import queue
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from toolkit.attach import attach, versions
from toolkit.engines import connect
from toolkit.errors import RanksLost, SpecError
from toolkit.ranks import Message, Ranks, execute, set_stop

# ---- the engine


@dataclasses.dataclass
class _Held:
    """What a gang holds on the cluster."""

    leave: Callable[[], None]
    group: Any = None
    actors: list[Any] = dataclasses.field(default_factory=list)


class ClusterRanks(Ranks):
    """Actors on a cluster that runs already, one per rank, numbered node by node."""

    #: Seconds that other jobs have to free the CPUs and GPUs the ranks need.
    placement_seconds = 30.0

    def __init__(self, n: int, cluster: str, device: str) -> None:
        super().__init__()
        self.n = n
        self._held = _Held(attach(cluster))
        self._finalizer = weakref.finalize(self, _end, self._held)  # a dropped session ends its ranks like a closed one
        self._streams: list[Any] = []
        self._inbox: deque[tuple[int, Message]] = deque()
        self._heard_last = 0
        #: Process id and node address of each rank.
        self.pids: list[int] = []
        self.nodes: list[str] = []
        try:
            self._start(cluster, device)
        except BaseException:
            self._finalizer()
            raise

    def _start(self, cluster: str, device: str) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
        group = self._held.group = ray.util.placement_group([needs] * self.n, strategy="PACK")
        if not group.wait(self.placement_seconds):
            free = {kind: int(ray.available_resources().get(kind, 0)) for kind in needs}
            raise SpecError(
                f"ranks={self.n} found no room on the cluster at {cluster} within {self.placement_seconds:.0f} s: each rank "
                f"needs {_amounts(needs)} on one node, and it has {_amounts(free)} free in all. Close other sessions or "
                "jobs (`ray status` lists what is in use), or use fewer ranks."
            )
        node_of = ray.util.placement_group_table(group)["bundles_to_node_id"]
        names = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in ray.nodes()}
        bundles = number_by_node(node_of, names)
        placed = [node_of[bundle] for bundle in bundles]
        self.nodes = [names[node] for node in placed]
        rank_class = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(_Rank)
        for rank, bundle in enumerate(bundles):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.n),
                "LOCAL_RANK": "0" if device == "cuda" else str(placed[:rank].count(placed[rank])),
            }
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            options = {"num_cpus": 1, "num_gpus": needs.get("GPU", 0), "scheduling_strategy": where}
            self._held.actors.append(rank_class.options(**options).remote(env, len(set(placed)) == 1))
        self._check_nodes([actor.describe.remote() for actor in self._held.actors])

    def _check_nodes(self, descriptions: list[Any]) -> None:
        """Refuse nodes whose software is not the kernel's: what is sent refers to it by name."""
        import ray

        here = versions()
        self._addresses: list[str] = []
        for rank, description in enumerate(descriptions):
            try:
                pid, address, there = ray.get(description)
            except ray.exceptions.RayError as error:
                raise SpecError(
                    f"rank {rank} cannot start on node {self.nodes[rank]}: {str(error).strip().splitlines()[-1]} Every node "
                    f"needs the kernel's software: {', '.join(f'{name} {v}' for name, v in here.items())}."
                ) from error
            other = [f"{name} {there[name]} (here {v})" for name, v in here.items() if there[name] != v]
            if other:
                raise SpecError(
                    f"node {self.nodes[rank]} has {', '.join(other)}. Install the same on every node and on this machine."
                )
            self.pids.append(pid)
            self._addresses.append(address)

    def raise_if_lost(self) -> None:
        """See `Ranks.raise_if_lost`."""
        import ray

        if self.lost is None and not ray.is_initialized():
            self.lost = RanksLost(
                "this kernel was detached from the cluster (ray.shutdown()?), which ended the ranks; their state is lost. "
                "session.restart() goes back to the last save."
            )
        super().raise_if_lost()

    def connect(self, device: str) -> None:
        host, port = self.call(_open_store, self._addresses[0])[0]
        self.call(_join, device, host, port)

    def _send(self, rank: int, blob: bytes) -> None:
        if rank == 0:
            self._streams.clear()
        self._streams.append(self._held.actors[rank].run.options(num_returns="streaming").remote(blob))

    def _next(self, pending: set[int], timeout: float) -> tuple[int, Message] | None:
        import ray

        if not self._inbox:
            # Whoever spoke last is asked last, so that a rank that talks all the time does not hide another's death.
            in_turn = sorted(pending, key=lambda rank: (rank - self._heard_last - 1) % self.n)
            ready, _ = ray.wait([self._streams[rank] for rank in in_turn], timeout=timeout, fetch_local=False)
            if not ready:
                return None
            rank = self._heard_last = next(rank for rank in in_turn if self._streams[rank] is ready[0])
            try:
                self._inbox.extend((rank, message) for message in ray.get(next(ready[0])))
            except ray.exceptions.RayError as error:  # of whatever kind: the task's own errors come as messages
                return rank, ("dead", f"on node {self.nodes[rank]}: {_reason(error)}")
        return self._inbox.popleft()

    @staticmethod
    def _unpack(data: Any) -> Any:
        payload, buffers = data
        # One copy out of Ray's shared memory: its own views are read-only, and hold the object store while they live.
        return pickle.loads(payload, buffers=[bytearray(buffer) for buffer in buffers])

    def _ask_to_stop(self, call: int) -> None:
        for actor in self._held.actors:
            actor.ask_to_stop.options(concurrency_group="control").remote(call)

    def _kill(self) -> None:
        _remove(self._held)
        with self._lock:  # a call in another thread must have noticed before its connection may go
            self._finalizer()


def _remove(held: _Held) -> None:
    import ray

    if ray.is_initialized():  # if not, Ray has ended them (and ray.kill would start a cluster of its own)
        with contextlib.suppress(ray.exceptions.RayError, ConnectionError):  # the cluster is gone, and they with it
            for actor in held.actors:
                ray.kill(actor)
            if held.group is not None:
                ray.util.remove_placement_group(held.group)
    held.actors, held.group = [], None


def _end(held: _Held) -> None:
    _remove(held)
    held.leave()


def _amounts(resources: dict[str, int]) -> str:
    return " and ".join(f"{amount} {kind}{'s' if amount != 1 else ''}" for kind, amount in resources.items())


def _reason(error: BaseException) -> str:
    """What ended an actor, in Ray's words without its ids and its list of guesses."""
    ids = ("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:")
    lines = [line.strip() for line in str(error).partition("Some common causes")[0].splitlines()]
    return f"{type(error).__name__}: {' '.join(line for line in lines if line and not line.startswith(ids))}".strip()


def number_by_node(node_of: dict[int, str], names: dict[str, str]) -> list[int]:
    """The bundle of each rank: bundles of a node stand together, nodes in the order of their names.

    Args:
        node_of: the id of the node that each bundle is on.
        names: the name of each node, by id; two daemons on one machine share theirs.
    """
    return sorted(node_of, key=lambda bundle: (names[node_of[bundle]], node_of[bundle], bundle))


# ---- in a rank's process


class _Rank:
    """The actor. Calls run on one persistent thread: OpenMP's settings and CUDA's context are per thread."""

    def __init__(self, env: dict[str, str], on_one_node: bool) -> None:
        import ray

        self._address = "127.0.0.1" if on_one_node else str(ray.util.get_node_ip_address())
        os.environ.update(env)
        if on_one_node:  # nobody outside this machine may reach a rank
            os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
        else:  # gloo would take what the host's name resolves to, which may be loopback; a site's own choice stands
            interface = _interface_of(self._address)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        self._calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            execute(self._calls.get(), self._said.put, _pack)

    def describe(self) -> tuple[int, str, dict[str, str]]:
        return os.getpid(), self._address, versions()

    def run(self, blob: bytes) -> Iterator[list[Message]]:
        """Run a call; yields what there is to say as it comes, the answer last."""
        self._calls.put(blob)
        while True:
            messages = [self._said.get()]
            while not self._said.empty():
                messages.append(self._said.get())
            yield messages
            if messages[-1][0] in ("ok", "err"):
                return

    def ask_to_stop(self, call: int) -> None:
        """Called in a concurrency group of its own, so beside a running call."""
        set_stop(call)


def _pack(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Arrays beside their pickle, so that Ray moves them through shared memory instead of pickling them again."""
    buffers: list[pickle.PickleBuffer] = []
    return cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def _interface_of(address: str) -> str:
    """The network interface that carries an IPv4 address (SIOCGIFADDR; the standard library has no such list)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise RuntimeError(f"no network interface of this node carries its Ray address {address}")


_stores: list[Any] = []


def _open_store(address: str) -> tuple[str, int] | None:
    """Open the rendezvous on rank 0, on the address that reaches all ranks only and on whatever port is free."""
    from torch._C._distributed_c10d import TCPStore

    if os.environ["RANK"] != "0":
        return None
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    world_size = int(os.environ["WORLD_SIZE"])
    _stores.append(
        TCPStore(address, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    )
    return address, port


def _join(device: str, address: str, port: int) -> None:
    import torch
    from torch._C._distributed_c10d import TCPStore

    from toolkit import imports  # noqa: F401 (before the first call needs them)

    torch.set_num_threads(1)  # the CPU its bundle reserves
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _stores[0] if rank == 0 else TCPStore(address, port, world_size)
    connect(rank, world_size, device, store, gpu=int(os.environ["LOCAL_RANK"]))
