"""SAO: asynchronous, single-rollout reinforcement learning of mixture-of-experts models on Megatron-Core and vLLM."""

__version__ = "0.1.0"
