"""What a run tells of its steps (JSON lines, Prometheus metrics, a live table), against the run itself."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import io
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from caee_cli.main import run_app
from caee_cli.signalling import SignalRequest, serving_signals
from probes.devices import find_devices
from probes.errors import InputError, RunError, UsageError
from probes.fingerprint import take_fingerprint
from reports.live import live_table
from runtime.options import RunOptions
from runtime.parallel import Ranks
from runtime.policy.spec import POLICIES, parse_policy
from runtime.recording import PassRecord, StepRecord
from runtime.signals.collect import LineSignals, SignalFiles, StepLines
from runtime.signals.follow import StepFollower
from runtime.signals.prometheus import CONTENT_TYPE, exposition
from runtime.signals.server import MetricsServer
from runtime.signals.step import PASSES, BrakeState, StepsHeader, StepSignal, header_line, parse_line, step_line
from runtime.signals.totals import StepTotals
from runtime.summary import run_record
from runtime.worker import RankSession
from store.records import RunRecord

Checkpoint = Callable[..., Path]
Samples = dict[str, dict[frozenset[tuple[str, str]], float]]

PATIENCE_SECONDS = 120
CAEE = Path(sys.executable).with_name("caee")

HEADER = StepsHeader(
    model="a [bold]model[/]", devices=("one", "two"), tier="disk", policy="caee:theta=0.7", moe_layers=3, num_experts=8
)


def signal(step: int = 1, **changes: Any) -> StepSignal:
    values: dict[str, Any] = {
        "step": step,
        "pass_kind": "policy",
        "pass_number": 2,
        "phase": "decode",
        "policy": "caee:theta=0.7",
        "tokens": 4,
        "seconds": 0.02,
        "fetches": (3, 1),
        "dispatches": (5, 3),
        "hit_rate": 0.5,
        "removed_importance": 0.125,
        "rerouted_slots": 2,
        "fallbacks": 0,
        "decide_seconds": 0.001,
        "fetch_wait_seconds": 0.01,
        "experts_seconds": 0.004,
        "exchange_seconds": 0.002,
    }
    return StepSignal(**{**values, **changes})


# the text format, read by its grammar --------------------------------------------------------------------------------

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL})(?:,{LABEL})*)\}})? (NaN|[+-]Inf|[+-]?[0-9.]+(?:e[+-]?[0-9]+)?)")


def parse(text: str) -> Samples:
    """Samples by name and labels; every line must be of the format, each metric's HELP and TYPE before its samples."""
    assert text.endswith("\n")
    samples: Samples = defaultdict(dict)
    kinds: dict[str, str] = {}
    current = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            assert re.fullmatch(NAME, current)
            assert current not in kinds, f"{current} comes twice"
            continue
        if line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            assert name == current
            assert kind in ("counter", "gauge", "histogram")
            kinds[name] = kind
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        name = found[1]
        if kinds[current] == "histogram":
            assert name in (f"{current}_bucket", f"{current}_sum", f"{current}_count")
        else:
            assert name == current
        labels = frozenset((label, _unescaped(value)) for label, value in re.findall(LABEL, found[2] or ""))
        assert labels not in samples[name], line
        samples[name][labels] = float(found[7])
    return samples


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def total(samples: Samples, name: str, **labels: str) -> float:
    """Over all series that carry ``labels``."""
    return sum(value for own, value in samples[name].items() if set(labels.items()) <= own)


def totals_of(*signals: StepSignal) -> StepTotals:
    totals = StepTotals()
    totals.add(HEADER)
    for each in signals:
        totals.add(each)
    return totals


@given(st.text(), st.text(alphabet=st.characters(exclude_characters=":", exclude_categories=["Cs"]), min_size=1))
def test_any_name_survives_the_text_format(model: str, policy: str) -> None:
    totals = StepTotals()
    totals.add(dataclasses.replace(HEADER, model=model))
    totals.add(signal(policy=policy))
    samples = parse(exposition(totals.snapshot()))
    assert {dict(labels)["model"] for labels in samples["caee_run_info"]} == {model}
    assert {dict(labels)["policy"] for labels in samples["caee_steps_total"]} == {policy}


def test_nothing_has_run_yet() -> None:
    samples = parse(exposition(StepTotals().snapshot()))
    assert {name for name, found in samples.items() if found} == {"caee_run_info"}


def test_sums_and_histogram_of_known_steps() -> None:
    steps = [signal(n, seconds=seconds) for n, seconds in enumerate((0.0005, 0.001, 0.0011, 0.3, 99.0), 1)]
    steps.append(signal(6, phase="prefill", seconds=1.5, tokens=40, hit_rate=None, removed_importance=None))
    samples = parse(exposition(totals_of(*steps).snapshot()))
    decode = {"phase": "decode", "pass": "policy", "policy": "caee"}
    assert total(samples, "caee_steps_total") == 6
    assert total(samples, "caee_steps_total", **decode) == 5
    assert total(samples, "caee_expert_fetches_total", device="0", **decode) == 15
    assert total(samples, "caee_expert_fetches_total", device="1") == 6
    assert total(samples, "caee_token_layers_total", **decode) == 5 * 4 * 3
    assert total(samples, "caee_removed_importance_total", **decode) == pytest.approx(0.125 * 60)
    buckets = {
        dict(labels)["le"]: count
        for labels, count in samples["caee_step_seconds_bucket"].items()
        if ("phase", "decode") in labels
    }
    assert (buckets["0.001"], buckets["0.0025"], buckets["0.25"], buckets["0.5"], buckets["10.0"]) == (2, 3, 3, 4, 4)
    assert buckets["+Inf"] == total(samples, "caee_step_seconds_count", **decode) == 5
    assert list(buckets.values()) == sorted(buckets.values())
    assert total(samples, "caee_step_seconds_sum", **decode) == pytest.approx(99.3026)
    assert total(samples, "caee_hit_rate") == 0.5
    assert not samples["caee_brake_engaged"]


def test_the_brake_is_shown_where_there_is_one() -> None:
    brake = BrakeState(engaged=True, trips=2, braked_layer_steps=70)
    samples = parse(exposition(totals_of(signal(1), signal(2, brake=brake)).snapshot()))
    assert total(samples, "caee_brake_engaged") == 1
    assert total(samples, "caee_brake_trips_total") == 2
    assert total(samples, "caee_braked_layer_steps_total") == 70


# lines ---------------------------------------------------------------------------------------------------------------


def test_lines_read_back_as_written() -> None:
    braked = signal(3, hit_rate=None, brake=BrakeState(engaged=False, trips=1, braked_layer_steps=9))
    for told, line in ((HEADER, header_line(HEADER)), (signal(), step_line(signal())), (braked, step_line(braked))):
        assert line.endswith("\n")
        assert "\n" not in line[:-1]
        assert parse_line(line) == told
    assert json.loads(header_line(HEADER))["schema"] == "caee.steps/1"


@pytest.mark.parametrize(
    "line", ["", "[]", "1", "{}", '{"schema": "caee.steps/2"}', '{"schema": "caee.steps/1"}', '{"step": 1}']
)
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(InputError, match="no step of"):
        parse_line(line)


def test_following_tells_every_line_once_however_it_arrives(tmp_path: Path) -> None:
    path, told = tmp_path / "steps.jsonl", []
    lines = (header_line(HEADER) + "".join(step_line(signal(n)) for n in range(1, 40))).encode()
    with StepFollower(path, told.append):
        time.sleep(0.15)  # the file is not there yet
        with path.open("ab", buffering=0) as stream:
            for at in range(0, len(lines), 777):  # lines are cut in two
                stream.write(lines[at : at + 777])
                time.sleep(0.01)
    assert told == [HEADER, *(signal(n) for n in range(1, 40))]


def test_a_file_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be written to"):
        StepLines(tmp_path / "absent" / "steps.jsonl", HEADER)
    if Path("/dev/full").exists():
        with pytest.raises(RunError, match="No space left"):
            StepLines(Path("/dev/full"), HEADER)


# the endpoint --------------------------------------------------------------------------------------------------------


def request(url: str, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    host, port = re.fullmatch(r"http://(.+):(\d+)/metrics", url).groups()  # type: ignore[union-attr]  # it is one
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def test_the_endpoint_answers_what_it_should_and_stops() -> None:
    with MetricsServer("127.0.0.1", 0, lambda: "caee_steps_total 7\n") as server:
        url = server.url
        assert request(url) == (200, CONTENT_TYPE, "caee_steps_total 7\n")
        assert request(url, method="HEAD") == (200, CONTENT_TYPE, "")
        assert request(url, "/metrics?x=1")[0] == 200
        assert request(url, "/etc/passwd")[0] == 404
        assert request(url, method="POST")[0] == 501
        with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))):
            assert request(url)[0] == 200  # one that says nothing holds up nobody, nor the end
    with pytest.raises(OSError, match="refused"):
        request(url)


def test_many_scrapers_at_once() -> None:
    answers = []
    with MetricsServer("localhost", 0, lambda: exposition(totals_of(signal()).snapshot())) as server:
        scrapers = [threading.Thread(target=lambda: answers.append(request(server.url)[2])) for _ in range(8)]
        for each in scrapers:
            each.start()
        for each in scrapers:
            each.join()
    assert len(answers) == 8
    assert all(total(parse(answer), "caee_steps_total") == 1 for answer in answers)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(RunError, match="metrics cannot be served at") as caught:
        MetricsServer(host, 0, str)
    assert "--metrics-host" in str(caught.value.hint)


# around the run ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_is_refused_before_the_work(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with taken_port() as port:
        steps = tmp_path / "steps.jsonl"
        arguments = f"--devices cpu:1 --metrics-port {port} --json".split()
        files = ["--store", str(tmp_path / "store.db"), "--steps-jsonl", str(steps)]
        code = run_app(["run", str(checkpoint("qwen3_moe")), *arguments, *files])
    output, errors = capsys.readouterr()
    assert (code, output) == (1, "")
    assert f"127.0.0.1:{port}: Address already in use" in errors
    assert "→ give a port that is free" in errors
    assert not steps.exists()


def test_a_file_of_steps_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("dear")
    with pytest.raises(UsageError, match="exists already"), serving_signals(SignalRequest(steps_jsonl=path), "m"):
        pass
    assert path.read_text() == "dear"
    with (
        pytest.raises(RunError, match="cannot be written"),
        serving_signals(SignalRequest(steps_jsonl=tmp_path / "absent" / "f"), "m"),
    ):
        pass
    with pytest.raises(UsageError, match="is a folder"), serving_signals(SignalRequest(steps_jsonl=tmp_path), "m"):
        pass


def test_a_file_without_a_step_does_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with serving_signals(SignalRequest(steps_jsonl=path), "m"):
        assert path.exists()
    assert not path.exists()


def test_a_pipe_may_stand_for_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with serving_signals(SignalRequest(steps_jsonl=path), "m") as files:
        assert files == SignalFiles(paths=(path,), model="m")
    assert path.exists()


def test_without_options_nothing_is_served() -> None:
    with serving_signals(SignalRequest(), "m") as files:
        assert files is None


def test_no_table_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_signals(SignalRequest(live=True), "m") as files:
        assert files is None
    assert "no terminal" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Standard error, as if it were a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_live_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": "200", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    brake = BrakeState(engaged=True, trips=1, braked_layer_steps=5)
    with serving_signals(SignalRequest(live=True), HEADER.model) as files:
        assert files is not None
        lines = StepLines(files.paths[0], HEADER)
        lines.write(step_line(signal(41)))
        lines.write(step_line(signal(42, seconds=0.04, fetches=(5, 1), brake=brake)))
        lines.close()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "step 42" not in terminal.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "a [bold]model[/] on 2 devices, experts on tier disk, policy caee:theta=0.7" in shown
    # steps, last ms, mean ms, fetches per step by device, cached, removed, re-routed
    assert re.search(r"policy +decode +caee +2 +40\.0 +30\.0 +4\.00 1\.00 +37\.5 % +12\.5 % +4\b", shown)
    assert "brake engaged: the router's own choice is in force, 1 trip so far" in shown
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
def test_the_live_table_keeps_its_key_columns(columns: int, devices: int) -> None:
    totals = StepTotals()
    totals.add(HEADER)
    keys = [(kind, phase, policy) for kind in PASSES for phase in ("prefill", "decode") for policy in POLICIES]
    for step, (kind, phase, policy) in enumerate(keys, start=1):
        told = signal(step, seconds=12.345, fetches=(1234,) * devices, dispatches=(2345,) * devices)
        totals.add(dataclasses.replace(told, pass_kind=kind, phase=phase, policy=policy, rerouted_slots=123456))
    console = Console(width=columns, file=io.StringIO())
    console.print(live_table(totals.snapshot()))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    for row in keys:
        assert re.search(rf"^ *{row[0]} +{row[1]} +{row[2]} +1 +12,?345 ", shown, re.MULTILINE), row


# a real run ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Told:
    """A run of one rank, what was scraped from its endpoint at its end and in between, its lines, and its record."""

    scraped: str
    halfway: list[str]
    lines: list[StepsHeader | StepSignal]
    record: RunRecord
    passes: list[PassRecord]
    seconds: float


@pytest.fixture(scope="module")
def told(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = checkpoint("qwen3_moe", top_k=4)
    path = tmp_path_factory.mktemp("told") / "steps.jsonl"
    totals, halfway = StepTotals(), []
    with MetricsServer("127.0.0.1", 0, lambda: exposition(totals.snapshot())) as server:
        options = RunOptions(
            model=folder,
            devices=find_devices("cpu:1"),
            tier="disk",
            policy=parse_policy("caee:theta=0.6"),
            cache="lfu",
            prompts=("Hello there", "And he said", "Now is the"),
            held_out="It was the best of times, it was the worst of times.",
            calibration=None,
            batch_size=3,
            max_new_tokens=6,
            pairs=3,
            quality_tokens=12,
            quality_sequences=2,
            signals=SignalFiles(paths=(path,), model="a tiny model"),
        )
        with StepFollower(path, totals.add):
            session = RankSession(options, Ranks(rank=0, world=1))
            run_pass = session.run_pass

            def scraping(*arguments: Any, **named: Any) -> PassRecord:
                halfway.append(request(server.url)[2])
                return run_pass(*arguments, **named)

            session.run_pass = scraping  # type: ignore[method-assign]  # to look in between
            try:
                report = session.run()
            finally:
                session.close()
        scraped = request(server.url)[2]
    record = run_record(options, report, take_fingerprint(options.devices, folder), "a tiny model")
    signals = session.model.signals
    assert isinstance(signals, LineSignals)
    lines = [parse_line(line) for line in path.read_bytes().splitlines()]
    return Told(scraped, halfway, lines, record, [*report.baseline[0], *report.treated[0]], signals.seconds)


def test_counters_equal_the_run(told: Told) -> None:
    samples = parse(told.scraped)
    for kind, policy, statistics in (
        ("baseline", "router", told.record.baseline),
        ("policy", "caee", told.record.with_policy),
    ):
        labels = {"pass": kind, "phase": "decode", "policy": policy}
        assert total(samples, "caee_steps_total", **labels) == statistics.steps == 3 * 5
        for device, fetches in enumerate(statistics.misses_per_device):
            assert total(samples, "caee_expert_fetches_total", device=str(device), **labels) == fetches
        assert total(samples, "caee_expert_dispatches_total", **labels) == statistics.dispatches
        assert total(samples, "caee_rerouted_slots_total", **labels) == statistics.rerouted_slots
        removed = total(samples, "caee_removed_importance_total", **labels)
        assert removed / total(samples, "caee_token_layers_total", **labels) == pytest.approx(
            statistics.removed_importance
        )
        assert total(samples, "caee_step_seconds_count", **labels) == statistics.steps
        assert total(samples, "caee_step_seconds_sum", **labels) / statistics.steps == pytest.approx(
            statistics.step_times.total
        )
        prefill = {**labels, "phase": "prefill"}
        assert total(samples, "caee_steps_total", **prefill) == 3
    assert told.record.with_policy.removed_importance > 0
    assert total(samples, "caee_steps_total", **{"pass": "quality"}) == 11
    assert {dict(labels)["model"] for labels in samples["caee_run_info"]} == {"a tiny model"}


def test_what_is_scraped_in_between_only_grows(told: Told) -> None:
    counts = [total(parse(text), "caee_steps_total") for text in [*told.halfway, told.scraped]]
    assert counts == sorted(counts)
    assert counts[0] == 0 < counts[-1]


def test_lines_sum_up_to_the_run(told: Told) -> None:
    header, *steps = told.lines
    assert isinstance(header, StepsHeader)
    assert (header.model, header.moe_layers, header.num_experts) == ("a tiny model", 2, 8)
    assert [step.step for step in steps if isinstance(step, StepSignal)] == list(range(1, len(steps) + 1))
    for kind, statistics in (("baseline", told.record.baseline), ("policy", told.record.with_policy)):
        of_kind = [step for step in steps if isinstance(step, StepSignal) and step.pass_kind == kind]
        decode = [step for step in of_kind if step.phase == "decode"]
        assert len({step.pass_number for step in decode}) == 3
        assert len(decode) == statistics.steps
        assert tuple(map(sum, zip(*(step.fetches for step in decode), strict=True))) == statistics.misses_per_device
        dispatches = sum(sum(step.dispatches) for step in decode)
        assert 1 - sum(statistics.misses_per_device) / dispatches == pytest.approx(statistics.hit_rate)
        tokens = sum(step.tokens for step in decode)
        removed = sum((step.removed_importance or 0) * step.tokens for step in decode)
        assert removed / tokens == pytest.approx(statistics.removed_importance)
        assert sum(step.rerouted_slots for step in decode) == statistics.rerouted_slots
        assert math.fsum(step.seconds for step in decode) == pytest.approx(
            statistics.steps * statistics.step_times.total
        )


def test_every_line_is_its_step(told: Told) -> None:
    steps = [step for step in told.lines if isinstance(step, StepSignal) and step.pass_kind in ("baseline", "policy")]
    by_pass: dict[str, list[StepSignal]] = defaultdict(list)
    for step in steps:
        by_pass[step.pass_kind].append(step)
    records: dict[str, list[StepRecord]] = {
        "baseline": [step for each in told.passes[:3] for step in each.steps],
        "policy": [step for each in told.passes[3:] for step in each.steps],
    }
    for kind, told_steps in by_pass.items():
        assert len(told_steps) == len(records[kind])
        for line, record in zip(told_steps, records[kind], strict=True):
            assert line.seconds == record.seconds
            assert line.phase == ("prefill" if record.prefill else "decode")
            assert line.fetches == (sum(int(layer.misses_after_D[0]) for layer in record.layers),)
            assert line.fetch_wait_seconds == record.timers.fetch_wait
    assert told.seconds > 0


@pytest.mark.slow
def test_two_ranks_serve_one_endpoint_while_the_document_stays_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Each scrape is the sum of the first so many lines."""
    steps = tmp_path / "steps.jsonl"
    options = {"devices": "cpu:2", "pairs": 3, "theta": 0.6, "max-new-tokens": 24, "metrics-port": 0}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    files = ["--store", str(tmp_path / "store.db"), "--steps-jsonl", str(steps)]
    process = subprocess.Popen(
        [str(CAEE), "run", str(checkpoint("qwen3_moe", top_k=4)), *arguments, "--no-quality", "--json", *files],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found
        scraped = []
        while process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                scraped.append(request(found[0])[2])
            time.sleep(0.05)
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
    assert process.returncode == 0, errors
    document = json.loads(output)
    header, *lines = [parse_line(line) for line in steps.read_bytes().splitlines()]
    assert isinstance(header, StepsHeader)
    told = [line for line in lines if isinstance(line, StepSignal)]
    seen = 0
    for text in scraped:
        samples = parse(text)
        seen = int(total(samples, "caee_steps_total"))
        for device in (0, 1):
            fetched = total(samples, "caee_expert_fetches_total", device=str(device))
            assert fetched == sum(step.fetches[device] for step in told[:seen])
    assert seen > 0
    for kind, name in (("baseline", "baseline"), ("policy", "with_policy")):
        decode = [step for step in told if step.pass_kind == kind and step.phase == "decode"]
        assert (
            list(map(sum, zip(*(step.fetches for step in decode), strict=True))) == document[name]["misses_per_device"]
        )
