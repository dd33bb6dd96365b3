"""What cannot be privatised is refused by name, before anything of the batch is seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight
from twins import by_hand, make_model, steps

from hyfreedp.gradients import AutomaticClipping, GradientEngine, check_module


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm2d(3), r"'norm' \(BatchNorm2d\) .*replace_batch_norm"),
        (frozen(nn.BatchNorm1d(3)), "keep it in eval mode"),
        (frozen(nn.BatchNorm1d(3, track_running_stats=False)).eval(), "replace_batch_norm"),
        (nn.SyncBatchNorm(3), r"'norm' \(SyncBatchNorm\)"),
        (nn.InstanceNorm2d(3, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(3, 3, max_norm=1.0), "max_norm=None"),
        (nn.Linear(3, 3, dtype=torch.cdouble), r"parameter 'norm.weight' is complex, and noise is real: .*as_complex"),
        (nn.Embedding(3, 3, sparse=True), "sparse=False"),
        (frozen(nn.Linear(3, 3, device="meta")), "on one device, got cpu, meta"),  # others' dropout would not be secret
    ],
)
def test_layers_that_mix_samples_are_refused(layer, message) -> None:
    module = nn.ModuleDict({"linear": nn.Linear(3, 3), "norm": layer})
    with pytest.raises(ValueError, match=message):
        check_module(module)
    with pytest.raises(ValueError, match=message):
        GradientEngine(module, AutomaticClipping())


@contextmanager
def rounded(how: str) -> Iterator[None]:
    """float32 products with factors in TF32 or bfloat16, where a device can."""
    matmul = torch.backends.cuda.matmul
    if how == "of the backend" and not hasattr(matmul, "fp32_precision"):
        pytest.skip("as of PyTorch 2.9")
    if how == "of the backend":
        matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision(how)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("how", ["high", "medium", "of the backend"])
def test_rounded_products_are_refused_before_the_batch_is_seen(how) -> None:
    """A clipped gradient could be larger than its norm says."""
    model = make_model()
    with rounded(how), pytest.raises(ValueError, match="set_float32_matmul_precision"):
        GradientEngine(model, AutomaticClipping())
    optimizer = by_hand(model)
    with rounded(how), pytest.raises(ValueError, match="set_float32_matmul_precision"):
        optimizer.step(lambda batch: pytest.fail("the batch was seen"), None)
    steps(optimizer, [8])


def test_convolutions_of_clipped_sums_are_exact_where_others_are_rounded(monkeypatch) -> None:
    """CUDA rounds convolutions to TF32 by default, and norms are no convolutions."""
    settings = torch.backends.cudnn.conv if hasattr(torch.backends.cudnn, "conv") else torch.backends.cudnn
    name, exact = ("fp32_precision", "ieee") if hasattr(settings, "fp32_precision") else ("allow_tf32", False)
    before, seen = getattr(settings, name), []

    def recorded(*args: Any) -> Tensor:
        seen.append(getattr(settings, name))
        return conv2d_weight(*args)

    monkeypatch.setattr("hyfreedp.gradients.convolution.conv2d_weight", recorded)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    GradientEngine(model, AutomaticClipping()).clipped_sums(lambda x: model(x).square().sum(1), torch.randn(5, 3, 8, 8))
    assert seen and set(seen) == {exact} and getattr(settings, name) == before != exact
