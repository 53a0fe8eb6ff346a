"""Several hosts: the same tokens as on one, and one clear end for all ranks when something is wrong with one of them.

Hosts are network namespaces joined by a pair of virtual interfaces: that needs root, and is skipped without.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from runtime.interfaces import interface_towards
from store.session import open_store

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hosts"), pytest.mark.timeout(900)]

Checkpoint = Callable[..., Path]

CAEE = Path(sys.executable).with_name("caee")
PROGRAM = Path(__file__).with_name("host_rank.py")
PRELOADED = ["transformers.modeling_utils", "runtime.worker", "runtime.summary", "runtime.policy.fast"]

ENOUGH_SECONDS = 180
GIVE_UP_SECONDS = 30
"""How long the other ranks may take to end once one of them is gone."""

PATIENT, IMPATIENT = 150.0, 2.0
"""How long ranks wait for each other to join: on a busy machine, or where waiting is in vain."""


class Hosts:
    """Two hosts with addresses of their own."""

    def __init__(self, names: tuple[str, str], addresses: tuple[str, str]) -> None:
        self.names = names
        self.addresses = addresses


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two network namespaces, joined."""
    names = (f"caee{os.getpid()}a", f"caee{os.getpid()}b")
    made = Hosts(names, ("10.213.7.1", "10.213.7.2"))
    try:
        for name in names:
            ip("netns", "add", name)
        first, second = names
        ip("link", "add", "veth0", "netns", first, "type", "veth", "peer", "name", "veth0", "netns", second)
        for name, address in zip(names, made.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "veth0", "up")
        yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here, which need root and iproute2: {error}")
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=ENOUGH_SECONDS)


class Rank:
    """One rank: its process, its own store, and what it said."""

    def __init__(self, folder: Path, number: int) -> None:
        self.store = folder / f"store{number}.db"
        self.steps = folder / f"steps{number}.jsonl"
        self.output = folder / f"output{number}"
        self.errors = folder / f"errors{number}"
        self.process: ForkServerProcess | None = None

    def join(self, seconds: float) -> int:
        assert self.process is not None
        self.process.join(seconds)
        code = self.process.exitcode
        assert code is not None, f"still running: {self.errors.read_text()}"
        return code

    def complaints(self) -> list[str]:
        """The lines of its only error; nobody sees a traceback, or half a document."""
        text = self.errors.read_text()
        assert "Traceback" not in text
        assert self.output.read_text() == ""
        lines = text.splitlines()
        starts = [n for n, line in enumerate(lines) if line.startswith("caee: ")]
        assert len(starts) == 1, text
        return lines[starts[0] :]

    def runs(self) -> int:
        """How many its store holds, which is sound."""
        with open_store(str(self.store)) as store:
            assert store.check() == ()
            return len(store.entries())


class Place:
    """A folder, a model, and the ranks of one test, whatever is left of which is ended with it."""

    def __init__(self, folder: Path, model: Path, port: int) -> None:
        self.folder = folder
        self.model = model
        self.port = port
        self.ranks: list[Rank] = []

    def arguments(self, rank: Rank, model: Path | None = None, *more: str) -> list[str]:
        options = {
            "devices": "cpu:1",
            "theta": 0.7,
            "pairs": 1,
            "max-new-tokens": 6,
            "cache-experts": 4,
            "dtype": "float32",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return ["run", str(model or self.model), *words, "--no-quality", "--json", "--store", str(rank.store), *more]

    def start(
        self,
        number: int,
        *more: str,
        hosts: Hosts | None = None,
        model: Path | None = None,
        join_seconds: float = PATIENT,
    ) -> Rank:
        """Rank ``number`` of two, one on each of ``hosts``."""
        rank = Rank(self.folder, number)
        environment = {
            "RANK": str(number),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1" if hosts is None else hosts.addresses[0],
            "MASTER_PORT": str(self.port),
            "OMP_NUM_THREADS": "1",
        }
        options = {
            "namespace": None if hosts is None else hosts.names[number],
            "environment": environment,
            "arguments": self.arguments(rank, model, *more),
            "output": rank.output,
            "errors": rank.errors,
            "join_seconds": join_seconds,
        }
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the command sets it, before torch is imported
        rank.process = context.Process(target=runpy.run_path, args=(str(PROGRAM), {"OPTIONS": options}))
        rank.process.start()
        self.ranks.append(rank)
        return rank


@pytest.fixture
def place(tmp_path: Path, checkpoint: Checkpoint) -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    made = Place(tmp_path, checkpoint("qwen3_moe", top_k=4, saving={"max_shard_size": "100KB"}), port)
    yield made
    for rank in made.ranks:
        assert rank.process is not None
        rank.process.kill()
        rank.process.join()


def figures(output: str) -> dict[str, Any]:
    """Of a run's document, what does not depend on the clock."""
    document = json.loads(output)
    return {
        kind: {
            key: document[kind][key] for key in ("output_digest", "misses_per_device", "removed_importance", "tokens")
        }
        for kind in ("baseline", "with_policy")
    }


def wait_until(condition: Callable[[], bool], rank: Rank) -> None:
    deadline = time.monotonic() + ENOUGH_SECONDS
    while not condition():
        assert rank.process is not None
        assert rank.process.is_alive(), rank.errors.read_text()
        assert time.monotonic() < deadline, rank.errors.read_text()
        time.sleep(0.05)


def test_two_hosts_under_torchrun_give_the_tokens_of_one_whose_second_rank_comes_late(
    place: Place, hosts: Hosts
) -> None:
    first = place.start(0)
    time.sleep(2.0)
    second = place.start(1)
    codes = [rank.join(ENOUGH_SECONDS) for rank in (first, second)]
    assert codes == [0, 0], first.errors.read_text() + second.errors.read_text()
    assert (first.runs(), second.runs()) == (1, 0)
    assert second.output.read_text() == ""

    launched = [_torchrun(place, hosts, number) for number in (0, 1)]
    try:
        answers = [process.communicate(timeout=ENOUGH_SECONDS) for process in launched]
    finally:
        for process in launched:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert [process.returncode for process in launched] == [0, 0], [errors[-2000:] for _, errors in answers]
    assert answers[1][0] == ""
    assert figures(answers[0][0]) == figures(first.output.read_text())
    assert figures(answers[0][0])["with_policy"]["removed_importance"] > 0


def _torchrun(place: Place, hosts: Hosts, number: int) -> subprocess.Popen[str]:
    """torchrun on one of the hosts, with one rank. Nothing says which network interface is to be used."""
    rank = Rank(place.folder, number + 2)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
    launcher += ["--nproc-per-node", "1", "--master-addr", hosts.addresses[0], "--master-port", str(place.port)]
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    return subprocess.Popen(
        ["ip", "netns", "exec", hosts.names[number], *launcher, "--no-python", str(CAEE), *place.arguments(rank)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )


@pytest.mark.parametrize("missing", [True, False])
def test_a_shard_missing_or_cut_off_on_one_host_ends_both_with_its_name(
    place: Place, hosts: Hosts, missing: bool
) -> None:
    broken = place.folder / "broken"
    shutil.copytree(place.model, broken)
    lost = sorted(broken.glob("*.safetensors"))[1]
    if missing:
        lost.unlink()
    else:
        lost.write_bytes(lost.read_bytes()[:-100])
    first = place.start(0, hosts=hosts)
    second = place.start(1, hosts=hosts, model=broken)
    assert second.join(ENOUGH_SECONDS) == 1
    assert first.join(GIVE_UP_SECONDS) == 1
    own, told = second.complaints(), first.complaints()
    assert lost.name in own[0]
    assert told[0].startswith(f"caee: rank 1 on {socket.gethostname()} failed: ")
    assert lost.name in told[0]
    assert told[1:] == own[1:]  # what to do
    assert (first.runs(), second.runs()) == (0, 0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_on_another_host_ends_this_one(place: Place, hosts: Hosts, victim: int) -> None:
    ranks = [
        place.start(0, "--pairs", "5000", "--steps-jsonl", str(place.folder / "steps"), hosts=hosts),
        place.start(1, "--pairs", "5000", hosts=hosts),
    ]
    steps = place.folder / "steps"
    wait_until(lambda: steps.exists() and steps.read_bytes().count(b'"baseline"') > 3, ranks[0])
    killed, left = ranks[victim], ranks[1 - victim]
    assert killed.process is not None
    killed.process.kill()
    assert left.join(GIVE_UP_SECONDS) == 1
    complaint, hint = left.complaints()
    assert "an exchange between the ranks failed" in complaint
    assert "another rank probably ended" in hint
    assert (ranks[0].runs(), ranks[1].runs()) == (0, 0)
    assert steps.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("numbers", [(0,), (1,)])
def test_a_rank_that_never_comes(place: Place, numbers: tuple[int, ...]) -> None:
    (rank,) = [place.start(number, join_seconds=IMPATIENT) for number in numbers]
    assert rank.join(ENOUGH_SECONDS) == 1
    complaint, hint = rank.complaints()
    assert "this rank could not join the other 1" in complaint
    assert "start all ranks within 25 s" in hint
    assert rank.runs() == 0


def test_a_port_in_use_ends_all_ranks(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.port)):
        ranks = [place.start(number, join_seconds=IMPATIENT) for number in (0, 1)]
        assert [rank.join(ENOUGH_SECONDS) for rank in ranks] == [1, 1]
    for rank in ranks:
        complaint, hint = rank.complaints()
        assert "this rank could not join the other 1" in complaint
        assert "a free port" in hint
        assert rank.runs() == 0


def test_the_interface_between_hosts_is_found(hosts: Hosts) -> None:
    text = "import sys; from runtime.interfaces import interface_towards; print(interface_towards(sys.argv[1]))"
    for name in hosts.names:
        for address in hosts.addresses:
            found = subprocess.run(
                ["ip", "netns", "exec", name, sys.executable, "-c", text, address],
                capture_output=True,
                text=True,
                timeout=ENOUGH_SECONDS,
            )
            assert found.stdout == "veth0\n", found.stderr


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "no.such.host.invalid", "x" * 300])
def test_no_interface_is_named_for_this_host_alone(host: str) -> None:
    assert interface_towards(host) is None
