"""What a live run is asked to do, checked before anything is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from probes.errors import CheckpointError, InputError, UsageError
from probes.records import Calibration, Device
from probes.text import first_line
from runtime.cache import parse_cache
from runtime.policy.guard import BrakeSettings
from runtime.policy.spec import resolve
from runtime.policy.types import PolicySpec
from runtime.signals.collect import SignalFiles
from runtime.tasks.files import TaskOptions
from store.records import PolicyOrigin

TIERS = ("device", "host", "disk")
PHASES = ("all", "decode", "prefill")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CUT_BATCHES = 4
"""How many batches of prompts are cut from a text with --input-len."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One live run. ``devices``: this host's, one rank each.

    ``pairs`` None: as many interleaved pairs as fit ``seconds_for_pairs``. ``cache_experts``: cached experts per device
    over all layers; None: half of the device's own. ``phases``: where the policy applies; None: everywhere when
    offloading, decode alone on-device. ``brake`` None: none watches the policy. ``held_out`` None: no quality is
    measured. ``notes``: remarks for the record.
    ``input_len``: prompts of so many tokens are cut from ``prompts``; None: they are run as they are.
    ``max_quality_drop``: the rise of held-out loss that is allowed, as a share; with ``search`` the policy's knob is
    turned as far as that allows, else the policy runs as given. ``policy_origin``: of a stored policy.
    ``partial_file``: where rank 0 leaves what is complete after every pair. ``signals``: where it tells of every step.
    ``data_parallel``: every rank has a share of the sequences, not all. ``tasks``: what is evaluated beside quality.
    """

    model: Path
    devices: tuple[Device, ...]
    tier: str
    policy: PolicySpec
    cache: str
    prompts: tuple[str, ...]
    held_out: str | None
    calibration: Calibration | None
    cache_experts: int | None = None
    batch_size: int = 8
    max_new_tokens: int = 48
    input_len: int | None = None
    max_quality_drop: float | None = None
    search: bool = False
    policy_origin: PolicyOrigin | None = None
    pairs: int | None = None
    seconds_for_pairs: float = 16.0
    quality_sequences: int = 24
    quality_tokens: int = 96
    phases: str | None = None
    brake: BrakeSettings | None = None
    dtype: str = "auto"
    seed: int = 0
    check_ranks: bool = False
    data_parallel: bool = False
    tasks: TaskOptions | None = None
    notes: tuple[str, ...] = ()
    progress_file: Path | None = None
    partial_file: Path | None = None
    signals: SignalFiles | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("tier", self.tier, TIERS),
            ("dtype", self.dtype, DTYPES),
            ("phases", self.phases or "all", PHASES),
        ):
            if value not in allowed:
                raise UsageError(f"--{name} {value} is unknown", hint=f"choose one of {', '.join(allowed)}")
        for name, number, least in (
            ("batch-size", self.batch_size, 1),
            ("max-new-tokens", self.max_new_tokens, 2),
            ("input-len", 1 if self.input_len is None else self.input_len, 1),
            ("pairs", 1 if self.pairs is None else self.pairs, 1),
            ("cache-experts", 1 if self.cache_experts is None else self.cache_experts, 1),
            ("devices", len(self.devices), 1),
        ):
            if number < least:
                raise UsageError(f"--{name} {number} is too small", hint=f"give at least {least}")
        if not self.prompts:
            raise UsageError("there is no prompt", hint="give a file with one prompt per line: --prompts FILE")
        if self.tasks is not None and self.tasks.shape == "decode" and not self.applies("decode"):
            raise UsageError(
                f"--phases {self.phases} leaves the policy out of decoding, which is how --lm-eval measures",
                hint="add --lm-eval-shape prefill, or leave out --phases",
            )
        resolve(self.policy, offloading=self.offloading)
        if parse_cache(self.cache).kind == "belady":
            raise UsageError("cache belady looks ahead, which a live run cannot", hint="choose lfu, lru or forecast")

    @property
    def device_kind(self) -> str:
        return self.devices[0].kind

    @property
    def offloading(self) -> bool:
        return self.tier != "device"

    @property
    def prompt_count(self) -> int:
        """How many prompts there are to run."""
        return len(self.prompts) if self.input_len is None else CUT_BATCHES * self.batch_size

    def applies(self, phase: str) -> bool:
        """Whether the policy applies in ``prefill`` or ``decode``."""
        chosen = self.phases or ("all" if self.offloading else "decode")
        return chosen in ("all", phase)


def check_device_count(devices: int, num_experts: int) -> None:
    """Raise ``UsageError`` where a device would have no expert of a layer."""
    if devices > num_experts:
        raise UsageError(
            f"{devices} devices for {num_experts} experts per layer leave some without one",
            hint=f"give at most {num_experts} with --devices",
        )


def resolve_model(name: str) -> Path:
    """The folder of a local model or of a Hugging Face id (downloaded once into its cache).

    Raises ``CheckpointError`` where there is none.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None or folder.exists():
        raise CheckpointError(
            f"there is no model folder {name}", hint="give a local folder or a Hugging Face id such as org/name"
        )
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name} is neither a local folder nor a model that can be downloaded: {first_line(error)}",
            hint="check the name, or download the model elsewhere and give its folder",
        ) from error


def read_text(path: Path) -> str:
    """A UTF-8 text file. Raises ``InputError``."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="give a UTF-8 text file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: {error}", hint="give a UTF-8 text file") from error


def read_prompts(path: Path) -> tuple[str, ...]:
    """One prompt per non-empty line of a UTF-8 text file, or of JSON lines that are objects with a ``prompt``.

    The file is read as JSON lines where its name ends in .jsonl, or its first line is such an object. Raises
    ``InputError``.
    """
    lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    if lines and (path.suffix == ".jsonl" or _prompt_of(lines[0][1]) is not None):
        return tuple(_json_prompt(path, number, line) for number, line in lines)
    if not lines:
        raise InputError(f"{path} holds no prompt", hint="write one prompt per line")
    return tuple(line for _, line in lines)


def _json_prompt(path: Path, number: int, line: str) -> str:
    prompt = _prompt_of(line)
    if prompt is None:
        raise InputError(
            f"{path}, line {number}: this is no JSON object with a text as its prompt",
            hint='write each line as {"prompt": "…"}, or a plain file with one prompt per line',
        )
    return prompt


def _prompt_of(line: str) -> str | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    prompt = found.get("prompt") if isinstance(found, dict) else None
    return prompt if isinstance(prompt, str) and prompt.strip() else None
