"""[push]: how new policy weights reach the engines."""

from typing import Literal

from pydantic import Field

from megatron_sao.config.section import Section


class Push(Section):
    bucket_bytes: int = Field(
        64 * 2**20, ge=1, description="largest message; a tensor that is larger travels in slices"
    )
    timeout_s: float = Field(120.0, gt=0, description="time one push may take")
    attempts: int = Field(4, ge=1, description="weight groups formed for one push before it is given up")
    backend: Literal["gloo", "nccl"] = Field("gloo", description="gloo between CPUs, nccl between GPUs")
    transport: Literal["network", "disk"] = Field(
        "network", description="how buckets travel; disk: through files, where the network cannot carry them"
    )
    folder: str = Field(
        "", description='of transport "disk": where trainer and engines both see it; empty = push/ in the run folder'
    )
