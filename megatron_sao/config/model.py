"""[model]: the weights that both models start from."""

from typing import Literal

from pydantic import Field

from megatron_sao.config.section import Section


class Model(Section):
    path: str = Field("", description="Hugging Face model folder; empty = make the demonstration model of [warm_start]")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format of weights and activations")
