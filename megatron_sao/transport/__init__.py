"""Between processes: typed records over ZeroMQ, and weights over gloo or NCCL.

Nothing here knows a model, an environment or an algorithm. Imports where Megatron is absent and (all but `vllm_plugin`)
where vLLM is absent.
"""
