"""GroupNorm in place of batch normalisation: what stays, what is computed, what is trained."""

import copy

import pytest
import torch
import torch.nn.functional as F
from models import Example, assert_exact
from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from hyfreedp import replace_batch_norm
from hyfreedp.gradients import check_module


def convnet(norm) -> nn.Module:
    """With two layers of the given norm, whose affine weights are no longer those of a new one."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), norm(8), nn.Conv2d(8, 8, 3), norm(8), nn.Flatten(), nn.Linear(8, 3))
    for tensor in (*model[1].state_dict().values(), *model[3].state_dict().values()):
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2.0)
    return model.double()


def assert_trains(model) -> None:
    """Per-sample norms and the clipped sum are those of a loop over single samples."""
    batch = torch.randn(5, 1, 5, 5, dtype=torch.float64), torch.randint(3, (5,))
    example = Example(model, batch, lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"))
    assert_exact(example, rtol=1e-5)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_parameters_names_and_training_stay(norm):
    model = convnet(norm)
    with pytest.raises(ValueError, match=r"hyfreedp\.replace_batch_norm\(model\)"):
        check_module(model)
    before, parameters = copy.deepcopy(dict(model.named_parameters())), list(map(id, model.parameters()))
    assert replace_batch_norm(model) is model
    assert list(map(id, model.parameters())) == parameters  # an optimizer made before has the right ones
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert not any(isinstance(layer, norm) for layer in model.modules()) and not list(model.buffers())
    x = torch.randn(3, 8, 2, 2, dtype=torch.float64)
    by_hand = x.view(3, 2, 16)  # two groups of four channels
    by_hand = (by_hand - by_hand.mean(-1, keepdim=True)) / (by_hand.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = by_hand.view(3, 8, 2, 2) * before["1.weight"].view(-1, 1, 1) + before["1.bias"].view(-1, 1, 1)
    torch.testing.assert_close(model[1](x), expected)
    assert_trains(model)


def test_the_layers_of_timm_go_on_to_drop_and_activate():
    torch.manual_seed(0)
    model = convnet(lambda channels: BatchNormAct2d(channels, act_layer=nn.SiLU, drop_layer=nn.Identity))
    weights, activation = [model[1].weight, model[3].weight], model[1].act
    replace_batch_norm(model)
    assert [model[1].norm.weight, model[3].norm.weight] == weights and model[1].act is activation
    x = torch.randn(3, 8, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(model[1](x), F.silu(F.group_norm(x, 2, weights[0], model[1].norm.bias)))
    assert_trains(model)
    relu = replace_batch_norm(convnet(BatchNormAct2d))  # in place, on the output that the engine looks at
    assert relu[1].act.inplace
    assert_trains(relu)


@pytest.mark.parametrize("norm", [FrozenBatchNorm2d, FrozenBatchNormAct2d, nn.BatchNorm2d])
def test_constant_statistics_are_allowed_and_stay_and_others_beside_them_go(norm):
    model = convnet(norm)
    kept = model[1].requires_grad_(False).train(norm is not nn.BatchNorm2d)
    assert replace_batch_norm(model)[1] is kept and isinstance(model[3], nn.GroupNorm) == (norm is nn.BatchNorm2d)
    assert_trains(model)


@pytest.mark.parametrize(
    ("layer", "groups"),
    [(nn.BatchNorm2d(c), g) for c, g in {3: 1, 6: 1, 12: 2, 32: 8, 64: 16, 96: 16, 256: 32}.items()]
    + [(nn.BatchNorm1d(64), 1), (nn.BatchNorm3d(64), 16)],
)
def test_groups_divide_the_channels_and_have_at_least_four(layer, groups):
    norm = replace_batch_norm(layer)
    assert (norm.num_groups, norm.num_channels, norm.weight) == (groups, layer.num_features, layer.weight)


def test_what_cannot_be_replaced_is_named_and_nothing_is_replaced():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="number of channels yet: run one batch"):
        replace_batch_norm(model)
    assert isinstance(model[0], nn.BatchNorm2d)
