"""Adam for the CPU with the state layout of the fused GPU Adam, so that Megatron's distributed optimizer works on it.

megatron-core 0.19 with torch's own AdamW: the distributed optimizer keeps one step counter for all parameters or
cannot resume (assertion, KeyError). FusedAdam keeps `step` in the parameter group; so does this class, which makes
optimizer checkpoints of a CPU run and of a GPU run alike.
"""

import torch


class GroupStepAdam(torch.optim.Optimizer):
    """Adam / AdamW (Loshchilov & Hutter 2019); `step` lives in the parameter group, as in FusedAdam.

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  p <- p - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, **_):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict) -> None:
        beta1, beta2 = group["betas"]
        lr, decay, step = group["lr"], group["weight_decay"], group["step"]
        state = self.state[param]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        if decay and self.adam_w_mode:
            param.mul_(1 - lr * decay)
        elif decay:
            grad = grad.add(param, alpha=decay)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        param.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - beta1**step))


def install() -> None:
    """Make Megatron's optimizer factory use this class. Effect: module globals of megatron.core.optimizer."""
    import megatron.core.optimizer as factory
    import megatron.core.optimizer.distrib_optimizer as distributed

    factory.Adam = distributed.Adam = GroupStepAdam
    factory.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
