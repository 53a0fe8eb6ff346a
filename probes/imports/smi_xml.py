"""``nvidia-smi -q -x``: the GPUs of a machine, and what their PCIe links could carry at most."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from probes.errors import ImportFormatError
from probes.imports.figures import Figures, model_of_rate
from probes.records import Concurrency, Device, Field, LinkKind, LinkMode, LinkModel

# Raw rate of one lane and direction in bytes/s, by PCI Express generation (PCI-SIG); from 3 on less 128b/130b coding,
# before 8b/10b; generation 6 is coded in flits without that loss.
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130, 5: 32e9 / 8 * 128 / 130, 6: 8e9}
_MIB = 1 << 20
_MISSING = (
    "N/A",
    "[N/A]",
    "",
    "None",
    "Unknown Error",
    "[Unknown Error]",
    "Requested functionality has been deprecated",
)
_AGAIN = "write it again: nvidia-smi -q -x > FILE"
_BOUND = "a link's speed is what its PCIe generation and width carry at most, not a measurement"
_FACTS = {
    "pcie_generation_max": "pci/pci_gpu_link_info/pcie_gen/max_link_gen",
    "pcie_generation_current": "pci/pci_gpu_link_info/pcie_gen/current_link_gen",
    "pcie_width_max": "pci/pci_gpu_link_info/link_widths/max_link_width",
    "pcie_width_current": "pci/pci_gpu_link_info/link_widths/current_link_width",
    "mig": "mig_mode/current_mig",
    "ecc": "ecc_mode/current_ecc",
    "performance_state": "performance_state",
    "temperature_c": "temperature/gpu_temp",
    "clock_memory_max": "max_clocks/mem_clock",
}


def looks_like(text: str) -> bool:
    return "<nvidia_smi_log" in text[:4096]


def read(text: str) -> Figures:
    """Devices, facts and bounds of their links to the host. Raises ``ImportFormatError`` for damaged documents."""
    root = _parse(text)
    gpus = root.findall("gpu")
    if not gpus:
        raise ImportFormatError("this nvidia-smi document lists no GPU", hint=_AGAIN)
    facts = {"driver": _fact(root, "driver_version"), "driver_cuda": _fact(root, "cuda_version")}
    devices: list[Device] = []
    models: list[LinkModel] = []
    for index, gpu in enumerate(gpus):
        for name, path in _FACTS.items():
            facts[f"gpu{index}.{name}"] = _fact(gpu, path)
        facts[f"gpu{index}.mig_slices"] = Field(value=len(gpu.findall("mig_devices/mig_device")))
        devices.append(
            Device(
                index=index,
                kind="cuda",
                name=_text(gpu, "product_name") or "NVIDIA GPU",
                uuid=_text(gpu, "uuid"),
                memory_bytes=_memory(gpu),
            )
        )
        models += _host_links(index, gpu)
    attached = _text(root, "attached_gpus")
    warnings = [_BOUND] if models else []
    if attached is not None and attached != str(len(gpus)):
        warnings.append(f"the machine has {attached} GPUs, the document describes {len(gpus)}")
    return Figures(devices=tuple(devices), models=tuple(models), link_groups=(), warnings=tuple(warnings), facts=facts)


def _parse(text: str) -> ElementTree.Element:
    # nvidia-smi names its DTD and defines no entities; expanding a stranger's can take all memory.
    if "<!ENTITY" in text:
        raise ImportFormatError("the document defines entities, which nvidia-smi never does", hint=_AGAIN)
    try:
        return ElementTree.fromstring(text[text.index("<") :].encode())
    except (ElementTree.ParseError, RecursionError) as error:
        raise ImportFormatError(f"this is no well-formed XML: {error}", hint=_AGAIN) from error


def _text(element: ElementTree.Element, path: str) -> str | None:
    found = (element.findtext(path) or "").strip()
    return None if found in _MISSING else found


def _fact(element: ElementTree.Element, path: str) -> Field:
    value = _text(element, path)
    if value is not None:
        return Field(value=value)
    absent = element.find(path) is None
    return Field(value=None, reason="this version of nvidia-smi does not tell" if absent else "nvidia-smi says N/A")


def _number(element: ElementTree.Element, path: str, unit: str) -> int | None:
    text = (_text(element, path) or "").removesuffix(unit).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _memory(gpu: ElementTree.Element) -> int | None:
    total = _number(gpu, "fb_memory_usage/total", "MiB")
    return None if total is None else total * _MIB


def _host_links(index: int, gpu: ElementTree.Element) -> Iterator[LinkModel]:
    generation = _number(gpu, _FACTS["pcie_generation_max"], "")
    # The width is that of the slot as it is: an idle link lowers its generation, not its width.
    width = _number(gpu, _FACTS["pcie_width_current"], "x") or _number(gpu, _FACTS["pcie_width_max"], "x")
    if generation not in _LANE or not width:
        return
    rate = _LANE[generation] * width
    for kind, source, destination in (
        (LinkKind.HOST_TO_DEVICE, "host", f"cuda:{index}"),
        (LinkKind.DEVICE_TO_HOST, f"cuda:{index}", "host"),
    ):
        yield model_of_rate(
            kind, source, destination, mode=LinkMode.PINNED, concurrency=Concurrency.SOLO, bytes_per_s=rate
        )
