"""One bucket as a message: the bytes of its items, then a trailer that says what they must add up to.

Owns: `MessageBuffer`, `content_checksum`. Invariant: a bucket with one changed word, or two that changed places, is
refused.
"""

import hashlib

import torch

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.plan import Bucket, WireItem

TRAILER_BYTES = 32  # checksum, number of bytes, number of the bucket, nothing: 4 int64
_ROW_WORDS = 2048


class MessageBuffer:
    """Room for any bucket of a plan, used again and again.

    Args:
        max_bucket_bytes: of the plan.
    """

    def __init__(self, max_bucket_bytes: int, device: torch.device):
        self._bytes = torch.zeros(max_bucket_bytes + TRAILER_BYTES, dtype=torch.uint8, device=device)

    def message(self, bucket: Bucket) -> torch.Tensor:
        """The part that travels: [num_bytes + TRAILER_BYTES] uint8, a view."""
        return self._bytes[: bucket.num_bytes + TRAILER_BYTES]

    def views(self, bucket: Bucket) -> list[tuple[WireItem, torch.Tensor]]:
        """The place of each item, as a tensor of its dtype and shape. Views, no copies."""
        return [
            (item, self._bytes[offset : offset + item.num_bytes].view(getattr(torch, item.dtype)).view(item.shape))
            for item, offset in zip(bucket.items, bucket.offsets, strict=True)
        ]

    def seal(self, bucket: Bucket, number: int) -> None:
        """Write the trailer, once the items are in place."""
        self._trailer(bucket).copy_(torch.tensor([self._checksum(bucket), bucket.num_bytes, number, 0]))

    def check(self, bucket: Bucket, number: int) -> None:
        """Raise ProtocolError unless these are the bytes that were sealed as this bucket."""
        checksum, num_bytes, number_sent, _ = self._trailer(bucket).tolist()
        if (num_bytes, number_sent) != (bucket.num_bytes, number):
            raise ProtocolError(f"bucket {number} of {bucket.num_bytes} bytes was expected, bucket {number_sent} of "
                                f"{num_bytes} bytes arrived")
        if checksum != self._checksum(bucket):
            raise ProtocolError(f"bucket {number} from trainer rank {bucket.src_rank} arrived with other bytes than it "
                                f"was sent with (checksum); first tensor {bucket.items[0].name}")

    def _checksum(self, bucket: Bucket) -> int:
        return content_checksum(self._bytes[: bucket.num_bytes])

    def _trailer(self, bucket: Bucket) -> torch.Tensor:
        return self._bytes[bucket.num_bytes : bucket.num_bytes + TRAILER_BYTES].view(torch.int64)


def content_checksum(content: torch.Tensor) -> int:
    """64 bits of a byte tensor that depend on every 8-byte word and on its place.

    The words are laid out in rows; the checksum is a hash of the sums of all columns and all rows (modulo 2^64). A word
    that changes alone changes its column's sum; of two unequal words that change places, each leaves its row or its
    column. The sums are all that touches every byte, at the speed of memory, and they are exact, so a GPU finds the
    same.

    Args:
        content: [n] uint8, n a multiple of 8, aligned as int64.
    """
    words = content.view(torch.int64)
    num_rows = words.numel() // _ROW_WORDS
    body, rest = words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS), words[num_rows * _ROW_WORDS :]
    columns = body.sum(0)
    columns[: rest.numel()] += rest
    sums = torch.cat([columns, body.sum(1), rest.sum()[None]])
    return int.from_bytes(hashlib.sha256(sums.cpu().numpy().tobytes()).digest()[:8], "little", signed=True)
