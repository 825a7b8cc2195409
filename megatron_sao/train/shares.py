"""Results of micro-batches, which only the last pipeline stage has, brought back to the share on every stage."""

import torch

from megatron_sao.data.share import Share
from megatron_sao.parallel.context import sum_over_context
from megatron_sao.parallel.exchange import from_last_stage
from megatron_sao.parallel.schedule import is_last_stage


def scatter_to_share(reports: list[dict], name: str, share: Share) -> torch.Tensor:
    """What the decoders said of each token, `reports[micro-batch][name]` float32 [P], on the share: float32 [S].

    0 at first tokens. Collective: the context axis, then the pipeline axis; all of their ranks get the same.
    """
    merged = torch.zeros(share.batch.num_tokens, dtype=torch.float32) if is_last_stage() else None
    for report, micro_batch in zip(reports, share.micro_batches, strict=False):
        merged[micro_batch.token_index] = micro_batch.onto_tokens(report[name].cpu())
    return whole_from_last_stage(merged, (share.batch.num_tokens,))


def whole_from_last_stage(part: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """The sum of what the context ranks of the last pipeline stage have: float32 [*shape] on the CPU, on every stage.

    The one place where results leave the context axis: every statistic after it counts each token once.
    Collective: the context axis of the last stage, then the pipeline axis.
    """
    return from_last_stage(sum_over_context(part) if is_last_stage() else None, shape).cpu()
