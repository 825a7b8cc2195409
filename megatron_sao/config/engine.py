"""[engine]: the vLLM servers."""

from typing import Literal

from pydantic import Field

from megatron_sao.config.section import Section


class Engine(Section):
    count: int = Field(1, ge=1, description="vLLM servers")
    tensor_parallel: int = Field(1, ge=1, description="workers of one server that share each layer")
    pipeline_parallel: int = Field(1, ge=1, description="stages of one server: consecutive layers, each on own workers")
    data_parallel: int = Field(
        1, ge=1, description="replicas within one server that share the routed experts alone; needs expert_parallel"
    )
    expert_parallel: bool = Field(
        False, description="a worker holds whole experts: those of a layer go over tensor_parallel * data_parallel"
    )
    host: str = Field("127.0.0.1", min_length=1, description="address the servers listen on")
    port: int = Field(0, ge=0, le=65535, description="of the first server, the next ones follow; 0 = pick free ports")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format of the servers")
    quantization: Literal["none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"] = Field(
        "none", description="what vLLM makes of the matrices as they arrive: FP8 with one scale for each of these"
    )
    max_model_len: int = Field(256, ge=2, description="longest sequence a server accepts, in tokens")
    kv_cache_bytes: int = Field(64 * 2**20, ge=1, description="memory of the key/value cache of one worker")
    max_num_seqs: int = Field(64, ge=1, description="requests one server runs at the same time")
    start_timeout_s: float = Field(240.0, gt=0, description="time a server has to become ready")
    request_timeout_s: float = Field(120.0, gt=0, description="time one request may take, apart from pushes")
    restarts: int = Field(3, ge=0, description="times that the local run starts a server again that has died")

    @property
    def num_workers(self) -> int:
        """Of one server."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def num_expert_ranks(self) -> int:
        """Workers of one stage that share out whole experts; 1 = none do."""
        return self.tensor_parallel * self.data_parallel if self.expert_parallel else 1
