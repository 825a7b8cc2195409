"""Results of micro-batches, which only the last pipeline stage has, brought back to the share on every stage."""

import torch

from megatron_sao.data.share import Share
from megatron_sao.parallel.exchange import from_last_stage
from megatron_sao.parallel.schedule import is_last_stage


def scatter_to_share(reports: list[dict], name: str, share: Share) -> torch.Tensor:
    """Per-token results of micro-batches back on the share: float32 [S], on every pipeline stage.

    Collective: every rank of the pipeline axis.
    """
    merged = torch.zeros(share.batch.num_tokens, dtype=torch.float32) if is_last_stage() else None
    for report, micro_batch in zip(reports, share.micro_batches, strict=False):
        merged[micro_batch.token_index] = report[name]
    return from_last_stage(merged, (share.batch.num_tokens,)).cpu()
