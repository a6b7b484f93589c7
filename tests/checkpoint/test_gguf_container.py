"""The GGUF container: what the gguf package reads, and every way a header can lie."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from checkpoint_builders import llama_tensors, pair, raw_gguf, row, save_gguf, text

from lowbit.checkpoint.gguf.container import GGUFFile
from lowbit.errors import CheckpointError


def opened(tmp_path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def test_same_as_the_gguf_package(tmp_path):
    import gguf

    metadata = {"general.name": "żółć", "a.list": [1, 2, 3], "a.floats": [0.5, -1.0], "a.words": ["x", "", "漢字"]}
    path = save_gguf(tmp_path / "m.gguf", llama_tensors(), "Q4_0", metadata=metadata)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours[name] == field.contents(), name
    assert set(ours.keys()) == {name for name in theirs.fields if not name.startswith("GGUF.")}
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.type.name == tensor.tensor_type.name


def test_every_value_type_by_hand(tmp_path):
    numbers = [
        (0, "B", 200), (1, "b", -5), (2, "H", 60000), (3, "h", -300), (4, "I", 4_000_000_000), (5, "i", -7),
        (6, "f", 0.5), (7, "?", True), (10, "Q", 1 << 60), (11, "q", -(1 << 60)), (12, "d", 0.1),
    ]  # fmt: skip
    pairs = [pair(f"k{kind}", kind, struct.pack(f"<{code}", value)) for kind, code, value in numbers]
    pairs += [pair(f"l{kind}", 9, struct.pack(f"<IQ2{code}", kind, 2, value, value)) for kind, code, value in numbers]
    pairs.append(pair("s", 8, text("ab")))
    pairs.append(pair("ls", 9, struct.pack("<IQ", 8, 2) + text("") + text("c")))
    file = opened(tmp_path, raw_gguf(pairs, version=2))
    for kind, _, value in numbers:
        assert file[f"k{kind}"] == value and file[f"l{kind}"] == [value, value]
    assert file["s"] == "ab" and file["ls"] == ["", "c"]
    assert file.get("none") is None and file.get("none", 3) == 3 and "none" not in file


GOOD = row("t", (32, 2), 2, 0)  # Q4_0, 36 bytes

HOSTILE = {
    "empty": (b"", "has 0 bytes: a GGUF header alone has 24"),
    "other magic": (raw_gguf(magic=b"GGML"), "does not begin with 'GGUF'"),
    "version 1": (raw_gguf(version=1), "its version is 1: little-endian GGUF of version 2 or 3 is read"),
    "big-endian": (raw_gguf(version=3 << 24), "it is big-endian"),
    "many tensors": (raw_gguf(tensors=1 << 60), "announces 1152921504606846976 tensors, at least 32 bytes each"),
    "many keys": (raw_gguf(keys=1 << 63), "announces 9223372036854775808 metadata pairs"),
    "long key": (
        raw_gguf([struct.pack("<Q", 1 << 62) + bytes(40)]),
        "the header needs 4611686018427387904 bytes at 32",
    ),
    "key not text": (raw_gguf([text(b"\xff\xff") + bytes(20)]), "a metadata key is not UTF-8"),
    "value type": (raw_gguf([pair("k", 77, bytes(8))]), "metadata 'k' has value type 77: the types are 0 to 12"),
    "long string": (raw_gguf([pair("k", 8, struct.pack("<Q", 1 << 40))]), "the header needs 1099511627776 bytes"),
    "array of arrays": (raw_gguf([pair("k", 9, struct.pack("<IQ", 9, 1) + bytes(12))]), "'k' is an array of type 9"),
    "long array": (raw_gguf([pair("k", 9, struct.pack("<IQ", 0, 1 << 50))]), "'k' announces 1125899906842624 items"),
    "array past the end": (raw_gguf([pair("k", 9, struct.pack("<IQ", 12, 1 << 20))]), "the header needs 8388608 bytes"),
    "strings past the end": (
        raw_gguf([pair("k", 9, struct.pack("<IQ", 8, 1 << 20))]),
        "announces 1048576 strings in 'k', at least 8 bytes each",
    ),
    "key twice": (raw_gguf([pair("k", 7, b"\1")] * 2), "metadata key 'k' stands twice"),
    "alignment 3": (raw_gguf([pair("general.alignment", 4, struct.pack("<I", 24))]), "general.alignment is 24"),
    "alignment 0": (raw_gguf([pair("general.alignment", 4, bytes(4))]), "general.alignment is 0"),
    "alignment text": (raw_gguf([pair("general.alignment", 8, text("x"))]), "general.alignment is 'x'"),
    "alignment huge": (
        raw_gguf([pair("general.alignment", 4, struct.pack("<I", 1 << 31))]),
        "general.alignment is 2147",
    ),
    "no dimensions": (raw_gguf(rows=[row("t", (), 0, 0) + bytes(40)]), "tensor 't' has 0 dimensions"),
    "many dimensions": (raw_gguf(rows=[row("t", (1,) * 5, 0, 0)]), "tensor 't' has 5 dimensions: 1 to 4"),
    "dimension 0": (raw_gguf(rows=[row("t", (32, 0), 0, 0)]), r"tensor 't' has shape \[0, 32\]: no size may be 0"),
    "tensor twice": (raw_gguf(rows=[GOOD, GOOD], data=bytes(64)), "tensor 't' stands twice"),
    "unknown type": (
        raw_gguf(rows=[row("t", (32,), 99, 0)]),
        r"tensor 't' has type unknown \(99\): this version reads F32",
    ),
    "type not read": (raw_gguf(rows=[row("t", (256,), 16, 0)]), r"tensor 't' has type IQ2_XXS \(16\)"),
    "broken block": (
        raw_gguf(rows=[row("t", (33, 2), 2, 0)], data=bytes(64)),
        "tensor 't' has rows of 33 weights: Q4_0 stores blocks of 32",
    ),
    "offset not aligned": (raw_gguf(rows=[row("t", (32, 2), 2, 8)], data=bytes(64)), "begins at byte 8 of the data"),
    "cut in the data": (raw_gguf(rows=[GOOD], data=bytes(35)), r"tensor 't' takes bytes \d+ to \d+, but the file has"),
    "offset outside": (
        raw_gguf(rows=[row("t", (32, 2), 2, 1 << 40)], data=bytes(64)),
        "tensor 't' takes bytes 1099511",
    ),
    "product overflows": (raw_gguf(rows=[row("t", (1 << 62,) * 4, 0, 0)]), "tensor 't' takes bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(tmp_path, name):
    content, message = HOSTILE[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path, content)
    assert "model.gguf" in str(caught.value)


def test_hostile_counts_cost_no_memory(tmp_path):
    for name in ("many tensors", "many keys", "long string", "long array", "strings past the end", "product overflows"):
        tracemalloc.start()
        with pytest.raises(CheckpointError):
            opened(tmp_path, HOSTILE[name][0])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20, name


def test_cut_anywhere(tmp_path):
    """Every prefix of a file is refused with a CheckpointError, and nothing else."""
    pairs = [
        pair("a", 4, bytes(4)),
        pair("b", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz")),
        pair("c", 8, text("q")),
    ]
    whole = raw_gguf(pairs, [GOOD, row("u", (7,), 0, 64)], bytes(64 + 28))
    assert set(opened(tmp_path, whole).tensors) == {"t", "u"}
    for stop in range(len(whole)):
        with pytest.raises(CheckpointError):
            opened(tmp_path, whole[:stop])


def test_an_array_cut_after_opening(tmp_path):
    file = opened(tmp_path, raw_gguf([pair("b", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz"))]))
    file.path.write_bytes(file.path.read_bytes()[:60])
    with pytest.raises(CheckpointError, match="metadata 'b' was cut off since the file was opened"):
        file["b"]


def test_a_missing_key(tmp_path):
    with pytest.raises(CheckpointError, match=r"metadata key 'general\.architecture' is missing"):
        opened(tmp_path, raw_gguf())["general.architecture"]
