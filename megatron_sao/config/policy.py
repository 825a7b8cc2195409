"""[policy]: the policy's optimizer, and its multi-token-prediction (MTP) layers.

With `mtp_loss_weight` 0 the trainer does not build them: their tensors keep the values of the model folder, an export
copies them from there, a push leaves them alone. Above 0 they are trained next to the policy, which gets no gradient
from them (but an update whose gradients are not finite is left out for both), and are exported and pushed like the
rest. The value model never has any.
"""

from pydantic import Field

from megatron_sao.config.section import Optimizer


class Policy(Optimizer):
    lr: float = Field(1e-6, gt=0, description="peak learning rate; constant after its warm-up")
    mtp_loss_weight: float = Field(
        0.0, ge=0, description="factor on the MTP layer's token cross entropy; 0 = MTP layers are left as they are"
    )
