"""What leaves a run is a plain model: it is saved and loaded as if it had been trained without us."""

import io

import pytest
import torch
from torch import nn
from twins import flat, make_data, make_model, make_private, train


@pytest.fixture(scope="module")
def trained():
    """A trained model, the same model untrained, and inputs."""
    model, optimizer, loader = make_private(make_model(dropout=0.1), target_epsilon=3.0)
    plain = make_model(dropout=0.1)
    train(optimizer, loader)
    return model, plain, make_data().tensors[0]


def test_the_model_is_what_it_was_but_for_its_weights(trained):
    model, plain, _ = trained
    layers, before = ([*one.modules()] for one in (model, plain))
    assert [type(layer) for layer in layers] == [type(layer) for layer in before]
    assert [sorted(vars(layer)) for layer in layers] == [sorted(vars(layer)) for layer in before]
    hooks = [value for layer in layers for name, value in vars(layer).items() if "hooks" in name]
    assert not any(hooks) and all(parameter.grad is None for parameter in model.parameters())
    assert all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in model.parameters())


@pytest.mark.parametrize("whole", [False, True])
def test_it_is_saved_and_loaded(trained, whole):
    model, plain, x = trained
    file = io.BytesIO()
    torch.save(model if whole else model.state_dict(), file)
    file.seek(0)
    if whole:
        again = torch.load(file, weights_only=False)
    else:
        again = make_model(dropout=0.1, seed=1)
        again.load_state_dict(torch.load(file))
    assert torch.equal(again.eval()(x), model.eval()(x)) and not torch.equal(flat(again), flat(plain))
    model.train()
