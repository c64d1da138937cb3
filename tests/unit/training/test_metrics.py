"""What progress lines say."""

import pytest

from moesaic.training.metrics import peak_flops
from moesaic.training.planning import PEAK_FLOPS


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA GeForce RTX 4090", None)],
)
def test_the_peak_of_a_device_by_its_name(device, name):
    assert peak_flops(device) == (None if name is None else PEAK_FLOPS[name])
