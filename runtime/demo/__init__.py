"""The demo: a small byte-level Mixture-of-Experts language model with text it was never trained on."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def model_path() -> Path:
    """The model's folder, ready for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`."""
    return _FOLDER / "model"


def prompts_path() -> Path:
    """A text file with one prompt a line, taken from the held-out text."""
    return _FOLDER / "prompts.txt"


def held_out_path() -> Path:
    """The held-out text: the loss in the model card is measured on this file."""
    return _FOLDER / "held_out.txt"
