"""Models that go through torch.compile: the same gradients as without, or one sentence that says what to set."""

import pytest
import torch
from models import Example, groupnorm_convnet, mlp, tied_language_model
from torch import Tensor

from hyfreedp.clipping import AutomaticClipping, make_engine

# torch's own tracer, which asks each tensor for its gradient
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def passes(build, backend: str | None) -> list[Tensor]:
    """Norms and clipped sums of three batches; the first is checked, the others follow what it has learned."""
    torch.manual_seed(3)
    example: Example = build()
    engine = make_engine(example.model, AutomaticClipping())
    model = example.model if backend is None else torch.compile(example.model, backend=backend)
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        norms = engine.backward(example.loss(model, *example.batch))
        found += [norms, example.collected()]
        example.model.zero_grad()
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("build", [mlp, tied_language_model])
def test_a_compiled_model_gives_the_same_gradients(build):
    """With layer rules alone, and with weights that are followed through operations."""
    for compiled, plain in zip(passes(build, "eager"), passes(build, None), strict=True):
        assert torch.equal(compiled, plain)


def test_a_compiled_backward_pass_that_runs_but_once_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(torch._functorch.config, "donated_buffer", True)
    with pytest.raises(ValueError, match="donated_buffer = False before the model's first call"):
        passes(groupnorm_convnet, "aot_eager")
    torch.compiler.reset()
    monkeypatch.setattr(torch._functorch.config, "donated_buffer", False)
    for compiled, plain in zip(passes(groupnorm_convnet, "aot_eager"), passes(groupnorm_convnet, None), strict=True):
        torch.testing.assert_close(compiled, plain)
