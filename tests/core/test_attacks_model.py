"""The adversary against models, losses and precision, written out: each attack succeeded once."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from cases import each
from models import Example
from torch import nn
from torch.utils.data import TensorDataset
from twins import Built, by_hand, cross_entropy, flat, make_batches, make_model, make_private, moved, refused, train

from hyfreedp.errors import Refused
from hyfreedp.gradients import AbadiClipping, AutomaticClipping, GradientEngine
from hyfreedp.gradients.guard import unchanged


def total(engine, loss, *batch):
    """The clipped sum of one batch as one vector."""
    return Example(engine.module, batch, lambda _, *batch: loss(batch)).by_engine(engine)[1].double()


# -- layers that change, buffers that learn ----------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["fixed", "robust"])
def test_a_frozen_batch_norm_that_wakes_up_is_refused_before_it_sees_the_batch(preset):
    """As after an evaluation, and before a look; and batch norm that comes later."""
    model = nn.Sequential(nn.BatchNorm1d(5), make_model()).double()
    model[0].requires_grad_(False).eval()
    optimizer, (batch,) = by_hand(model, preset=preset), make_batches([8])
    optimizer.step(cross_entropy(model), batch)
    model.train()
    with refused(optimizer, r"layer '0' \(BatchNorm1d\) .*after model.train\(\), call its .eval\(\) again"):
        optimizer.step(lambda batch: pytest.fail("the batch was seen"), batch)
    model[0].eval()
    optimizer.step(cross_entropy(model), batch)
    model[1][2] = nn.BatchNorm1d(7, affine=False, track_running_stats=False)
    with refused(optimizer, "layer '1.2'"):
        optimizer.step(lambda batch: pytest.fail("the batch was seen"), batch)


def learns(act):
    """As exponential averages, codebooks and layers that initialise themselves by the first batch do."""
    calls = []

    def forward(layer, x):
        calls.append(1)
        act(layer, x.detach().mean(0), len(calls))
        return x + layer.bias + layer.frozen

    ema, bias, frozen = torch.zeros(3, 5, dtype=torch.float64).unbind()
    parts = {"ema": nn.Buffer(ema), "array": ema.numpy(), "bias": nn.Parameter(bias)}
    return Built(forward, **parts, frozen=nn.Parameter(frozen, requires_grad=False))


LEARNING = {
    "in training": ("ema", lambda layer, mean, call: layer.training and layer.ema.add_(mean)),
    "in probes only": ("ema", lambda layer, mean, call: torch.is_grad_enabled() or layer.ema.add_(mean)),
    "later": ("ema", lambda layer, mean, call: call > 12 and layer.ema.add_(mean)),
    "where no counter moves": ("ema", lambda layer, mean, call: layer.ema.data.add_(1.0)),
    "by an array that shares its memory": ("ema", lambda layer, mean, call: call > 12 and layer.array.fill(1)),
    "by another tensor": ("ema", lambda layer, mean, call: setattr(layer, "ema", torch.ones(5))),
    "by a new buffer": ("seen", lambda layer, mean, call: layer.register_buffer("seen", torch.ones(5))),
    "in a frozen parameter": ("frozen", lambda layer, mean, call: layer.frozen.data.copy_(mean)),
    "in a frozen parameter through DLPack": (
        "frozen",
        lambda layer, mean, call: call > 12 and torch.from_dlpack(layer.frozen.detach()).numpy().fill(float(mean[0])),
    ),
    "in a parameter": ("bias", lambda layer, mean, call: layer.bias.data.copy_(mean)),
    "a parameter in probes": ("bias", lambda layer, mean, call: torch.is_grad_enabled() or layer.bias.data.copy_(mean)),
}


@pytest.mark.filterwarnings("ignore:samples are computed one at a time")
@pytest.mark.parametrize("case", LEARNING)
def test_a_buffer_that_learns_is_refused_by_name_and_put_back(case):
    """Or a parameter, written to through ``.data``."""
    (name, act), settings = LEARNING[case], {"preset": "paper", "interval": 2, "target_epsilon": 3.0, "steps": 20}
    model, optimizer, loader = make_private(nn.Sequential(learns(act), make_model()), **settings)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"parameters of the model: '0.{name}'|which other samples"):
        train(optimizer, loader)
    after = optimizer.state_dict()["model"]
    assert list(after) == list(before)
    kept = ["0.ema", "0.frozen", *(["0.bias"] if case == "in a parameter" else [])]  # a step may have moved the bias
    assert all(torch.equal(after[name], before[name]) for name in kept)
    assert all(parameter.grad is None for parameter in model.parameters())  # nor is the raw sum left behind


def test_a_sparse_buffer_stays_as_it_is():
    """As the neighbours in a graph."""
    model, (batch,) = make_model(), make_batches([8])
    model.neighbours = nn.Buffer(torch.eye(3).to_sparse())
    by_hand(model).step(cross_entropy(model), batch)
    assert torch.equal(model.neighbours.to_dense(), torch.eye(3))


def test_buffers_and_caches_of_any_kind_are_put_back():
    model, kinds = nn.Module(), {"buffer": nn.Parameter, "cache": nn.Parameter, "sparse": torch.Tensor.to_sparse}
    for name, kind in kinds.items():
        model.register_buffer(name, kind(torch.ones(2)).requires_grad_(False), name == "buffer")
    with pytest.raises(Refused, match="model: 'buffer', which"), unchanged(model):
        model.buffer.data.add_(1), model.cache.data.add_(1), model.sparse.add_(torch.ones(2).to_sparse())
    assert all(torch.equal(kept.to_dense(), torch.ones(2)) for kept in model.buffers())


@pytest.mark.filterwarnings("ignore:samples are computed one at a time")
@pytest.mark.parametrize("trained", [True, False])
def test_a_record_does_not_decide_which_parameters_are_trained(trained):
    """As where layers thaw, or freeze, at a small loss: one in a look moved the sum of the step by 2.5, or 11 clips."""
    sums = []
    for decides in (False, True):
        model, (batch,) = make_model(), make_batches([16])
        model[0].requires_grad_(not trained)
        batch[0][-1] *= 300

        def loss(b, model=model, decides=decides):
            value = cross_entropy(model)(b)
            if decides and bool(b[0].abs().max() > 50):
                model[0].requires_grad_(trained)
            return value

        engine = GradientEngine(model, AutomaticClipping())
        with torch.no_grad():
            engine.losses(loss, batch)
        sums.append(torch.cat([one.flatten() for one in engine.clipped_sums(loss, batch)[0].values()]))
    torch.testing.assert_close(*sums)


WRITES = {
    "in place": lambda p: p.add_(1),
    "by index": lambda p: p.__setitem__(0, 1.0),
    "as one of a list": lambda p: torch._foreach_add_([p], 1.0),
    "as output": lambda p: torch.add(torch.ones(2), 0, out=p),
    "by an overload": lambda p: torch.ops.aten.add_.Tensor(p, torch.ones(2)),
    "by a function's function": lambda p: nn.init.ones_(p),
    "through its data": lambda p: p.data.fill_(1.0),
}


@pytest.mark.filterwarnings("ignore:samples are computed one at a time")
@pytest.mark.parametrize("way", WRITES)
def test_a_decision_writes_into_no_parameter(way):
    """What one record decides in a map: the number says that it was there."""
    model = nn.Linear(3, 2)
    model.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    x = torch.full((4, 3), 0.1)
    x[2] = 100.0

    def loss(record):
        with torch.no_grad():
            if record.max() > 50:
                WRITES[way](model.frozen)
        return model(record).square().sum()

    with pytest.raises(Refused, match="parameter"):
        GradientEngine(model, AutomaticClipping()).clipped_sums(loss, x)
    assert not model.frozen.any()


def test_a_layer_that_publishes_more_than_parameters_and_buffers_is_refused():
    keeps = type("Keeps", (nn.Identity,), {"get_extra_state": lambda layer: torch.zeros(8)})
    with pytest.raises(ValueError, match=r"layer '0' \(Keeps\) publishes objects by get_extra_state"):
        make_private(nn.Sequential(keeps(), make_model()))


class Ema(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.ema = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return x


SHARED_WRITES = {  # into what all samples share; only the first one was not noticed by computing a loss again
    "flags": lambda shared, x: shared.__ior__((x.abs() > 10).any(0)),
    "through data": lambda shared, x: shared.data.copy_(x[0] > 10),
    "through what is detached": lambda shared, x: shared.detach()[:].copy_(x[0] > 10),
    "as data": lambda shared, x: setattr(shared, "data", x[0] > 10),
    "by a script, into its buffer": lambda: nn.Buffer(torch.zeros(3)),
    "by a script, into its parameter": lambda: nn.Parameter(torch.zeros(3), requires_grad=False),
}


@pytest.mark.filterwarnings("ignore:samples are computed one at a time", "ignore:.torch.jit")
@pytest.mark.parametrize("way", SHARED_WRITES)
def test_what_all_samples_share_learns_of_none(way):
    """Flags moved the clipped sum by 7.4 clips; a script's buffer that is assigned to was published."""
    script = torch.jit.script(Ema(SHARED_WRITES[way]())) if "script" in way else nn.Identity()
    model, shared, x = nn.Sequential(script, nn.Linear(3, 2)), torch.zeros(3).bool(), torch.randn(8, 3)
    x[0] = 50.0

    def loss(record):
        _ = record.data  # so that it is computed alone
        if "script" not in way:
            SHARED_WRITES[way](shared, record.detach())
        return model(torch.where(shared, -record, record)).square().sum()

    with pytest.raises(Refused, match=r"'0\.ema'" if "script" in way else "of another pass"):
        GradientEngine(model, AutomaticClipping()).clipped_sums(loss, x)
    assert "script" not in way or not model.state_dict()["0.ema"].any()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_longest_record_are_each_records_own(kind):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rope.pop("original_max_position_embeddings" if kind == "dynamic" else "", None)
    config = LlamaConfig(vocab_size=20, max_position_embeddings=8, rope_parameters=rope, **sizes)
    ids, lengths = torch.randint(1, 20, (6, 12)), torch.full((6,), 5).index_fill(0, torch.tensor([5]), 12)

    def loss(model):
        return lambda b: model(b[0][:, : int(b[1])], labels=b[0][:, : int(b[1])]).loss

    for row in (5, 0):
        assert 0.1 < moved(LlamaForCausalLM(config).double().train(), loss, [ids, lengths], row) <= 1.0001


@pytest.mark.parametrize("draw", [lambda g: torch.randn(5, generator=g), lambda g: torch.poisson(torch.ones(5), g)])
def test_a_generator_of_the_losss_own_is_refused(draw):
    """It remembers how much was drawn for other records. Without its name it was not seen: 2.4 clips."""
    model, generator = make_model(), type("Own", (torch.Generator,), {})().manual_seed(0)
    optimizer, (batch,) = by_hand(model, target_epsilon=3.0), make_batches([8])
    with refused(optimizer, "draws from a random generator of its own"):
        optimizer.step(lambda b: cross_entropy(model)((b[0] + draw(generator), b[1])), batch)


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_record_that_is_not_finite_moves_nothing_and_a_huge_one_no_more_than_itself(value, half):
    """All others were computed alone for it, whose rounding in half precision is another."""
    model, x = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)), torch.randn(128, 64)
    x[-1] = value

    def loss(model):
        def run(b):
            with torch.autocast("cpu", half, enabled=half is not None):
                return F.cross_entropy(model(b[0]).float(), b[1])

        return run

    limit = 1.0001 if math.isfinite(value) else 1e-4
    assert moved(model, loss, [x, torch.zeros(128).long()]) <= limit


def test_parameters_in_bf16_release_no_value_that_only_one_record_makes_possible():
    width = 512

    def releases(x, seed, steps):
        """Weights after each of so many steps from zero, on a full batch, as of a run of 120."""
        model = nn.Linear(width, 1, bias=False).to(torch.bfloat16)
        base, data = torch.optim.SGD(model.parameters(), lr=1.0), TensorDataset(torch.zeros(100, width))
        settings = {"target_epsilon": 30.0, "target_delta": 1e-5, "preset": "fixed", "batch_size": 100}
        optimizer = by_hand(model, base, data, seed=seed, steps=120, **settings)
        found = []
        for _ in range(steps):
            with torch.no_grad():
                model.weight.zero_()
            optimizer.step(lambda batch: model(batch)[:, 0].float(), x)
            found.append(model.weight.detach().float().flatten())
        return torch.stack(found)

    empty = torch.zeros(1, width, dtype=torch.bfloat16)
    record, known = torch.sign(torch.randn(1, width)).to(torch.bfloat16), releases(empty, 0, 120).unique()
    shares = [(~torch.isin(releases(x, 1, 30), known)).float().mean().item() for x in (empty, record)]
    assert shares[1] < 3 * shares[0] + 1e-3, shares  # noise in bf16 made the second some twenty times the first


@each(clipping=[AutomaticClipping(), AbadiClipping(0.01)], magnitude=[3.0, 1e3, 1e5])
def test_tokens_that_cancel_do_not_hide_a_norm(magnitude, clipping):
    """Half of the tokens undo the other half but for rounding; the factor came out up to 3,500 times too large."""
    inner, norm, head = nn.Linear(768, 64), nn.LayerNorm(64), nn.Linear(64, 10)
    engine = GradientEngine(nn.ModuleList([inner, norm, head]), clipping)

    def loss(batch):
        return F.cross_entropy(head(norm(inner(batch[0]).mean(1))), batch[1], reduction="none")

    total(engine, loss, torch.randn(4, 16, 768), torch.arange(4))
    assert engine.fallback_reason is None
    for k in range(12):
        u = torch.rand(768) + 1
        v = u + torch.randn(768) * 1e-4 * (k % 6 + 0.5) / 3
        x = torch.cat([u.expand(8, 768), -v.expand(8, 768)])[None] * magnitude
        assert total(engine, loss, x, torch.tensor([3])).norm() <= 1.001 * clipping.sensitivity


@pytest.mark.parametrize(
    ("build", "record"),
    [
        (lambda: nn.Linear(2**22, 1, bias=False), torch.tensor([0.5625]).expand(2**22)),
        (lambda: nn.Linear(2**21, 4, bias=False), torch.tensor([0.625]).expand(2, 2**21)),
        (lambda: nn.Embedding(2**17, 1), torch.arange(2**17)),
        (lambda: nn.Linear(2**18, 16, bias=False), torch.tensor([5 * [0.5625] + 3 * [-0.82125]]).mT.expand(8, 2**18)),
    ],
)
def test_many_equal_squares_do_not_hide_a_norm(build, record):
    """One float32 sum of them was too small: a record counted as 1.007 clips, and as more in larger layers."""
    layer = build()
    loss = lambda batch: 0.53125 * layer(*batch).sum()  # noqa: E731
    assert total(GradientEngine(layer, AbadiClipping(1.0)), loss, record[None]).norm() <= 1.0003


def test_tokens_of_a_tied_head_that_cancel_do_not_hide_a_norm():
    """Products of integers cancel exactly, but not times a factor: what rounding left of them counted as 34 clips."""
    table, signs = nn.Embedding(8192, 256), torch.randint(1, 4, (110, 1)).float()
    left, right = torch.randint(1, 201, (8192,)).float(), torch.randint(1, 201, (256,)).float()
    x = torch.cat([right * torch.cat([signs, -signs.flip(0)]), torch.eye(1, 256)])[torch.randperm(221)]
    g = torch.where(x[:, 1:2] == 0, torch.eye(1, 8192), left)  # the gradient of the last token alone has length one
    loss = lambda x: (F.linear(x[0] + 1e-20 * table(torch.zeros(221).long()), table.weight) * g).sum()  # noqa: E731
    assert total(GradientEngine(table, AbadiClipping(0.3)), loss, x[None]).norm() <= 1.0003 * 0.3


@each(clipping=[AutomaticClipping(), AbadiClipping(0.01)], tokens=[1, 4])
def test_squares_that_underflow_do_not_hide_a_norm(tokens, clipping):
    """A huge input and a tiny gradient, whose squares are infinite and zero: their product is neither."""
    layer = nn.Linear(8, 10_000, bias=False)
    engine = GradientEngine(layer, clipping)

    def loss(batch):
        return (batch[1][:, None, None] * layer(batch[0])).flatten(1).sum(1)

    total(engine, loss, torch.randn(4, tokens, 8), torch.ones(4))
    for size, weight in ((1e18, 2e-23), (1e15, 1e-22), (1e19, 1e-23), (1e-18, 1e15)):
        moved = total(engine, loss, torch.full((1, tokens, 8), size), torch.tensor([weight]))
        assert engine.fallback_reason is None and moved.norm() <= 1.001 * clipping.sensitivity


@pytest.mark.filterwarnings("ignore:samples are computed one at a time")
@each(preset=["robust", "paper", "fixed"], pieces=[None, 3])
def test_a_backward_pass_within_the_loss_reaches_no_weight(preset, pieces, unbound_noise):
    """As of adversarial training: it reached what a line search kept, and frozen ones; clearing cleared pieces."""
    ends = []
    for attacked in (False, True):
        model = make_model()
        frozen = model[0].requires_grad_(False)
        settings = {"preset": preset, "max_physical_batch_size": pieces, "target_epsilon": 3.0}
        optimizer = by_hand(model, torch.optim.AdamW(model.parameters(), lr=0.01), **settings)
        plain, clear = cross_entropy(model), optimizer.zero_grad

        def loss(batch, plain=plain, attacked=attacked, frozen=frozen, clear=clear):
            with torch.enable_grad():
                clear()
                frozen.requires_grad_(attacked)
                _ = attacked and (1e6 * plain(batch).sum()).backward()
                frozen.requires_grad_(False)
            return plain(batch)

        for batch in make_batches([8, 5, 8]):
            optimizer.step(loss, batch)
        ends.append(flat(model))
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-8)


def assigned(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


CHANGES = {  # whether the parameter was trained, and what happens to it
    "unfrozen": (False, lambda model: model[0].requires_grad_(True)),
    "frozen": (True, lambda model: model[0].requires_grad_(False)),
    "replaced by another tensor": (True, assigned),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_change_after_the_run_was_made_private_are_refused(change):
    """Before the batch is seen. Of one that was unfrozen the base optimizer would apply what nothing has noised."""
    trained, act = CHANGES[change]
    model, (first, second) = make_model(), make_batches((8, 7))
    model[0].requires_grad_(trained)
    optimizer = by_hand(model, torch.optim.AdamW(model.parameters()), target_epsilon=3.0)
    optimizer.step(cross_entropy(model), first)
    act(model)
    with refused(optimizer, rf"must stay those that were made private, but '0\.weight' was {change}.* since: undo it"):
        optimizer.step(lambda batch: pytest.fail("the batch was seen"), second)
    model[0].requires_grad_(trained)
    if act is not assigned:
        optimizer.step(cross_entropy(model), second)
