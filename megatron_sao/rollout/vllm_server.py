"""The program of one engine: vLLM's server, started in two thirds of the time.

    python -m megatron_sao.rollout.vllm_server ARGUMENTS      those of `vllm serve`, with --model

Most of a start is imports, in the server and again in each process that it spawns. Here the garbage collector rests
while they last; what they leave lives as long as the process does, so it need never look at that again. A spawned
process imports this file too, as every spawned process does with its parent's main module: so it gets the engine, not
the whole server that vLLM's own main module would bring along.
"""

import gc

gc.disable()
if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main
else:
    import vllm.v1.engine.core  # noqa: F401
gc.freeze()
gc.enable()

if __name__ == "__main__":
    main()
