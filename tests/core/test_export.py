"""What leaves a run is a plain model: it is saved, loaded and exported as if it had been trained without us."""

import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from twins import Made, adamw, flat, make_data, make_model, make_private, train


@pytest.fixture(scope="module")
def trained():
    """A trained model in eval mode, the same model untrained, and inputs."""
    model, optimizer, loader = make_private(make_model(dropout=0.1), target_epsilon=3.0)
    plain = make_model(dropout=0.1)
    train(optimizer, loader)
    return model.eval(), plain, make_data().tensors[0]


def test_the_model_is_what_it_was_but_for_its_weights(trained):
    model, plain, _ = trained
    layers, before = ([*one.modules()] for one in (model, plain))
    assert [type(layer) for layer in layers] == [type(layer) for layer in before]
    assert [sorted(vars(layer)) for layer in layers] == [sorted(vars(layer)) for layer in before]
    hooks = [value for layer in layers for name, value in vars(layer).items() if "hooks" in name]
    assert not any(hooks) and all(parameter.grad is None for parameter in model.parameters())
    assert all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in model.parameters())


@pytest.mark.parametrize("whole", [False, True])
def test_torch_saves_and_loads_it(trained, whole):
    model, plain, x = trained
    file = io.BytesIO()
    torch.save(model if whole else model.state_dict(), file)
    file.seek(0)
    if whole:
        again = torch.load(file, weights_only=False)
    else:
        again = make_model(dropout=0.1, seed=1)
        again.load_state_dict(torch.load(file))
    assert torch.equal(again.eval()(x), model(x)) and not torch.equal(flat(again), flat(plain))


def test_torch_exports_it(trained):
    model, _, x = trained
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module()
    assert torch.equal(exported(x[:3]), model(x[:3])) and torch.equal(exported(x), model(x))


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # those of the exporter about itself
def test_onnx_computes_what_it_does(trained, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, _, x = trained
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    torch.onnx.export(model, (x,), str(tmp_path / "model.onnx"), dynamo=True, dynamic_shapes=shapes)
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: x[:3].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x[:3]).detach(), rtol=1e-6, atol=1e-9)


def test_transformers_saves_and_loads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=0)).train()
    texts = Made(8, lambda row: {"input_ids": (torch.arange(6) + row) % 20, "labels": (torch.arange(6) + row) % 20})
    settings = {"loader": DataLoader(texts, batch_size=4), "steps": 2, "target_epsilon": 3.0}
    _, optimizer, loader = make_private(model, adamw(model), **settings)
    train(optimizer, loader, lambda record: model(**record).loss)
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} <= {"config.json", "generation_config.json", "model.safetensors"}
    ids = torch.arange(6)[None]
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
