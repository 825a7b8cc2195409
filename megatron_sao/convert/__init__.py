"""Names and layouts of weights, Megatron <-> HF, as pure functions on shapes: no process group, no tensor moved."""
