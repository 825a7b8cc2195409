"""[warm_start]: the tiny demonstration model and the supervised steps that teach it the format of its task."""

from pydantic import Field

from megatron_sao.config.section import Section


class WarmStart(Section):
    enabled: bool = Field(True, description="make and teach the demonstration model; needs an empty model.path")
    steps: int = Field(300, ge=0, description="supervised steps on demonstrations, at most")
    stop_at_probability: float = Field(
        0.3, ge=0, lt=1, description="end it once the mean probability of a whole demonstration reaches this; 0 = never"
    )
    batch: int = Field(64, ge=1, description="demonstration episodes of one supervised step")
    lr: float = Field(2e-3, gt=0, description="learning rate of the supervised steps")
    cache_folder: str = Field(
        "", description="where finished models are kept, by content; empty = the user's cache folder"
    )
    layers: int = Field(4, ge=1, description="transformer layers")
    hidden: int = Field(64, ge=1, description="width of the residual stream")
    heads: int = Field(4, ge=1, description="attention heads")
    kv_heads: int = Field(2, ge=1, description="key/value heads; must divide heads")
    head_dim: int = Field(
        32, ge=2, multiple_of=2, description="width of one head; vLLM on a CPU needs a multiple of 32"
    )
    experts: int = Field(8, ge=1, description="routed experts of each layer")
    top_k: int = Field(2, ge=1, description="experts that each token is sent to")
    expert_ffn: int = Field(32, ge=1, description="inner width of one expert")
