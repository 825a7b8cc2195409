"""The checksum of a bucket: any change shows, and it is the sum that its docstring says."""

import hashlib

import pytest
import torch

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.message import MessageBuffer, content_checksum
from megatron_sao.transport.plan import Bucket, WireItem

ROW_WORDS = 2048


def content(num_words: int, seed: int = 0) -> torch.Tensor:
    """Random float32 as bytes; two of them make a word."""
    return torch.randn(2 * num_words, generator=torch.Generator().manual_seed(seed)).view(torch.uint8)


@pytest.mark.parametrize("num_words", [2, 2048, 2050, 3 * 2048, 3 * 2048 + 1000])
def test_it_hashes_the_sums_of_columns_and_rows(num_words):
    words = content(num_words).view(torch.int64).tolist()
    columns, rows = [0] * ROW_WORDS, [0] * (num_words // ROW_WORDS + 1)
    for place, word in enumerate(words):
        row, column = divmod(place, ROW_WORDS)
        columns[column] += word
        rows[row] += word
    sums = b"".join((value % 2**64).to_bytes(8, "little") for value in columns + rows)
    expected = int.from_bytes(hashlib.sha256(sums).digest()[:8], "little", signed=True)
    assert content_checksum(content(num_words)) == expected


def test_a_changed_bit_and_words_that_changed_places_show():
    num_words = 3 * 2048 + 100
    right = content_checksum(content(num_words))
    for byte in range(0, 8 * num_words, 997):
        for bit in (0, 7):
            changed = content(num_words)
            changed[byte] ^= 1 << bit
            assert content_checksum(changed) != right
    # Words that differ in one sign alone change places: in a row, in a column, in the last and incomplete row.
    signs = torch.ones(2 * num_words)
    signs[1::4] = -1
    signs[2 * 2048 :].neg_()  # so that words above each other differ, too
    words = signs.view(torch.int64)
    right = content_checksum(words.view(torch.uint8))
    for first, second in [(0, 1), (0, 2047), (1, 2049), (0, 2048), (5, 4100), (2048, 6145), (0, 6145)]:
        swapped = words.clone()
        swapped[[first, second]] = swapped[[second, first]]
        assert (content_checksum(swapped.view(torch.uint8)) != right) == (words[first] != words[second]).item()
    assert words[0] != words[1] and words[0] != words[2048]


def bucket_of(num_elements: int) -> Bucket:
    return Bucket(3, (WireItem("a", "float32", (num_elements,)), WireItem("b", "bfloat16", (5,))))


def test_a_sealed_bucket_is_accepted_and_what_is_not_this_one_is_refused():
    bucket, buffer = bucket_of(33), MessageBuffer(bucket_of(40).num_bytes, torch.device("cpu"))
    for item, place in buffer.views(bucket):
        place.copy_(torch.arange(item.full_shape[0]))
    buffer.seal(bucket, 7)
    buffer.check(bucket, 7)
    assert buffer.message(bucket).numel() == bucket.num_bytes + 32
    with pytest.raises(ProtocolError, match="bucket 8 of .* was expected, bucket 7"):
        buffer.check(bucket, 8)
    buffer.views(bucket)[1][1][4] = 5
    with pytest.raises(ProtocolError, match=r"other bytes .* \(checksum\); first tensor a"):
        buffer.check(bucket, 7)
