"""What a checkpoint's tensors are called in the model, by the renamings that transformers itself applies on loading.

``transformers.conversion_mapping`` is only half public; ``constraints.txt`` pins the version that was tested.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from probes.errors import CheckpointError

SAVE_AS_RUN = (
    "load the model with transformers, save it with save_pretrained(save_original_format=False), and give that folder"
)


class CheckpointNames:
    """Callable: the parameter or buffer that a checkpoint's key becomes.

    ``kinds``: the endings that a quantisation adds to names. Raises ``CheckpointError`` for experts that transformers
    would rearrange while it loads them.
    """

    def __init__(self, model: Any, family: str, kinds: Collection[str] = ()) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        transforms = get_model_conversion_mapping(model)
        self._family = family
        self._kinds = tuple(kinds)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if not isinstance(t, WeightRenaming)]
        self._prefix = model.base_model_prefix
        self._known = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())

    def __call__(self, key: str) -> str:
        from transformers.core_model_loading import rename_source_key

        for kind in self._kinds:
            if key.endswith(kind):
                # Renamed as the parameter that it belongs to: the model has none of this name.
                return self(key.removesuffix(kind)) + kind
        name: str = rename_source_key(key, self._renamings, [], self._prefix, self._known)[0]
        if name not in self._known and key in self._known:
            return key  # so does transformers: a renaming may match more than it is meant for
        for converter in self._converters:
            target, matched = converter.rename_source_key(name)
            if matched is None:
                continue
            unknown = [type(op).__name__ for op in converter.operations if not _does_the_same(op)]
            if unknown and ".experts." in target:
                raise CheckpointError(
                    f"the experts of this {self._family} checkpoint are stored in another arrangement "
                    f"({', '.join(unknown)}) than the model runs them in",
                    hint=SAVE_AS_RUN,
                )
            break
        return name


def _does_the_same(operation: Any) -> bool:
    """Whether the index does as ``operation`` does: stack experts, put gate before up, and nothing to a tensor that has
    its shape already."""
    kind = type(operation).__name__
    if kind == "Transpose":
        return bool(operation.check_dims)
    return (kind, getattr(operation, "dim", None)) in {("MergeModulelist", 0), ("Concatenate", 1)}
