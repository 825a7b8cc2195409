"""Layer parts without transformer-engine: RMSNorm under sequence parallelism and attention on packed sequences."""

import math

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from megatron_sao.data.context import positions_in_segments
from megatron_sao.parallel.context import context_size, gather_over_context, held_here


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the mark that makes Megatron sum its gradient over the sequence-parallel ranks.

    megatron-core 0.19: its own wrapper for torch norms refuses sequence parallelism.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(MegatronModule):
    """Causal softmax(q k^T * scale) v inside each packed segment, on torch's scaled_dot_product_attention.

    Segments are laid on a [N, longest] grid, padded on the right: causal order alone keeps padding out of every real
    position. Exact, no mask matrix; memory grows with N * longest, so it is the CPU's choice, not the GPU's.
    Under context parallelism keys and values of all ranks are gathered, and this rank's queries put at their places on
    the grid; the other places hold zeros, whose results are dropped.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        **_,
    ):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,  # [S/cp, heads/tp, head_dim]
        key: torch.Tensor,  # [S/cp, groups/tp, head_dim]
        value: torch.Tensor,  # [S/cp, groups/tp, head_dim], which may differ from the others' (MLA)
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> torch.Tensor:  # [S/cp, heads/tp * head_dim]
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("this attention takes packed (thd) sequences only: pass PackedSeqParams")
        cu_seqlens = packed_seq_params.cu_seqlens_q.long()
        lengths = cu_seqlens.diff()
        num_segments, longest = len(lengths), int(lengths.max())
        segment = torch.repeat_interleave(torch.arange(num_segments, device=query.device), lengths)
        cell = query_cell = segment * longest + positions_in_segments(cu_seqlens)
        if context_size() > 1:
            query_cell = cell[held_here(cu_seqlens)]
            widths = [key.shape[-1], value.shape[-1]]
            key, value = gather_over_context(torch.cat([key, value], -1), cu_seqlens).split(widths, -1)

        def grid(x: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:  # [S, h, d] -> [N, h, longest, d]
            padded = x.new_zeros(num_segments * longest, *x.shape[1:]).index_copy(0, cell, x)
            return padded.view(num_segments, longest, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            grid(query, query_cell),
            grid(key, cell),
            grid(value, cell),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).reshape(num_segments * longest, -1)[query_cell]
