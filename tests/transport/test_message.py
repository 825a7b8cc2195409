"""The checksum of a bucket: any change shows, and it is the sum that its docstring says."""

import pytest
import torch

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.message import MessageBuffer, content_checksum
from megatron_sao.transport.plan import Bucket, WireItem

COLUMN_STEP, ROW_STEP, ROW_WORDS = 0x5851F42D4C957F2D, 0x14057B7EF767814F, 2048


def content(num_words: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_words, generator=torch.Generator().manual_seed(seed)).view(torch.uint8)


@pytest.mark.parametrize("num_words", [4, 2048, 2052, 5 * 2048, 5 * 2048 + 1000])
def test_it_is_the_weighted_sum_of_all_words(num_words):
    words = content(num_words).view(torch.int32).tolist()
    expected = 0
    for place, word in enumerate(words):
        row, column = divmod(place, ROW_WORDS)
        expected += word * (2 * column * COLUMN_STEP + 1 + 2 * row * ROW_STEP)
    assert content_checksum(content(num_words)) % 2**64 == expected % 2**64


def test_a_changed_bit_and_words_that_changed_places_show():
    num_words = 3 * 2048 + 100
    right = content_checksum(content(num_words))
    for byte in range(0, 4 * num_words, 997):
        for bit in (0, 7):
            changed = content(num_words)
            changed[byte] ^= 1 << bit
            assert content_checksum(changed) != right
    # Signs alone: two words that differ in the highest bit change places.
    signs = torch.ones(num_words)
    signs[::2] = -1
    right = content_checksum(signs.view(torch.uint8))
    for first, second in [(0, 1), (0, 2047), (1, 2048), (5, 4100), (2048, 6145), (0, 6145)]:
        assert signs[first] != signs[second]
        swapped = signs.clone()
        swapped[[first, second]] = swapped[[second, first]]
        assert content_checksum(swapped.view(torch.uint8)) != right


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
