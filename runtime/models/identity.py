"""Which model a folder holds, whatever the folder is called: a digest that a fine-tuned sister does not share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from probes.errors import CheckpointError
from runtime.experts.headers import read_headers
from runtime.models.config import read_config_file

# Reading whole weights would take minutes. A training step changes nearly every weight, so a few pieces of each file
# tell two models of the same shape apart.
PIECES_PER_FILE = 16
PIECE_BYTES = 4096
_SAYS_NOTHING = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def model_identity(folder: Path) -> str:
    """Digest of the config, of every tensor's name, type and shape, and of pieces of every file of weights.

    Raises ``CheckpointError``.
    """
    config = {name: value for name, value in read_config_file(folder).items() if name not in _SAYS_NOTHING}
    tensors = read_headers(folder)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, entry in sorted(tensors.items()):
        digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
    # By content, not by name: files are called differently in copies of the same model.
    for piece in sorted(_pieces(path) for path in {entry.path for entry in tensors.values()}):
        digest.update(piece)
    return digest.hexdigest()[:32]


def _pieces(path: Path) -> bytes:
    """Digest of evenly spread pieces of a file, its last bytes among them."""
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            for number in range(PIECES_PER_FILE):
                stream.seek(max(0, size - PIECE_BYTES) * number // (PIECES_PER_FILE - 1))
                digest.update(stream.read(PIECE_BYTES))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}", hint="check the file, its permissions and where it links to"
        ) from error
    digest.update(size.to_bytes(8, "little"))
    return digest.digest()
