"""Ranks on a real Ray cluster of two nodes: the gang rules hold as they do for local ranks, and the numbers are the same."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import toolkit as tk
from tests.faults import fault
from tests.ray_cluster import AUTHENTICATION, free_ports, node, two_nodes
from tests.test_ranks import OddError, gone, interrupt_later
from toolkit.attach import attach, device_on
from toolkit.cluster import ClusterRanks, number_by_node
from toolkit.errors import RanksLost, SessionClosed, SpecError
from toolkit.ranks import stop_requested

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parent.parent
FIELDS: dict[str, Any] = {
    "model": tk.tiny_policy(), "ranks": 2, "num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_new_tokens": 5,
    "learning_rate": 1e-4,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster_in_folder() -> Iterator[tuple[str, Path]]:
    """Two nodes with a CPU each, so that two ranks are on two nodes: the address of the head, and its folder."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no ray: pip install 'toolkit[ray]'")
    assert "ray" not in sys.modules  # it reads the token as it is imported
    with pytest.MonkeyPatch.context() as patch:
        for name, value in AUTHENTICATION.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        with two_nodes() as address_and_folder:
            yield address_and_folder


@pytest.fixture(scope="module")
def cluster(cluster_in_folder: tuple[str, Path]) -> str:
    """The address of the cluster's head."""
    return cluster_in_folder[0]


@pytest.fixture
def gang(cluster: str) -> Iterator[ClusterRanks]:
    """One rank without a process group, which needs no torch."""
    ranks = ClusterRanks(1, cluster, "cpu")
    yield ranks
    ranks.close()


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def free_cpus(cluster: str, at_least: int, seconds: float = 10.0) -> bool:
    """Whether the cluster, which must be alive, has that many CPUs free before long."""
    import ray

    leave = attach(cluster)
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if ray.available_resources().get("CPU", 0) >= at_least:
                return True
            time.sleep(0.1)
        return False
    finally:
        leave()


@pytest.fixture(scope="class")
def session(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tk.Session]:
    with tk.launch(cluster=cluster, checkpoint_dir=tmp_path_factory.mktemp("saved"), **FIELDS) as session:
        yield session
        pids = session._ranks.pids  # type: ignore[attr-defined]
    session.close()
    assert gone(pids)
    assert free_cpus(cluster, 2)


class TestOneSession:
    """A session on two nodes, from its first step through an interrupt and a killed rank to its end."""

    def test_each_rank_is_on_a_node_of_its_own_and_both_meet_beyond_loopback(self, session: tk.Session) -> None:
        where = session.run(
            lambda policy: (
                node_id(),
                *(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")),
            )
        )
        assert where[0][0] != where[1][0]
        assert [w[1:4] for w in where] == [("0", "0", "2"), ("1", "0", "2")]
        assert "lo" not in (where[0][4], where[1][4])
        assert session.run(lambda policy: dist.get_rank()) == [0, 1]

    def test_what_a_rank_prints_arrives_while_the_call_runs(
        self, session: tk.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heard = tmp_path / "heard"
        written: list[str] = []

        class Listener:
            def write(self, text: str) -> None:
                written.append(text)
                if "waiting" in text:
                    heard.touch()

            def flush(self) -> None:
                pass

        def speak_and_wait(policy: Any, signal_file: str) -> bool:
            print("waiting on", dist.get_rank())
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and not Path(signal_file).exists():
                time.sleep(0.02)
            return Path(signal_file).exists()

        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Listener())
            assert session.run(speak_and_wait, str(heard)) == [True, True]
        assert sorted("".join(written).splitlines()) == ["[rank 0] waiting on 0", "[rank 1] waiting on 1"]

    def test_an_error_arrives_as_it_was_raised_with_its_rank(self, session: tk.Session) -> None:
        def fail(policy: Any) -> None:
            if dist.get_rank() == 1:
                raise OddError(7)

        with pytest.raises(OddError) as error:
            session.run(fail)
        assert error.value.code == 7
        assert error.value.rank == 1  # type: ignore[attr-defined]
        assert "raise OddError(7)" in error.value.__notes__[0]
        assert session.run(lambda policy: dist.get_rank()) == [0, 1]

    def test_large_arrays_come_back_as_ordinary_ones(self, session: tk.Session) -> None:
        results = session.run(lambda policy: {"x": np.arange(1_000_000, dtype=np.float32) + dist.get_rank(), "n": [1, 2]})
        for rank, result in enumerate(results):
            np.testing.assert_array_equal(result["x"], np.arange(1_000_000, dtype=np.float32) + rank)
            result["x"] += 1  # Ray's own views would refuse
            assert result["n"] == [1, 2]

    def test_steps_through_interrupts_and_a_killed_rank_are_those_of_undisturbed_local_ranks(
        self, session: tk.Session
    ) -> None:
        def loop(policy: Any) -> None:
            while not stop_requested():
                time.sleep(0.05)
            raise KeyboardInterrupt

        session.grpo_step()
        started = time.monotonic()
        interrupt_later(0.5)
        with pytest.raises(KeyboardInterrupt):
            session.run(loop)
        assert time.monotonic() - started < 5
        interrupt_later(0.3)
        with pytest.raises(KeyboardInterrupt, match=r"steps; they are in session.history"):
            session.grpo_step(100)
        session.grpo_step()

        def die_in_a_collective(policy: Any) -> None:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))

        pids, there = session._ranks.pids, session._ranks.nodes[1]  # type: ignore[attr-defined]
        started = time.monotonic()
        with pytest.raises(RanksLost) as lost:
            session.run(die_in_a_collective)
        assert time.monotonic() - started < 5
        assert str(lost.value).startswith(f"rank 1 died (on node {there}: ActorDiedError: ")
        assert lost.value.rank == 1
        assert gone(pids)
        assert "no step was lost" in session.restart()
        session.grpo_step()

        with tk.launch(**FIELDS) as local:
            local.run(lambda policy: torch.set_num_threads(1))  # as many as a rank's bundle reserves
            local.grpo_step(len(session.history))
            assert [r.metrics for r in session._records] == [r.metrics for r in local._records]  # bit for bit
            np.testing.assert_array_equal(session.logprobs([[1, 5, 9, 7]]), local.logprobs([[1, 5, 9, 7]]))


def test_a_dropped_gang_ends_its_actors(cluster: str) -> None:
    ranks = ClusterRanks(1, cluster, "cpu")
    pids = ranks.pids
    del ranks
    gc.collect()
    assert gone(pids)
    assert free_cpus(cluster, 2)


def test_closing_one_of_two_sessions_leaves_the_other(cluster: str) -> None:
    first, second = ClusterRanks(1, cluster, "cpu"), ClusterRanks(1, cluster, "cpu")
    first.close()
    assert second.call(lambda: 2) == [2]
    second.close()
    assert gone([*first.pids, *second.pids])


@pytest.mark.parametrize("end", ["ranks.call(time.sleep, 60)", "sys.exit()"], ids=["killed", "exits"])
def test_actors_end_with_the_kernel(cluster: str, end: str) -> None:
    code = f"""
        import sys, time
        from toolkit.cluster import ClusterRanks
        ranks = ClusterRanks(1, {cluster!r}, "cpu")
        print(*ranks.pids, flush=True)
        {end}
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(p) for p in process.stdout.readline().split()]
        assert len(pids) == 1
        if end == "sys.exit()":
            assert process.wait(20) == 0
        process.kill()
    assert gone(pids)
    assert free_cpus(cluster, 2)


def test_a_connection_closed_by_the_user_is_named_and_not_opened_again(gang: ClusterRanks) -> None:
    import ray

    ray.shutdown()
    with pytest.raises(RanksLost, match=r"detached from the cluster \(ray.shutdown\(\)\?\)"):
        gang.call(int)
    gang.close()
    assert not ray.is_initialized()
    assert gone(gang.pids)


def test_a_second_ctrl_c_kills_ranks_that_do_not_listen(gang: ClusterRanks) -> None:
    interrupt_later(0.5)
    interrupt_later(1.0)
    with pytest.raises(RanksLost, match="Ctrl-C was pressed twice while rank 0 was busy"):
        gang.call(time.sleep, 60)
    assert gone(gang.pids)


def test_more_ranks_than_the_cluster_has_are_refused_with_what_it_has(cluster: str) -> None:
    with pytest.raises(SpecError, match=r"ranks=3 .*has 0 GPUs and 2 CPUs on 2 nodes. Use ranks=2 or fewer\."):
        tk.launch(cluster=cluster, **{**FIELDS, "ranks": 3, "num_prompts_per_step": 9})
    with pytest.raises(SpecError, match=r"device='cuda'.*has 0 GPUs and 2 CPUs on 2 nodes. Use device='cpu'\."):
        tk.launch(cluster=cluster, device="cuda", **FIELDS)


@fault(
    "the cluster is too small, busy, unreachable, or has other software on a node",
    "`SpecError`: what it has, and the way out",
    "everything; no actor is left",
)
def test_a_busy_cluster_is_named_and_nothing_stays(
    gang: ClusterRanks, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ClusterRanks, "placement_seconds", 0.5)
    with pytest.raises(SpecError, match=r"no room on the cluster .* needs 1 CPU on one node, and it has 1 CPU free in all"):
        ClusterRanks(2, cluster, "cpu")
    assert gang.call(lambda: 1) == [1]
    gang.close()
    gang.close()
    assert gone(gang.pids)
    assert not ray.is_initialized()
    with pytest.raises(SessionClosed):
        gang.call(int)
    assert free_cpus(cluster, 2)


def test_other_software_on_the_nodes_is_refused(cluster: str, tmp_path: Path) -> None:
    """The kernel's copy of the toolkit differs in one line from that on the nodes."""
    package = shutil.copytree(ROOT / "toolkit", tmp_path / "copy" / "toolkit")
    (package / "models.py").write_text((package / "models.py").read_text() + "\nCHANGED = True\n")
    code = f"from toolkit.cluster import ClusterRanks\nClusterRanks(1, {cluster!r}, 'cpu')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "copy")}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "SpecError: node" in run.stderr
    assert "has toolkit 0.1.0 (source " in run.stderr
    assert "Install the same on every node and on this machine." in run.stderr
    assert free_cpus(cluster, 2)


def test_addresses_that_cannot_be_attached_to_are_refused(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    closed = free_ports(1)[0]
    for wrong, message in {
        "auto": "RAY_ADDRESS, which is not set",
        "ray://head:10001": "cannot stream what ranks say",
        "head": "is not an address",
        f"127.0.0.1:{closed}": "nothing answers",
    }.items():
        with pytest.raises(SpecError, match=message):
            tk.launch(cluster=wrong, **FIELDS)
        assert not ray.is_initialized()
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    leave = attach("auto")
    with pytest.raises(SpecError, match="is attached to the cluster at"):
        attach("10.0.0.1:6379")
    leave()
    leave()
    assert not ray.is_initialized()


def test_a_missing_ray_is_named_with_its_extra() -> None:
    code = "import sys; sys.modules['ray'] = None\nimport toolkit as tk\ntk.launch(model=tk.tiny_policy(), cluster='a:1')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "SpecError: cluster='a:1' needs Ray, which is not installed: pip install 'toolkit[ray]'" in run.stderr


def test_ranks_are_numbered_node_by_node() -> None:
    names = {"a": "one", "b": "two", "c": "two"}
    assert number_by_node({0: "c", 1: "a", 2: "b", 3: "a", 4: "c"}, names) == [1, 3, 2, 0, 4]


@fault(
    "a node of the cluster dies",
    "`RanksLost`, naming rank and node (a killed rank: within 5 s)",
    "the notebook; `session.restart()` on what is left",
)
def test_gpus_are_masked_and_a_lost_node_is_named(cluster_in_folder: tuple[str, Path]) -> None:
    """A third node with two CPUs and two GPUs (Ray takes our word for them); then it dies."""
    cluster, folder = cluster_in_folder
    with node(folder, f"--address={cluster}", "--num-gpus=2", num_cpus=2) as third:
        leave = attach(cluster)
        assert device_on(cluster, 2, None) == "cuda"
        with pytest.raises(SpecError, match=r"has 2 GPUs and 4 CPUs on 3 nodes. Use ranks=2 or fewer, or device='cpu'\."):
            device_on(cluster, 3, None)
        ranks = ClusterRanks(2, cluster, "cuda")
        leave()
        names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "GLOO_SOCKET_IFNAME")
        seen = ranks.call(lambda: [os.environ[name] for name in names])
        assert seen == [["0", "0", "lo"], ["1", "0", "lo"]]  # one node: loopback is enough
        ranks.close()

        ranks = ClusterRanks(4, cluster, "cpu")
        places = ranks.call(node_id)
        assert sorted(places, key=places.index) == places  # the two of one node stand together
        assert len(set(places)) == 3
        assert ranks.call(lambda: os.environ["LOCAL_RANK"]) == [str(places[:r].count(places[r])) for r in range(4)]
        os.killpg(third.pid, signal.SIGKILL)
        with pytest.raises(RanksLost, match=r"rank \d died \(on node") as lost:
            ranks.call(time.sleep, 60)
        assert places.count(places[lost.value.rank]) == 2  # type: ignore[index]
