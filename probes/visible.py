"""Which GPUs a CUDA_VISIBLE_DEVICES mask shows, by the driver's list: what CUDA itself would say.

The rules are those of CUDA (C++ Programming Guide, environment variables) as torch.cuda follows them: an entry that
names nothing hides itself and all that follow; one GPU named twice hides all; ``GPU-`` and ``MIG-`` entries may be
shortened as long as they are unambiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

from probes.nvml import NvmlGpu


def visible_gpus(gpus: Sequence[NvmlGpu], mask: str | None) -> tuple[tuple[NvmlGpu, ...], str | None]:
    """The GPUs that ``mask`` shows, in its order, and a remark where some of it names nothing.

    Ordinals count whole GPUs in PCI bus order, as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID. Without a mask, of a
    GPU in MIG mode its first slice is visible, as for CUDA.
    """
    if mask is None:
        return _without_mask(gpus), None
    chosen: list[NvmlGpu] = []
    for entry in (part.strip() for part in mask.split(",")):
        found = _find(gpus, entry)
        if found is None:
            if not mask.strip():
                return (), "CUDA_VISIBLE_DEVICES is empty: it hides every GPU"
            return tuple(chosen), f"CUDA_VISIBLE_DEVICES: {entry!r} names no GPU; it hides itself and what follows"
        if found in chosen:
            return (), f"CUDA_VISIBLE_DEVICES: {entry!r} is named twice, which hides every GPU"
        chosen.append(found)
    return tuple(chosen), None


def _without_mask(gpus: Sequence[NvmlGpu]) -> tuple[NvmlGpu, ...]:
    sliced = {gpu.index: gpu for gpu in reversed(gpus) if gpu.is_slice}
    return tuple(sliced.get(gpu.index, gpu) for gpu in gpus if not gpu.is_slice)


def _find(gpus: Sequence[NvmlGpu], entry: str) -> NvmlGpu | None:
    if entry.isdigit():
        whole = _without_mask(gpus)
        return whole[int(entry)] if int(entry) < len(whole) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    matches = [gpu for gpu in gpus if isinstance(gpu.uuid.value, str) and gpu.uuid.value.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
