"""Gradient engines on small plain models: exactness against a loop over samples, and behaviour on awkward batches."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle

import pytest
import torch
from cases import each, together
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Example, biases_only, conv1d_net, groupnorm_convnet, mlp, tied_language_model
from torch import Tensor, nn

from hyfreedp.clipping import (
    AbadiClipping,
    AutomaticClipping,
    BookKeepingEngine,
    Clipping,
    GradientEngine,
    NoClipping,
)
from hyfreedp.clipping.hooks import HooksEngine

ENGINES = [BookKeepingEngine, HooksEngine]
EXAMPLES = [mlp, groupnorm_convnet, conv1d_net, tied_language_model]

pytestmark = pytest.mark.parametrize("engine", ENGINES)


def assert_exact(engine: type[GradientEngine], example: Example, clipping: Clipping) -> None:
    norms, clipped = example.clipped(clipping)
    attached = engine(example.model, clipping)
    torch.testing.assert_close(attached.backward(example.losses()), norms, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(example.collected(), clipped, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("build", EXAMPLES)
@together("clipping", [AutomaticClipping(), AbadiClipping(0.5), NoClipping()])
def test_equals_a_loop_over_samples(engine, build, clipping) -> None:
    assert_exact(engine, build(), clipping)


@together("build", EXAMPLES)
def test_biases_only(engine, build) -> None:
    example = build()
    biases_only(example.model)
    assert_exact(engine, example, AutomaticClipping())


def test_biases_and_head(engine) -> None:
    example = groupnorm_convnet()
    biases_only(example.model, head="10.")
    assert_exact(engine, example, AutomaticClipping())


def test_frozen_layers(engine) -> None:
    example = groupnorm_convnet()
    for index in (0, 1, 3, 6):
        example.model[index].requires_grad_(False)
    assert_exact(engine, example, AutomaticClipping())


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 4),
    tokens=st.integers(1, 9),
    width=st.integers(1, 9),
    out=st.integers(1, 9),
    bias=st.booleans(),
)
def test_linear_of_any_shape(engine, batch, tokens, width, out, bias) -> None:
    model = nn.Sequential(nn.Linear(width, out, bias=bias), nn.Tanh(), nn.Linear(out, width)).double()
    x = torch.randn(batch, tokens, width).double()
    assert_exact(engine, Example(model, (x,), lambda model, x: model(x).square().sum((1, 2))), AutomaticClipping())


@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 2), kernel=st.integers(1, 3), stride=st.integers(1, 3), padding=st.integers(0, 2),
    dilation=st.integers(1, 2), size=st.integers(5, 8), out=st.sampled_from([2, 30]), dims=st.integers(1, 2),
)  # fmt: skip
def test_convolution_of_any_shape(engine, groups, kernel, stride, padding, dilation, size, out, dims) -> None:
    kind = (nn.Conv1d, nn.Conv2d)[dims - 1]
    model = kind(4, out, kernel, stride, padding, dilation, groups).double()
    x = torch.randn(3, 4, *[size] * dims).double()
    assert_exact(
        engine, Example(model, (x,), lambda model, x: model(x).square().flatten(1).sum(1)), AutomaticClipping()
    )


def test_layer_norm_without_bias(engine) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, bias=False), nn.Linear(4, 1)).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    assert_exact(engine, Example(model, (x,), lambda model, x: model(x).sum((1, 2))), AutomaticClipping())


@settings(max_examples=15, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), normalized=st.integers(1, 2))
def test_norm_layers_of_any_shape(engine, shape, normalized) -> None:
    layers = nn.ModuleList([nn.LayerNorm([5, 4][-normalized:]), nn.RMSNorm([5, 4][-normalized:], eps=1e-3)]).double()
    model = nn.Sequential(*layers)
    x = torch.randn(3, *shape[1:], 5, 4).double()
    example = Example(model, (x,), lambda model, x: model(x).sin().flatten(1).sum(1))
    assert_exact(engine, example, AutomaticClipping())


def test_physical_batches_add_up(engine) -> None:
    example = tied_language_model()
    _, clipped = example.clipped(AutomaticClipping())
    attached = engine(example.model, AutomaticClipping())
    norms = [attached.backward(example.losses(rows)) for rows in (slice(0, 1), slice(1, 4), slice(4, 4), slice(4, 5))]
    assert [len(n) for n in norms] == [1, 3, 0, 1]
    torch.testing.assert_close(example.collected(), clipped, rtol=1e-9, atol=1e-12)


@together("dtype", [torch.float64, torch.bfloat16])
def test_the_norms_kept_are_those_of_the_present_sums(engine, dtype) -> None:
    example = mlp()
    example.model.to(dtype)
    attached = engine(example.model, AutomaticClipping())

    def losses(rows: slice) -> Tensor:
        return example.model(example.batch[0][rows].to(dtype)).sum(1)

    for pieces in ([slice(0, 2), slice(2, 5)], [slice(0, 1)], [slice(0, 0)]):
        example.model.zero_grad()
        if dtype == torch.bfloat16:
            attached.clear()
        given = [attached.backward(losses(rows)) for rows in pieces]
        kept = torch.cat([*attached.norms, torch.zeros(0)])
        assert torch.equal(kept, torch.cat(given))


def test_empty_batch_gives_zeros(engine) -> None:
    example = mlp()
    attached = engine(example.model, AutomaticClipping())
    norms = attached.backward(example.losses(slice(0, 0)))
    assert norms.shape == (0,) and norms.dtype == torch.float64
    assert not example.collected().any()
    attached.backward(example.losses())
    before = example.collected()
    attached.backward(torch.empty(0))
    assert torch.equal(example.collected(), before)


def test_parameters_without_a_layer(engine) -> None:
    """Broadcast over the samples: a token, positions, a scale per channel and one for all."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.all = nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.each * self.all

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 4, 4))
            self.scale = Scale()

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            return self.scale(x).sin().sum((1, 2))

    x = torch.randn(3, 3, 4).double()
    assert_exact(engine, Example(Tokens().double(), (x,), lambda model, x: model(x)), AutomaticClipping())


def test_unused_parameters_get_zeros(engine) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "spare": nn.Linear(3, 1)}).double()
    example = Example(model, (torch.randn(4, 3).double(),), lambda model, x: model["used"](x)[:, 0])
    engine(model, AutomaticClipping()).backward(example.losses())
    assert model["used"].weight.grad.any()
    assert torch.equal(model["spare"].weight.grad, torch.zeros_like(model["spare"].weight))


@together(*each(poison=[math.nan, math.inf], build=EXAMPLES).args)
def test_a_sample_that_is_not_finite_contributes_zero(engine, build, poison) -> None:
    example = build()
    gradients = example.gradients()
    norms = gradients.norm(dim=1)
    kept = torch.arange(len(norms)) != 2
    clipped = (AutomaticClipping().factors(norms)[:, None] * gradients)[kept].sum(0)
    attached = engine(example.model, AutomaticClipping())
    for _ in range(2):
        example.model.zero_grad()
        measured = attached.backward(example.losses() * torch.ones_like(norms).masked_fill(~kept, poison))
        assert math.isinf(measured[2])
        torch.testing.assert_close(measured[kept], norms[kept], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(example.collected(), clipped, rtol=1e-9, atol=1e-12)


@together("build", EXAMPLES)
def test_a_batch_without_finite_samples_gives_zeros(engine, build) -> None:
    example = build()
    assert engine(example.model, AutomaticClipping()).backward(example.losses() * math.nan).isinf().all()
    assert not example.collected().any()


def test_a_nan_input_contributes_zero(engine) -> None:
    example = mlp()
    norms, _ = example.clipped(AutomaticClipping())
    example.batch[0][2] = math.nan
    measured = engine(example.model, AutomaticClipping()).backward(example.losses())
    assert measured.isinf().tolist() == [False, False, True, False, False]
    torch.testing.assert_close(measured[:2], norms[:2], rtol=1e-9, atol=1e-12)
    assert example.collected().isfinite().all()


def test_forward_passes_without_backward_leave_nothing(engine) -> None:
    example = tied_language_model()
    _, clipped = example.clipped(AutomaticClipping())
    attached = engine(example.model, AutomaticClipping())
    example.losses()
    losses = example.losses()
    later = example.losses(slice(0, 2))
    attached.backward(losses)
    torch.testing.assert_close(example.collected(), clipped, rtol=1e-9, atol=1e-12)
    attached.backward(later)  # an older graph that was kept is still good


def test_inputs_die_with_their_graph(engine) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    engine(model, AutomaticClipping())
    output = model(torch.randn(41, 3))
    assert _alive_tensors_of_shape((41, 3))
    del output
    assert not _alive_tensors_of_shape((41, 3))


def test_nothing_is_stored_without_gradients(engine) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    engine(model, AutomaticClipping())
    with torch.no_grad():
        output = model(torch.randn(43, 3))
    assert not output.requires_grad and not _alive_tensors_of_shape((43, 3))


def test_a_layer_in_eval_mode_is_refused(engine) -> None:
    example = mlp()
    attached = engine(example.model, AutomaticClipping())
    attached.backward(example.losses())
    before = example.collected()
    example.model[3].eval()
    with pytest.raises(ValueError, match=r"'3\.weight' is used .* in eval mode"):
        attached.backward(example.losses())
    assert torch.equal(example.collected(), before)


def test_dropout_is_the_one_of_the_forward_pass(engine) -> None:
    example = mlp()
    example.model.insert(3, nn.Dropout(0.5))
    attached = engine(example.model, AutomaticClipping())
    losses = example.losses()
    rows = [torch.autograd.grad(loss, example.trainable, retain_graph=True) for loss in losses]
    gradients = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    norms = attached.backward(losses)
    torch.testing.assert_close(norms, gradients.norm(dim=1), rtol=1e-9, atol=1e-12)
    clipped = AutomaticClipping().factors(norms) @ gradients
    torch.testing.assert_close(example.collected(), clipped, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's own RMSNorm
@together("build", EXAMPLES)
def test_half_precision_autocast_is_close(engine, build) -> None:
    example = build()
    example.model.float()
    example.batch = tuple(t.float() if t.is_floating_point() else t for t in example.batch)
    norms, clipped = example.clipped(AutomaticClipping())
    attached = engine(example.model, AutomaticClipping())
    with torch.autocast("cpu", torch.bfloat16):
        measured = attached.backward(example.losses())
    assert measured.dtype == torch.float32
    torch.testing.assert_close(measured, norms, rtol=0.05, atol=0)
    assert (example.collected() - clipped).norm() < 0.05 * clipped.norm()


def test_rows_of_a_token_that_occurs_twice_add_up(engine) -> None:
    """Gradients of a table alone, by hand: three times (1, 1, 1) for one entry; (1, 1, 1) for each of three."""
    model = nn.Embedding(5, 3)
    attached = engine(model, NoClipping())
    norms = attached.backward(model(torch.tensor([[1, 1, 1], [0, 1, 2]])).sum((1, 2)))
    torch.testing.assert_close(norms, torch.tensor([27.0, 9.0]).sqrt())


def test_norms_of_half_precision_gradients_are_those_of_single_precision(engine) -> None:
    """3,000 weights and a bias with gradient one each: in half precision the norm would be 0.3 % off."""
    model = nn.Linear(3000, 1).bfloat16()
    attached = engine(model, AutomaticClipping())
    norms = attached.backward(model(torch.ones(4, 3000, dtype=torch.bfloat16))[:, 0])
    torch.testing.assert_close(norms, torch.full((4,), math.sqrt(3001)), rtol=1e-6, atol=0)


def prelu_net() -> Example:
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 1)).double()
    return Example(model, (torch.randn(5, 3).double(),), lambda model, x: model(x)[:, 0])


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@each(
    build=[mlp, tied_language_model, prelu_net],
    again=[copy.deepcopy, saved_and_loaded, lambda model: pickle.loads(pickle.dumps(model))],
)
def test_a_model_can_be_copied_and_saved(engine, build, again, monkeypatch) -> None:
    """In the middle of a run. What comes out is the same model without an engine."""
    example = build()
    if engine.unsupported(example.model):
        pytest.skip("not a model of this engine")
    expected = example.gradients()
    attached = engine(example.model, AutomaticClipping())
    attached.backward(example.losses())
    other = Example(again(example.model), example.batch, example.loss)
    assert list(other.model.state_dict()) == list(example.model.state_dict())
    for name in ("_record_layer", "_repeat_free", "_keep_input", "_receive"):
        monkeypatch.setattr(engine, name, lambda *_: pytest.fail("the copy has an engine"), raising=False)
    assert torch.equal(other.gradients(), expected)
    monkeypatch.undo()
    assert_exact(engine, other, AutomaticClipping())  # it may have one of its own


def test_the_module_stays_what_it_was(engine) -> None:
    example = tied_language_model()
    keys, classes = list(example.model.state_dict()), [type(m) for m in example.model.modules()]
    attributes = [set(vars(m)) for m in example.model.modules()]
    attached = engine(example.model, AutomaticClipping())
    attached.backward(example.losses())
    assert list(example.model.state_dict()) == keys
    assert [type(m) for m in example.model.modules()] == classes
    attached.detach()
    assert [set(vars(m)) for m in example.model.modules()] == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in example.model.modules())


def test_global_generator_is_left_alone(engine) -> None:
    example = mlp()
    state = torch.get_rng_state()
    engine(example.model, AutomaticClipping()).backward(example.losses())
    assert torch.equal(torch.get_rng_state(), state)


@together("build", EXAMPLES)
def test_training_follows_the_slow_twin(engine, build) -> None:
    fast, slow = build(), build()
    slow.model.load_state_dict(fast.model.state_dict())
    slow.batch = fast.batch
    attached = engine(fast.model, AutomaticClipping())
    for _ in range(3):
        fast.model.zero_grad()
        attached.backward(fast.losses())
        _, clipped = slow.clipped(AutomaticClipping())
        with torch.no_grad():
            for p in fast.trainable:
                p -= 0.05 * p.grad
            for p, step in zip(slow.trainable, clipped.split([p.numel() for p in slow.trainable]), strict=True):
                p -= 0.05 * step.view_as(p)
    for p, q in zip(fast.trainable, slow.trainable, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


def _alive_tensors_of_shape(shape: tuple[int, ...]) -> bool:
    gc.collect()
    return any(type(o) is Tensor and o.shape == shape for o in gc.get_objects())
