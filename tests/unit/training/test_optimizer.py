"""Which parameters a bf16 run computes with in bf16."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moesaic.training.optimizer import MasterWeights, kept_in_fp32
from tests.tiny_training import DENSE


def test_a_selection_bias_that_is_a_parameter_is_not_cast():
    """Ernie's is one, where DeepSeek-V3 has a buffer; its routers, which train, are cast as under FSDP."""
    config = AutoConfig.for_model(
        "ernie4_5_moe", **DENSE, moe_num_experts=8, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=1
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    (bias,) = kept_in_fp32(model)
    assert bias.endswith("e_score_correction_bias")
    model.get_parameter(bias).data.fill_(1.001)
    masters = MasterWeights(model, copies=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == {bias}
    assert torch.equal(masters.parameters[bias], torch.full_like(masters.parameters[bias], 1.001))
