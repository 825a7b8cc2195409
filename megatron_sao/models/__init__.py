"""The policy and the value model as Megatron-Core models: built, loaded, grouped, exported."""
