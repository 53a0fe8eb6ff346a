"""Imports beside nvbandwidth: each format as it should be, edited in one place, and as real machines wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caee_cli.diagnosis import diagnose
from probes.errors import CaeeError, ImportFormatError
from probes.imports import bandwidth_test, nccl_tests, nvbandwidth, p2p, smi_xml, spec_sheet, stream, topology
from probes.imports.detect import import_measurement
from probes.imports.figures import Figures
from probes.records import Calibration, Concurrency, LinkKind, LinkMode, LinkModel, ModelForm
from store.session import open_store

P2P = """[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]
Device: 0, NVIDIA A, pciBusID: 19, pciDeviceID: 0, pciDomainID:0
Device: 1, NVIDIA B, pciBusID: 3b, pciDeviceID: 0, pciDomainID:0
P2P Connectivity Matrix
     D\\D     0     1
     0       1     1
     1       1     1
Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1
     0 2000.00  20.00
     1  22.00 2100.00
Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\\D     0      1
     0 2000.00 300.00
     1 320.00 2100.00
Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)
   D\\D     0      1
     0 2000.00 600.00
     1 600.00 2100.00
P2P=Enabled Latency (P2P Writes) Matrix (us)
   GPU     0      1
     0   2.00   3.00
     1   4.00   2.00

   CPU     0      1
     0   9.00   9.00
     1   9.00   9.00
"""
TOPO = """\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV12\tSYS\tPXB\t0-23\t0\t\tN/A
GPU1\tNV12\t X \tPIX\tSYS\t24-47\tN/A\t\tN/A
GPU2\tSYS\tPIX\t X \tSYS\t24-47\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\t X

Legend:
  X    = Self
"""
XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>1.2</driver_version><attached_gpus>2</attached_gpus>
  <gpu id="00000000:01:00.0">
    <product_name>NVIDIA A</product_name><uuid>GPU-1</uuid>
    <mig_mode><current_mig>N/A</current_mig></mig_mode>
    <fb_memory_usage><total>81920 MiB</total></fb_memory_usage>
    <pci><pci_gpu_link_info>
      <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
  </gpu>
</nvidia_smi_log>
"""
SHEET = """
data_dir: data/x100
gpu: {mem_bw: 2000000000000, mem_bw_empirical_scaling_factor: 0.8, mem_empirical_constant_latency: 0.000003,
      mem_capacity: 1073741824}
node: {num_gpus_per_node: 2, pcie_bw: 32000000000, intra_node_bw: 300000000000, p2p_latency: 0.00001}
"""
NCCL = """# nThread 1 nGpus 2 minBytes 8 maxBytes 1024 step: 2(factor)
#   Rank  0 Pid 1 on localhost device  0 [0x00] A100
#   Rank  1 Pid 1 on localhost device  1 [0x00] A100
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
host:1:1 [0] NCCL INFO Launch mode Parallel
{rows}
# Out of bounds values : 0 OK
"""
SIZES = [1 << power for power in range(12, 28, 2)]
Write = Callable[[str], Path]


def nccl(redop: str = "sum", factor: float = 1.0, header: str = "redop") -> str:
    """Times of 20 µs + size ÷ 100 GB/s."""
    rows = [f"0 0 float {redop} 12.00 0.00 0.00 N/A 34.05 0.00 0.00 N/A"]
    for size in SIZES:
        seconds = 20e-6 + size / 100e9
        rate = size / seconds / 1e9
        rows.append(
            f"{size} {size // 4} float {redop} {seconds * 1e6:.4f} {rate:.4f} {rate * factor:.4f} N/A 1 1 1 N/A"
        )
    return NCCL.format(rows="\n".join(rows)).replace("redop", header)


def copies(way: str = "H2D-Pinned") -> str:
    """Copies of 5 µs + size ÷ 12 GB/s, as bandwidthTest prints them."""
    lines = ["[CUDA Bandwidth Test] - Starting...", " Device 0: Tesla V", " Shmoo Mode"]
    for size in SIZES:
        rate = size / (5e-6 + size / 12e9) / 1e9
        lines.append(
            f"bandwidthTest-{way}, Bandwidth = {rate:.6f} GB/s, Time = 0.00000 s, Size = {size} bytes, NumDevsUsed = 1"
        )
    return "\n".join(lines)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "file"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def models(
    calibration: Calibration, kind: LinkKind, mode: LinkMode | None = None, concurrency: Concurrency = Concurrency.SOLO
) -> dict[str, LinkModel]:
    return {
        f"{model.source}>{model.destination}": model
        for model in calibration.models
        if (model.kind, model.mode, model.concurrency) == (kind, mode, concurrency)
    }


def test_p2p_rows_write_to_columns(write: Write) -> None:
    calibration = import_measurement(write(P2P))
    assert [device.name for device in calibration.devices] == ["NVIDIA A", "NVIDIA B"]
    peer = models(calibration, LinkKind.DEVICE_TO_DEVICE)
    assert peer["cuda:0>cuda:1"].bandwidth_bytes_per_s == 300e9
    assert peer["cuda:1>cuda:0"].bandwidth_bytes_per_s == 320e9
    assert peer["cuda:1>cuda:0"].beta_seconds == pytest.approx(4e-6)
    assert peer["cuda:0>cuda:1"].n_half_bytes == pytest.approx(3e-6 * 300e9)
    staged = models(calibration, LinkKind.DEVICE_TO_DEVICE, LinkMode.STAGED)
    assert staged["cuda:0>cuda:1"].bandwidth_bytes_per_s == 20e9
    both = models(calibration, LinkKind.DEVICE_TO_DEVICE, None, Concurrency.BOTH_WAYS)
    assert both["cuda:0>cuda:1"].bandwidth_bytes_per_s == 300e9, "the tool adds up both ways"
    assert models(calibration, LinkKind.DEVICE_MEMORY)["cuda:1>cuda:1"].bandwidth_bytes_per_s == 2100e9


def test_a_topology_becomes_facts(write: Write) -> None:
    for text in (TOPO, TOPO.replace("\t", "    ")):
        calibration = import_measurement(write(text))
        facts = {name: field.value for name, field in calibration.facts.items()}
        assert len(calibration.devices) == 3
        assert calibration.models == ()
        assert facts["gpu0-gpu1.path"] == "NV12"
        assert facts["gpu1-gpu2.path"] == "PIX"
        assert (facts["gpu0.cpus"], facts["gpu2.numa_node"]) == ("0-23", 1)
        assert calibration.facts["gpu1.numa_node"].reason == "nvidia-smi says N/A"
        assert any("holds no cost model" in warning for warning in calibration.warnings)
        assert any("GPUs 1, 2 hang on one PCIe switch" in warning for warning in calibration.warnings)


def test_smi_xml_bounds_the_links_by_generation_and_width(write: Write) -> None:
    calibration = import_measurement(write(XML))
    (device,) = calibration.devices
    assert (device.uuid, device.memory_bytes) == ("GPU-1", 81920 << 20)
    down = models(calibration, LinkKind.HOST_TO_DEVICE, LinkMode.PINNED)["host>cuda:0"]
    assert down.bandwidth_bytes_per_s == pytest.approx(8 * 32e9 / 8 * 128 / 130), "generation 5, 8 lanes"
    assert calibration.facts["gpu0.mig"].reason == "nvidia-smi says N/A"
    assert calibration.facts["gpu0.ecc"].reason == "this version of nvidia-smi does not tell"
    assert calibration.facts["gpu0.pcie_generation_current"].value == "1"
    assert any("not a measurement" in warning for warning in calibration.warnings)
    assert any("2 GPUs, the document describes 1" in warning for warning in calibration.warnings)


def test_a_link_that_nvidia_smi_does_not_know_has_no_model(write: Write) -> None:
    calibration = import_measurement(write(XML.replace("<max_link_gen>5", "<max_link_gen>N/A")))
    assert calibration.models == ()


def test_a_spec_sheet_names_its_corrections(write: Write) -> None:
    calibration = import_measurement(write(SHEET))
    memory = models(calibration, LinkKind.DEVICE_MEMORY)["cuda:0>cuda:0"]
    assert memory.seconds(8e6) == pytest.approx(8e6 / (0.8 * 2e12) + 3e-6)
    assert set(models(calibration, LinkKind.DEVICE_TO_DEVICE)) == {"cuda:0>cuda:1", "cuda:1>cuda:0"}
    assert models(calibration, LinkKind.HOST_TO_DEVICE, LinkMode.PINNED)["host>cuda:1"].bandwidth_bytes_per_s == 32e9
    assert calibration.devices[0].name == "x100"
    assert any("not measured" in warning for warning in calibration.warnings)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (nccl(), {LinkKind.ALL_REDUCE}),
        (nccl(redop=""), {LinkKind.ALL_TO_ALL_DISPATCH, LinkKind.ALL_TO_ALL_COMBINE}),
        ("# Collective test starting: alltoall_perf\n" + nccl(redop="none -1", header="redop root"), None),
    ],
)
def test_collectives_are_told_apart_and_fitted(write: Write, text: str, kinds: set[LinkKind] | None) -> None:
    calibration = import_measurement(write(text))
    assert {model.kind for model in calibration.models} == (
        kinds or {LinkKind.ALL_TO_ALL_DISPATCH, LinkKind.ALL_TO_ALL_COMBINE}
    )
    assert {model.source for model in calibration.models} == {"cuda:0", "cuda:1"}
    for model in calibration.models:
        assert model.form is ModelForm.AFFINE
        assert model.beta_seconds == pytest.approx(20e-6, rel=1e-3)
        assert model.bandwidth_bytes_per_s / model.alpha == pytest.approx(100e9, rel=1e-3)
        assert model.ci95 is None


def test_bandwidth_test_is_fitted(write: Write) -> None:
    calibration = import_measurement(write(copies()))
    (model,) = calibration.models
    assert (model.kind, model.mode) == (LinkKind.HOST_TO_DEVICE, LinkMode.PINNED)
    assert model.beta_seconds == pytest.approx(5e-6, rel=0.01)
    assert model.bandwidth_bytes_per_s / model.alpha == pytest.approx(12e9, rel=0.01)
    (local,) = import_measurement(write(copies("D2D"))).models
    assert local.kind is LinkKind.DEVICE_MEMORY
    assert local.bandwidth_bytes_per_s / local.alpha == pytest.approx(12e9, rel=0.01), "the tool counts both ways"


def test_stream_is_host_memory_of_the_whole_machine(write: Write) -> None:
    (model,) = import_measurement(write("Function Best Rate MB/s\nCopy:  11000.0 0.1\nTriad:  12000.0 0.1\n")).models
    assert (model.kind, model.concurrency) == (LinkKind.HOST_MEMORY, Concurrency.ALL)
    assert model.bandwidth_bytes_per_s == 11e9


def test_doctor_does_not_take_an_import_for_this_machine(write: Write, tmp_path: Path) -> None:
    location = str(tmp_path / "store.db")
    with open_store(location) as store:
        store.save_calibration(import_measurement(write(SHEET)))
    findings, _ = diagnose(location, tmp_path)
    (about,) = [finding for finding in findings if finding.what == "cost models"]
    assert about.status == "note"
    assert "spec sheet file" in about.detail


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (P2P.replace("     1 320.00 2100.00\n", ""), "1 × 2 for 2 devices"),
        (P2P.replace(" 320.00 2100.00", " 320.00"), "for 2 devices"),
        (P2P.replace("     1 320.00", "     2 320.00"), "row 2 stands where 1 is due"),
        (P2P.replace("320.00", "-320.00"), "negative"),
        (P2P.split("Unidirectional")[0], "no bandwidth matrix"),
        (TOPO.replace("GPU1\tNV12", "GPU1\tSYS"), "GPU0 to GPU1 is NV12"),
        (TOPO.replace("GPU2\tSYS\tPIX\t X \tSYS\t24-47\t1\t\tN/A\n", ""), "row of GPU2 is missing"),
        (TOPO.replace("GPU2\tSYS\tPIX\t X \tSYS", "GPU2\tSYS"), "row of GPU2 does not fit"),
        (XML.replace("</gpu>", ""), "no well-formed XML"),
        (XML.replace("<gpu ", "<card ").replace("</gpu>", "</card>"), "lists no GPU"),
        (XML.replace('v12.dtd">', 'v12.dtd" [<!ENTITY a "b">]>'), "defines entities"),
        (SHEET.replace("node:", "nodes:"), "no section node"),
        (SHEET.replace("mem_bw: 2000000000000", "mem_bw: fast"), "gpu.mem_bw is 'fast'"),
        (SHEET.replace("mem_bw: 2000000000000", "mem_bw: true"), "gpu.mem_bw is True"),
        (SHEET.replace("mem_bw: 2000000000000", "mem_bw: .inf"), "gpu.mem_bw is inf"),
        (SHEET.replace("per_node: 2", "per_node: 100000"), "100000 GPUs"),
        (SHEET + "\nx: !!python/object/apply:os.system [true]", "cannot be read"),
        (SHEET + "\n- x", "cannot be read"),
        (nccl(factor=0.5), "neither of an all-reduce"),
        (nccl(redop="", header=""), "looks like an all_gather"),
        (nccl().replace(" float sum 20.0410 ", " float sum x "), "no row of times"),
        ("\n".join(nccl().splitlines()[:8]), "no link at three sizes"),
        ("\n".join(copies().splitlines()[:5]), "no link at three sizes"),
        ("a: Copy 1.0 Triad 1\nb: Copy 2.0 Triad 2\n", "none says"),
        ("Copy: 0.0\nTriad: 0\n", "rate of 0"),
    ],
)
def test_what_contradicts_itself_is_refused(write: Write, text: str, words: str) -> None:
    with pytest.raises(ImportFormatError, match=words) as refused:
        import_measurement(write(text))
    assert refused.value.hint


READERS: tuple[Callable[[str], Figures], ...] = (
    bandwidth_test.read,
    nccl_tests.read,
    nvbandwidth.read,
    p2p.read,
    smi_xml.read,
    spec_sheet.read,
    stream.read,
    topology.read,
)
LOOKS: tuple[Callable[[str], bool], ...] = (
    bandwidth_test.looks_like,
    nccl_tests.looks_like,
    nvbandwidth.looks_like,
    p2p.looks_like,
    smi_xml.looks_like,
    spec_sheet.looks_like,
    stream.looks_like,
    topology.looks_like,
)


@given(
    source=st.sampled_from([P2P, TOPO, XML, SHEET, nccl(), copies()]),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    put=st.text(max_size=12),
)
def test_damage_anywhere_is_an_error_of_ours_or_none(source: str, cut: tuple[float, float], put: str) -> None:
    start, end = sorted(int(share * len(source)) for share in cut)
    damaged = source[:start] + put + source[end:]
    for looks_like, read in zip(LOOKS, READERS, strict=True):
        if looks_like(damaged):
            try:
                figures = read(damaged)
            except CaeeError:
                continue
            assert all(model.bandwidth_bytes_per_s > 0 for model in figures.models)


def test_every_real_file_is_read_or_refused_for_a_reason(shared_data: Path, tmp_path: Path) -> None:
    refused = {}
    with open_store(str(tmp_path / "store.db")) as store:
        for path in sorted((shared_data / "hw").glob("*/*")):
            try:
                calibration = import_measurement(path)
            except ImportFormatError as error:
                refused[path.name] = error
                continue
            assert path.name in calibration.origin
            assert calibration.models or calibration.facts
            store.save_calibration(calibration)
            assert store.calibration(calibration.calibration_id) == calibration
    assert all(error.hint for error in refused.values())
    assert set(refused) == {
        "superbench_gh200_fixture_EDITED.txt",
        "superbench_nccl_allgather.log",
        "a100_sxm_moe_vllm_0.14.0_moe_perf.parquet",
    }


def test_a_real_all_reduce_bends_and_is_followed(shared_data: Path) -> None:
    calibration = import_measurement(shared_data / "hw" / "misc" / "superbench_nccl_allreduce.log")
    model = calibration.models[0]
    assert (model.form, model.status) == (ModelForm.PIECEWISE, "ok")
    assert model.seconds(1 << 20) == pytest.approx(74.78e-6, rel=0.1)
    assert model.seconds(1 << 33) == pytest.approx(63896e-6, rel=0.02)
