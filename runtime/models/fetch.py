"""A model's ``config.json`` from wherever its name leads: a file, a folder, or the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from probes.errors import CheckpointError
from probes.text import first_line

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def config_path(name: str) -> Path:
    """``name``: a config.json, a model folder, or a Hugging Face id, of which the config alone is downloaded.

    Raises ``CheckpointError`` where there is none.
    """
    local = Path(name).expanduser()
    if local.exists() or _HUB_ID.fullmatch(name) is None:
        return local
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name} is neither a local file nor a model whose config can be downloaded: {first_line(error)}",
            hint="check the name, download its config.json elsewhere and give that, or give --expert-bytes",
        ) from error
