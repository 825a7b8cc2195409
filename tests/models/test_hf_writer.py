"""Safetensors files written tensor by tensor are what any reader expects, and complete or refused."""

import errno
import os

import pytest
import torch
from safetensors.torch import load_file

from megatron_sao.errors import CheckpointError
from megatron_sao.models.hf_folder import INDEX, HFFolder
from megatron_sao.models.hf_writer import HFWriter
from megatron_sao.models.new_folder import new_folder

TENSORS = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(5, 3).bfloat16(),
    "scale": torch.tensor(2.5),
    "eighth": torch.randn(4, 6).to(torch.float8_e4m3fn),
    "whole": torch.randn(6, 4),
    "empty": torch.empty(0, 4),
}


def announced(tensors=TENSORS):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def same(found, expected):
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(*bits)


def test_one_file_holds_every_format_in_any_order_of_writing(tmp_path):
    with HFWriter(tmp_path, announced()) as writer:
        for name in reversed(TENSORS):
            writer.write(name, TENSORS[name])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys() and all(same(found[name], TENSORS[name]) for name in TENSORS)


def test_files_of_bounded_size_have_an_index(tmp_path):
    with HFWriter(tmp_path, announced(), max_file_bytes=100) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    (tmp_path / "config.json").write_text("{}")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    assert (tmp_path / INDEX).exists()
    folder = HFFolder(tmp_path)
    assert folder.names() == list(TENSORS)
    assert all(same(folder.read_whole(name), TENSORS[name]) for name in TENSORS)
    assert set(load_file(tmp_path / files[1])) == {"whole", "empty"}


def test_a_view_is_written_as_what_it_shows(tmp_path):
    columns = torch.arange(12.0).view(3, 4)[:, 1:3]
    with HFWriter(tmp_path, announced({"columns": columns})) as writer:
        writer.write("columns", columns)
    assert load_file(tmp_path / "model.safetensors")["columns"].tolist() == columns.tolist()


def test_what_is_not_as_announced_or_not_written_is_refused(tmp_path):
    writer = HFWriter(tmp_path, announced())
    whole = TENSORS["whole"]
    for name, tensor in (("whole", whole.bfloat16()), ("whole", whole.T), ("other", whole)):
        with pytest.raises(CheckpointError, match=f"{name} is torch"):
            writer.write(name, tensor)
    with pytest.raises(CheckpointError, match=r"5 tensors were not written, the first are \['odd', 'half'"):
        with writer:
            writer.write("whole", TENSORS["whole"])


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    wanted = tmp_path / "made"
    with pytest.raises(ZeroDivisionError), new_folder(wanted) as partial:
        (partial / "file").write_text("half")
        assert not wanted.exists()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with new_folder(wanted) as partial:
        (partial / "file").write_text("first")
    with pytest.raises(CheckpointError, match="made exists already"), new_folder(wanted):
        raise AssertionError("nothing is begun")
    with new_folder(wanted, replace=True) as partial:
        (partial / "other").write_text("second")
    assert [path.name for path in wanted.iterdir()] == ["other"] and len(list(tmp_path.iterdir())) == 1


def test_a_tensor_beyond_what_one_system_call_writes(tmp_path):
    """One write hands over less than 2 GiB; the rest would stay a hole of zeros in a file of the right size."""
    large = torch.ones(2**31 + 2**20, dtype=torch.uint8)
    with HFWriter(tmp_path, announced({"large": large})) as writer:
        writer.write("large", large)
    with (tmp_path / "model.safetensors").open("rb") as file:
        file.seek(-(2**20) - 2**16, 2)
        assert set(file.read()) == {1}


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"cannot write into {tmp_path / 'file'}"):
        with new_folder(tmp_path / "file" / "made"):
            raise AssertionError("nothing is begun")
    with pytest.raises(CheckpointError, match="made was not completed, nothing is left of it.*No space left"):
        with new_folder(tmp_path / "made"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
