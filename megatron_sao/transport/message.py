"""One bucket as a message: the bytes of its items, then a trailer that says what they must add up to.

Owns: `MessageBuffer`, `content_checksum`. Invariant: a bucket with one changed, lost or moved 4-byte word is refused.
Torch operations alone, in integers: the same number on a CPU and on a GPU.
"""

import torch

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.plan import Bucket, WireItem

TRAILER_BYTES = 32  # checksum, number of bytes, number of the bucket, nothing: 4 int64
_ROW_WORDS = 2048
_COLUMN_STEP, _ROW_STEP = 0x5851F42D4C957F2D, 0x14057B7EF767814F  # odd and without pattern


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
    """64 bits of a byte tensor that depend on every 4-byte word and on its place.

    sum over words of word * weight, modulo 2^64, weight = column weight + row weight of the words laid out in rows.
    The sums over rows and over columns are all that touches every byte: no product and no copy of the content.
    Weights are odd, so that one changed word always shows; so do two words that changed places, unless their weights
    agree in their last 32 bits.

    Args:
        content: [n] uint8, n a multiple of 4, aligned as int32.
    """
    words = content.view(torch.int32)
    num_rows = words.numel() // _ROW_WORDS
    body = words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS)
    rest = words[num_rows * _ROW_WORDS :].long()
    columns = body.sum(0, dtype=torch.int64)
    columns[: rest.numel()] += rest
    rows = torch.cat([body.sum(1, dtype=torch.int64), rest.sum()[None]])
    column_weights = 2 * torch.arange(_ROW_WORDS, device=words.device) * _COLUMN_STEP + 1
    row_weights = 2 * torch.arange(num_rows + 1, device=words.device) * _ROW_STEP
    return int((columns * column_weights).sum() + (rows * row_weights).sum())
