"""``caee run`` as it is started from a shell: processes, signals, exit codes, and one JSON document."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from caee_cli.main import run_app
from caee_cli.running import crowding_notes
from probes.devices import find_devices
from probes.text import plural
from store.session import open_store

Checkpoint = Callable[..., Path]

CAEE = Path(sys.executable).with_name("caee")
LINES = [
    "Hello there",
    "And he said",
    "Now is the",
    "Of man's first",
    "It was the best",
    "Call me",
    "Sing, O",
    "In the",
]
HELD_OUT = "It was the best of times, it was the worst of times, it was the age of wisdom."
ENOUGH_SECONDS = 120
GIVE_UP_SECONDS = 30
"""How long the ranks of a run may take to end once one of them is gone."""


class Workplace:
    """A model, texts, a store and a folder for temporary files, and the arguments that name them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.store = folder / "store.db"
        self.prompts = folder / "prompts.txt"
        self.prompts.write_text("\n".join(LINES))
        self.held_out = folder / "held_out.txt"
        self.held_out.write_text(HELD_OUT)
        self.temporary = folder / f"temporary{'-' * 80}"  # longer than the path of a socket may be
        self.temporary.mkdir()

    def arguments(self, **changes: str | int | None) -> list[str]:
        """Those of ``caee run``; a change to None leaves an option out, to the empty text makes it a flag."""
        options: dict[str, str | int | None] = {
            "devices": "cpu:1",
            "theta": "0.7",
            "prompts": str(self.prompts),
            "held-out": str(self.held_out),
            "store": str(self.store),
            "pairs": 1,
            "max-new-tokens": 8,
            "cache-experts": 4,
            **{name.replace("_", "-"): value for name, value in changes.items() if name != "model"},
        }
        written = [str(changes.get("model", self.model)), "--json"]
        for name, value in options.items():
            if value is not None:
                written += [f"--{name}", *([str(value)] if value != "" else [])]
        return ["run", *written]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(self.temporary)}

    def run(
        self, *, launcher: list[str] | None = None, **changes: str | int | None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*(launcher or []), str(CAEE), *self.arguments(**changes)],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder,
            timeout=ENOUGH_SECONDS,
        )

    @contextlib.contextmanager
    def started(self, **changes: str | int | None) -> Iterator[subprocess.Popen[str]]:
        """The command in a process group of its own; whatever is left of it is ended with the block."""
        process = subprocess.Popen(
            [str(CAEE), *self.arguments(**changes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.folder,
            start_new_session=True,
        )
        family = [psutil.Process(process.pid)]
        try:
            yield process
            family += children(process)
        finally:
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()

    def wait_for(self, done: int, process: subprocess.Popen[str]) -> None:
        """Until so many passes of the run are complete."""
        for _ in range(ENOUGH_SECONDS * 20):
            for file in self.temporary.rglob("progress.json"):
                with contextlib.suppress(OSError, ValueError):
                    if json.loads(file.read_text())["done"] >= done:
                        return
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        raise AssertionError("the run did not get that far")

    def runs(self) -> int:
        with open_store(str(self.store)) as store:
            assert store.check() == ()
            return len(store.entries())


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def forks(process: subprocess.Popen[str], generation: int) -> list[psutil.Process]:
    """The server that imports for all ranks (generation 1), or the ranks, which are its forks (generation 2)."""
    found = []
    for child in children(process):
        with contextlib.suppress(psutil.Error):
            if any("multiprocessing.forkserver" in word for word in child.cmdline()):
                found.append(child)
    servers = [child for child in found if child.ppid() == process.pid]
    return servers if generation == 1 else [child for child in found if child not in servers]


def wait_for_forks(process: subprocess.Popen[str], generation: int) -> None:
    deadline = time.monotonic() + ENOUGH_SECONDS
    while not forks(process, generation):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def complaints(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("caee: ")]


@pytest.fixture
def workplace(tmp_path: Path, checkpoint: Checkpoint) -> Workplace:
    return Workplace(tmp_path, checkpoint("qwen3_moe", top_k=4))


def document_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "batch_size"), [("cpu:1", 1), ("cpu:2", 8), ("cpu:4", 8)])
def test_the_document_of_a_run(workplace: Workplace, devices: str, batch_size: int) -> None:
    count = int(devices[-1])
    brake = "1e-6:sample_every=2,mean_over=1,hold=2"
    done = workplace.run(devices=devices, batch_size=batch_size, check_ranks="", brake=brake)
    document = document_of(done)
    assert document["brake"]["budget"] == 1e-6
    assert document["brake"]["samples"] > 0
    assert document["brake"]["layer_steps"] > document["brake"]["braked_layer_steps"]
    assert document["schema"] == "caee.run/1"
    assert [device["index"] for device in document["devices"]] == list(range(count))
    assert document["policy"]["name"] == "caee"
    assert document["policy"]["theta"] == 0.7
    assert document["tier"] == "disk"
    for name in ("baseline", "with_policy"):
        statistics = document[name]
        assert statistics["ttft_seconds"]["median"] > 0
        assert statistics["tpot_seconds"]["ci95"] is None  # of one pair
        assert statistics["ttft_seconds"]["ci95"] is None
        assert statistics["tokens"] == batch_size * 8
        assert len(statistics["misses_per_device"]) == count
    for gain in document["gain"].values():
        assert gain["ratio"] > 0
        assert (gain["ci95"], gain["outside_noise"]) == (None, False)
    assert set(document["quality"]) >= {
        "nll_baseline", "nll_policy", "perplexity_ratio", "mean_kl", "top1_agreement", "tokens",
    }  # fmt: skip
    for layer in document["layers"]:
        assert len(layer["device_cost_before"]) == len(layer["device_cost_after"]) == count
    assert document["predicted"] is None
    assert any("calibrat" in warning for warning in document["warnings"])
    assert document["run_id"] in done.stderr
    assert workplace.runs() == 1


@pytest.mark.slow
def test_the_same_seed_gives_the_same_tokens_and_fetches(workplace: Workplace) -> None:
    first, second = (document_of(workplace.run(devices="cpu:2", batch_size=4, quality=None)) for _ in range(2))
    assert first["quality"] == second["quality"]
    for name in ("baseline", "with_policy"):
        for key in ("output_digest", "misses_per_device", "removed_importance", "rerouted_slots"):
            assert first[name][key] == second[name][key], (name, key)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_the_first_one_reports(workplace: Workplace) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = workplace.run(launcher=launcher, devices="cpu:2")
    assert [device["index"] for device in document_of(done)["devices"]] == [0, 1]
    assert done.stderr.count("Stored run") == 1
    assert workplace.runs() == 1


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_one_message(workplace: Workplace) -> None:
    with workplace.started(devices="cpu:2", pairs=5000) as process:
        workplace.wait_for(2, process)
        victim, _ = forks(process, 2)
        victim.kill()
        _, errors = process.communicate(timeout=GIVE_UP_SECONDS)
        assert process.returncode == 1
        assert re.search("rank [01] was killed by SIGKILL", errors)
        assert len(complaints(errors)) == 1
        assert "Traceback" not in errors
        assert "dmesg" in errors
        assert children(process) == []
    assert workplace.runs() == 0


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(workplace: Workplace) -> None:
    with workplace.started(devices="cpu:2", pairs=5000) as process:
        workplace.wait_for(1, process)
        ranks = forks(process, 2)
        assert len(ranks) == 2
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(ranks, timeout=GIVE_UP_SECONDS)
        assert alive == []
    assert workplace.runs() == 0


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_an_interrupted_run_keeps_its_complete_pairs(workplace: Workplace, devices: str) -> None:
    with workplace.started(devices=devices, pairs=5000) as process:
        workplace.wait_for(4, process)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=GIVE_UP_SECONDS)
        assert process.returncode == 130
        assert output == ""
        assert "interrupted; kept run" in errors
        assert len(complaints(errors)) == 1
        assert "Traceback" not in errors
        assert children(process) == []
    with open_store(str(workplace.store)) as store:
        assert store.check() == ()
        run = store.run()
    assert f"kept run {run.run_id} with its {run.workload.pairs} complete pair" in errors
    assert run.workload.pairs >= 1
    assert run.quality is None


@pytest.mark.slow
@pytest.mark.parametrize("generation", [1, 2])
def test_a_run_interrupted_while_it_starts_keeps_nothing(workplace: Workplace, generation: int) -> None:
    with workplace.started(devices="cpu:2", pairs=5000) as process:
        wait_for_forks(process, generation)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=GIVE_UP_SECONDS)
        assert process.returncode == 130
        assert output == ""
        assert len(complaints(errors)) == 1
        assert "nothing was kept" in errors
        assert "Traceback" not in errors
        assert children(process) == []
    assert workplace.runs() == 0


@pytest.mark.slow
def test_a_truncated_checkpoint_is_one_message_from_all_ranks(workplace: Workplace) -> None:
    broken = workplace.folder / "broken"
    shutil.copytree(workplace.model, broken)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    done = workplace.run(devices="cpu:2", model=str(broken))
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(complaints(done.stderr)) == 1
    assert "is cut off or damaged" in done.stderr
    assert "→ download or copy the file again" in done.stderr
    assert workplace.runs() == 0


# Without processes of their own: what is refused before anything is started ------------------------------------------


def refused(workplace: Workplace, capsys: pytest.CaptureFixture[str], **changes: str | int | None) -> tuple[int, str]:
    code = run_app(workplace.arguments(**changes))
    output, errors = capsys.readouterr()
    assert output == ""
    assert len(complaints(errors)) == 1
    assert "→" in errors
    assert "Traceback" not in errors
    return code, errors


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"model": "/no/such/folder"}, 1, "there is no model folder /no/such/folder"),
        ({"theta": "1.5"}, 2, "theta=1.5 is out of range for rule cir"),
        ({"brake": "0"}, 2, "a brake's budget of 0.0 is not a positive number"),
        ({"brake": "0.1:hold=long"}, 2, "--brake 0.1:hold=long: invalid literal"),
        ({"theta": None, "policy": "caee:rule=cir,theta=1.5"}, 2, "theta=1.5 is out of range for rule cir"),
        ({"policy": "caeee"}, 2, "unknown policy 'caeee'"),
        ({"policy": "router"}, 2, "theta"),
        ({"devices": "tpu:3"}, 2, "does not name devices"),
        ({"devices": "cpu:0"}, 2, "at least one device is needed"),
        ({"devices": "cuda:7"}, 1, "no GPU"),
        ({"tier": "tape"}, 2, "--tier tape is unknown"),
        ({"cache": "lfu:decay=2"}, 2, "decay"),
        ({"batch_size": 0}, 2, "--batch-size 0 is too small"),
        ({"max_new_tokens": 1}, 2, "--max-new-tokens 1 is too small"),
        ({"max_new_tokens": None, "output_len": 1}, 2, "--max-new-tokens 1 is too small"),
        ({"concurrency": 0}, 2, "--batch-size 0 is too small"),
        ({"concurrency": 4, "batch_size": 4}, 2, "--batch-size and --concurrency are two names"),
        ({"output_len": 8}, 2, "--max-new-tokens and --output-len are two names"),
        ({"input_len": 0}, 2, "--input-len 0 is too small"),
        ({"input_len": 100_000}, 2, "100,000 prompt tokens and 8 new ones are more than the"),
        ({"max_new_tokens": 100_000}, 2, "1 prompt token and 100,000 new ones are more than the"),
    ],
)
def test_wrong_options_are_refused(
    workplace: Workplace,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str | int | None],
    code: int,
    message: str,
) -> None:
    found, errors = refused(workplace, capsys, **changes)
    assert (found, message in errors) == (code, True), errors


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_prompts_without_a_prompt_are_refused(
    workplace: Workplace, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    workplace.prompts.write_text(text)
    code, errors = refused(workplace, capsys)
    assert code == 1
    assert "holds no prompt" in errors


def test_texts_that_cannot_be_read_are_refused(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there is no wrong usage, as in every command."""
    code, errors = refused(workplace, capsys, prompts=str(workplace.folder / "absent.txt"))
    assert (code, "cannot read" in errors) == (1, True)
    workplace.held_out.write_bytes(b"\xff\xfe\x00")
    code, errors = refused(workplace, capsys)
    assert code == 1
    assert "UTF-8" in errors


def test_a_store_that_cannot_be_written_is_refused_before_the_work(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace.folder / "file").write_text("no folder")
    code, errors = refused(workplace, capsys, store=str(workplace.folder / "file" / "store.db"))
    assert code == 1
    assert "file" in errors


CHEAPLY = """
import json, sys
from caee_cli.main import run_app
codes = [run_app(arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([codes, [name for name in ("torch", "transformers", "numba") if name in sys.modules]]))
"""


def test_what_is_wrong_is_said_before_anything_heavy_is_imported(workplace: Workplace) -> None:
    """torch and transformers take seconds to import."""
    without_config, cut_off = workplace.folder / "without-config", workplace.folder / "cut-off"
    for broken in (without_config, cut_off):
        shutil.copytree(workplace.model, broken)
    (without_config / "config.json").unlink()
    file = cut_off / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (workplace.folder / "file").write_text("no folder")
    faults: list[tuple[int, dict[str, str | int | None]]] = [
        (1, {"model": "/no/such/folder"}),
        (1, {"model": str(without_config)}),
        (1, {"model": str(cut_off)}),
        (2, {"input_len": 100_000}),
        (1, {"prompts": "/no/such/file"}),
        (1, {"store": str(workplace.folder / "file" / "store.db")}),
        (2, {"policy": "caeee"}),
    ]
    lines = [workplace.arguments(**{"devices": None, **changes}) for _, changes in faults]
    lines.append(["trace", "record", str(cut_off), "-o", str(workplace.folder / "trace.parquet")])
    done = subprocess.run(
        [sys.executable, "-c", CHEAPLY, json.dumps(lines)],
        capture_output=True,
        text=True,
        env=workplace.environment,
        cwd=workplace.folder,
        timeout=ENOUGH_SECONDS,
    )
    assert len(complaints(done.stderr)) == len(lines), done.stderr
    assert json.loads(done.stdout) == [[*(code for code, _ in faults), 1], []]


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_model_folder_is_refused(
    workplace: Workplace, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    broken = workplace.folder / "broken"
    shutil.copytree(workplace.model, broken)
    (broken / lost).unlink()
    code, errors = refused(workplace, capsys, model=str(broken))
    assert code == 1
    assert str(broken) in errors


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"model_type": "no_such_family"}'),
        ("config.json", '{"model_type": "qwen3_moe", "num_attention_heads": 0}'),
        ("config.json", '{"model_type": "qwen3_moe", "hidden_size": -3}'),
        ("config.json", '{"model_type": "qwen3_moe", "num_experts": 4, "num_hidden_layers": 2}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
    ],
)
def test_a_model_folder_of_nonsense_is_refused(
    workplace: Workplace, capsys: pytest.CaptureFixture[str], file: str, text: str
) -> None:
    broken = workplace.folder / "broken"
    shutil.copytree(workplace.model, broken)
    (broken / file).write_text(text)
    code, errors = refused(workplace, capsys, model=str(broken))
    assert code == 1
    assert "unexpected" not in errors
    assert str(broken) in errors


def test_code_in_a_checkpoint_is_never_run(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    broken = workplace.folder / "broken"
    shutil.copytree(workplace.model, broken)
    config = json.loads((broken / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "evil.py").write_text(f"open({str(workplace.folder / 'ran')!r}, 'w')\nclass Config: pass\n")
    assert refused(workplace, capsys, model=str(broken))[0] == 1
    assert not (workplace.folder / "ran").exists()


# wrong usage, said before anything is started -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--devices", "gpu"], 2, "their kinds are cpu and cuda"),
        (["--devices", "gpu:2"], 2, "their kinds are cpu and cuda"),
        (["--devices", "cpu:33"], 2, "33 devices for 32 experts per layer"),
        (["--devices", "cpu:64", "--tier", "host"], 2, "at most 32 with --devices"),
        (["--cache", "belady", "--devices", "cpu:1"], 2, "choose lfu, lru or forecast"),
    ],
)
def test_what_the_devices_and_caches_may_be(
    tmp_path: Path,
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runtime.launch.launch", lambda *_, **__: pytest.fail("the ranks were started"))
    assert run_app(["run", "--store", str(tmp_path / "store.db"), *arguments]) == code
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("processors", "devices", "warned"), [(1, "cpu:2", True), (2, "cpu:2", False), (4, "cpu:5", True)]
)
def test_more_ranks_than_processors_are_warned_of(
    processors: int, devices: str, warned: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.limits.cpus_allowed", lambda: processors)
    notes = crowding_notes(find_devices(devices))
    assert ("take turns" in capsys.readouterr().err) == warned
    assert [f"on {plural(processors, 'processor')}" in note for note in notes] == [True] * warned
