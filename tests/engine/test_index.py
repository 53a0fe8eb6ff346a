"""The index of a checkpoint's experts: both layouts, shards, and every way in which files can be wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from probes.errors import CheckpointError
from runtime.experts.headers import read_headers
from runtime.experts.index import expert_bytes, index_experts

LAYERS, EXPERTS, HIDDEN, INNER = 2, 3, 8, 6


def per_expert_tensors() -> dict[str, torch.Tensor]:
    tensors = {"model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors[f"{prefix}.gate_proj.weight"] = torch.randn(INNER, HIDDEN)
            tensors[f"{prefix}.up_proj.weight"] = torch.randn(INNER, HIDDEN)
            tensors[f"{prefix}.down_proj.weight"] = torch.randn(HIDDEN, INNER)
    return tensors


def fused_tensors() -> dict[str, torch.Tensor]:
    tensors = {"model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        tensors[f"{prefix}.gate_up_proj"] = torch.randn(EXPERTS, 2 * INNER, HIDDEN)
        tensors[f"{prefix}.down_proj"] = torch.randn(EXPERTS, HIDDEN, INNER)
        tensors[f"{prefix}.gate_up_proj_bias"] = torch.randn(EXPERTS, 2 * INNER)
    return tensors


def save(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int) -> Path:
    names = list(tensors)
    weight_map = {}
    for shard in range(count):
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        chosen = names[shard::count]
        save(folder, {name: tensors[name] for name in chosen}, file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def stored(folder: Path, layer: int, expert: int) -> dict[tuple[str, int], torch.Tensor]:
    """What the index's reads find in the files, by parameter and part."""
    found = {}
    for read in index_experts(folder).reads[layer][expert]:
        data = read.path.read_bytes()[read.offset : read.offset + read.size_bytes]
        for piece in read.pieces:
            span = bytearray(data[piece.start : piece.start + piece.size_bytes])
            found[piece.parameter, piece.part] = torch.frombuffer(span, dtype=torch.float32).view(piece.shape)
    return found


def assert_per_expert(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            found = stored(folder, layer, expert)
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            for key, name in ((("gate_up_proj", 0), "gate"), (("gate_up_proj", 1), "up"), (("down_proj", 0), "down")):
                assert torch.equal(found[key], tensors[f"{prefix}.{name}_proj.weight"])


def test_per_expert_layout_names_every_byte(tmp_path: Path) -> None:
    tensors = per_expert_tensors()
    folder = save(tmp_path, tensors)
    index = index_experts(folder)
    assert (index.num_experts, index.layer_numbers) == (EXPERTS, (0, 1))
    assert index.expert_bytes == expert_bytes(folder) == 3 * INNER * HIDDEN * 4
    assert set(index.dense) == {"model.norm.weight"}
    assert index.fused == {}
    assert_per_expert(folder, tensors)


def test_neighbouring_tensors_become_one_read(tmp_path: Path) -> None:
    # safetensors' own writer puts tensors of one data type in the order of their names.
    index = index_experts(save(tmp_path, per_expert_tensors()))
    assert all(len(expert) == 1 and len(expert[0].pieces) == 3 for layer in index.reads for expert in layer)


@pytest.mark.parametrize("count", [2, 5])
def test_shards_are_read_as_one_checkpoint(tmp_path: Path, count: int) -> None:
    tensors = per_expert_tensors()
    folder = save_shards(tmp_path, tensors, count)
    assert_per_expert(folder, tensors)
    assert index_experts(folder).expert_bytes == 3 * INNER * HIDDEN * 4


def test_fused_layout_slices_by_expert(tmp_path: Path) -> None:
    tensors = fused_tensors()
    folder = save(tmp_path, tensors)
    index = index_experts(folder)
    assert index.expert_bytes == (3 * INNER * HIDDEN + 2 * INNER) * 4
    assert set(index.fused) == {"gate_up_proj", "down_proj", "gate_up_proj_bias"}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for (parameter, _), value in stored(folder, layer, expert).items():
                assert torch.equal(value, tensors[f"model.layers.{layer}.mlp.experts.{parameter}"][expert])


def test_other_names_of_the_same_parts(tmp_path: Path) -> None:
    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = {}
    for name, value in per_expert_tensors().items():
        for long, short in renamed.items():
            name = name.replace(long, short)
        tensors[name.replace("mlp.experts", "block_sparse_moe.experts")] = value
    folder = save(tmp_path, tensors)
    found = stored(folder, 1, 2)
    prefix = "model.layers.1.block_sparse_moe.experts.2"
    assert torch.equal(found["gate_up_proj", 0], tensors[f"{prefix}.w1.weight"])
    assert torch.equal(found["gate_up_proj", 1], tensors[f"{prefix}.w3.weight"])
    assert torch.equal(found["down_proj", 0], tensors[f"{prefix}.w2.weight"])


def test_experts_without_a_gate(tmp_path: Path) -> None:
    tensors = {name: value for name, value in per_expert_tensors().items() if "gate" not in name}
    assert set(stored(save(tmp_path, tensors), 0, 0)) == {("up_proj", 0), ("down_proj", 0)}


def test_layers_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    folder = save(tmp_path, per_expert_tensors())
    index = index_experts(folder, layers=(1,))
    assert index.layer_numbers == (1,)
    assert len(index.reads) == 1
    with pytest.raises(CheckpointError, match="lacks the experts of layer 5"):
        index_experts(folder, layers=(1, 5))


def test_a_renamed_tensor_is_indexed_under_its_new_name(tmp_path: Path) -> None:
    tensors = {name.replace("mlp.experts.down_proj", "moe.output"): value for name, value in fused_tensors().items()}
    folder = save(tmp_path, tensors)
    index = index_experts(folder, rename=lambda key: key.replace("moe.output", "mlp.experts.down_proj"))
    assert {piece.parameter for read in index.reads[0][0] for piece in read.pieces} >= {"gate_up_proj", "down_proj"}


def test_a_whole_model_is_preferred_to_other_files_beside_it(tmp_path: Path) -> None:
    tensors = per_expert_tensors()
    save(tmp_path, tensors)
    save(tmp_path, {"layers.0.weight": torch.ones(3)}, "consolidated.safetensors")
    assert_per_expert(tmp_path, tensors)


def test_only_the_shards_of_the_list_are_read(tmp_path: Path) -> None:
    tensors = per_expert_tensors()
    save_shards(tmp_path, tensors, 2)
    save(tmp_path, {"model.norm.weight": torch.zeros(3)}, "consolidated.safetensors")
    assert_per_expert(tmp_path, tensors)
    assert index_experts(tmp_path).dense["model.norm.weight"].shape == (HIDDEN,)


# Damage ---------------------------------------------------------------------------------------------------------------


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        index_experts(folder)
    assert caught.value.hint, f"{caught.value} does not say what to do"
    assert str(folder) in caught.value.message
    return caught.value


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = save(tmp_path_factory.mktemp("whole"), per_expert_tensors())
    return (folder / "model.safetensors").read_bytes()


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, whole_file: bytes, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, len(whole_file) - 1))
    (tmp_path / "model.safetensors").write_bytes(whole_file[:kept])
    assert "is cut off or damaged" in refusal(tmp_path).message


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_is_refused_or_still_says_the_same(
    tmp_path: Path, whole_file: bytes, data: st.DataObject
) -> None:
    header_end = 8 + struct.unpack("<Q", whole_file[:8])[0]
    at = data.draw(st.integers(0, header_end - 1))
    damaged = bytearray(whole_file)
    damaged[at] = data.draw(st.integers(0, 255))
    file = tmp_path / "model.safetensors"
    file.write_bytes(damaged)
    try:
        index = index_experts(tmp_path)
    except CheckpointError:
        return
    for layer in index.reads:
        for expert in layer:
            assert all(header_end <= read.offset <= len(damaged) - read.size_bytes for read in expert)


@given(header=st.binary(max_size=200))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_no_checkpoint(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    refusal(tmp_path)


def write_header(folder: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def tensor(start: object, stop: object, shape: object = (2,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


BAD_HEADERS: dict[str, object] = {
    "not an object": [1, 2],
    "not text": b"\xff\xfe\x00garbage",
    "cut in the middle": b'{"a": {"dtype": "F32", "shape": [2',
    "nested too deep": b"[" * 200_000,
    "no data type": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "offsets of another form": {"a": {"dtype": "F32", "shape": [2], "data_offsets": 8}},
    "offset beyond the file": {"a": tensor(0, 8000, [2000])},
    "offsets backwards": {"a": tensor(8, 0)},
    "negative offset": {"a": tensor(-8, 0)},
    "shape contradicts size": {"a": tensor(0, 8, [3])},
    "negative shape": {"a": tensor(0, 8, [-1, -2])},
    "shape of text": {"a": tensor(0, 8, "2")},
    "fractional shape": {"a": tensor(0, 8, [2.0])},
    "endless shape": b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}',
    "overlapping": {"a": tensor(0, 8), "b": tensor(4, 12)},
    "a gap": {"a": tensor(0, 8), "b": tensor(12, 20)},
    "bytes left over": {"a": tensor(0, 8)},
    "unknown data type": {"a": tensor(0, 8, [16], "F4")},
    "an entry that is no object": {"a": 7},
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_bad_headers_are_refused(tmp_path: Path, header: object) -> None:
    error = refusal(write_header(tmp_path, header, bytes(20)))
    assert "model.safetensors" in error.message


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 200 << 20))
        stream.truncate(300 << 20)
    assert "header claims" in refusal(tmp_path).message


def test_a_pointer_of_git_lfs_is_named_as_such(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    error = refusal(tmp_path)
    assert "model.safetensors is a pointer of Git LFS" in error.message
    assert "git lfs pull" in (error.hint or "")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path, per_expert_tensors(), 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    error = refusal(tmp_path)
    assert "lacks 1 of its 3 shards" in error.message
    assert "model-00002-of-00003.safetensors" in error.message


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}', "\ud800", "[" * 100_000])
def test_a_bad_list_of_shards_is_refused(tmp_path: Path, text: str) -> None:
    save_shards(tmp_path, per_expert_tensors(), 2)
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode(errors="surrogatepass"))
    assert "index.json" in refusal(tmp_path).message


def test_a_shard_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, per_expert_tensors(), "elsewhere.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    listing = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))
    refusal(folder)


@pytest.mark.parametrize("lost", ["experts.1.gate_proj", "experts.1.", "experts.2.down_proj"])
def test_a_missing_expert_or_part_is_refused(tmp_path: Path, lost: str) -> None:
    tensors = {name: value for name, value in per_expert_tensors().items() if f"layers.1.mlp.{lost}" not in name}
    refusal(save(tmp_path, tensors))


def test_experts_of_different_sizes_are_refused(tmp_path: Path) -> None:
    tensors = per_expert_tensors()
    tensors["model.layers.0.mlp.experts.1.down_proj.weight"] = torch.randn(HIDDEN, INNER + 1)
    assert "differ in size" in refusal(save(tmp_path, tensors)).message


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_quantised_experts_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: value.to(dtype) if "experts" in name else value for name, value in per_expert_tensors().items()}
    error = refusal(save(tmp_path, tensors))
    assert "experts" in error.message
    assert "quantised" in str(error.hint)


@pytest.mark.parametrize(
    "name", ["experts.gate_up_proj_blocks", "experts.0.gate_proj.weight_scale", "experts.0.fc1.weight"]
)
def test_unknown_expert_tensors_are_refused(tmp_path: Path, name: str) -> None:
    tensors = per_expert_tensors() | {f"model.layers.0.mlp.{name}": torch.ones(4)}
    assert name in refusal(save(tmp_path, tensors)).message


@pytest.mark.parametrize("shape", [(), (0, 4)])
def test_fused_experts_without_experts_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {"model.layers.0.mlp.experts.down_proj": torch.zeros(shape)}
    assert "holds no experts" in refusal(save(tmp_path, tensors)).message


def test_an_absurd_expert_number_costs_nothing(tmp_path: Path) -> None:
    tensors = per_expert_tensors() | {"model.layers.0.mlp.experts.999999999.gate_proj.weight": torch.ones(1)}
    refusal(save(tmp_path, tensors))
    tensors = {f"model.layers.0.mlp.experts.{'9' * 5000}.gate_proj.weight": torch.ones(1)}
    refusal(save(tmp_path / "longer", tensors))


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path, per_expert_tensors(), "a.safetensors")
    save(tmp_path, per_expert_tensors(), "b.safetensors")
    assert "is in a.safetensors and in b.safetensors" in refusal(tmp_path).message


def test_a_folder_of_pickles_is_refused_unopened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    assert "never pickles" in str(refusal(tmp_path).hint)


def test_no_folder_and_no_experts(tmp_path: Path) -> None:
    assert "there is no model folder" in refusal(tmp_path / "absent").message
    assert "holds no experts" in refusal(save(tmp_path, {"model.norm.weight": torch.ones(3)})).message


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    assert "cannot read" in refusal(tmp_path).message
    (tmp_path / "model-1.safetensors").unlink()
    (tmp_path / "model-1.safetensors").mkdir()
    assert "cannot read" in refusal(tmp_path).message


def test_headers_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    tensors = per_expert_tensors() | fused_tensors() | {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    folder = save(tmp_path, tensors)
    entries = read_headers(folder)
    data = (folder / "model.safetensors").read_bytes()
    for name, value in load_file(folder / "model.safetensors").items():
        entry = entries[name]
        assert entry.shape == tuple(value.shape)
        assert data[entry.offset : entry.offset + entry.size_bytes] == value.numpy().tobytes()
