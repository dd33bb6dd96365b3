"""Without noise, training equals a twin that loops over samples; probing changes nothing but the learning rate."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from cases import each, pairs, together
from torch import nn
from twins import (
    BASES,
    TUNINGS,
    Twin,
    adamw,
    cross_entropy,
    flat,
    line_search,
    make_batches,
    make_model,
    make_private,
    searching,
    sgd,
    sgd_momentum,
    trainable,
)

from hyfreedp import HyFreeDPOptimizer, NoiseGenerator, QuadraticFit, calibrate_noise, step_rules
from hyfreedp.clipping import AbadiClipping, AutomaticClipping, NoClipping, make_engine
from hyfreedp.experiments.baselines.line_search import LINE_SEARCH
from hyfreedp.rate_learner import LossSearch

SIZES = (9, 6, 8, 0, 11, 7, 5)  # around the expected size, one batch empty
EXPECTED = 8
FACTORS = {
    "automatic": (AutomaticClipping(), lambda norm: 1 / (norm + 0.01)),
    "abadi": (AbadiClipping(0.3), lambda norm: min(1.0, 0.3 / norm)),
    "none": (NoClipping(), lambda norm: 1.0),
}
RULES = {
    "literal": lambda fit, losses, eta: step_rules.literal(fit, eta).eta,
    "gen": lambda fit, losses, eta: step_rules.gen(fit, eta).eta,
}


def compare(
    model, base, sizes=SIZES, *, clipping="automatic", kind="contrasts", step_rule="posterior", eta=0.05, **settings
):
    """Train privately without noise, and the twin beside it; compare weights, rates and fits at every step."""
    twin_model = copy.deepcopy(model)
    rule, factor = FACTORS[clipping]
    _, optimizer, _ = make_private(
        model,
        base(model),
        preset=LINE_SEARCH,
        clipping=rule,
        **searching(kind, step_rule),
        initial_learning_rate=eta,
        **({"interval": 2, "warmup": 0.2} | settings),
    )
    probe, plan = copy.deepcopy(optimizer.rate_learner), optimizer.split

    def posterior(fit, losses, eta):
        """The same rule fed with the twin's losses; its formula has tests of its own."""
        held = not plan.is_probe_step(step + 1)
        return probe.update(torch.tensor(losses, dtype=torch.float64), 0.0, EXPECTED, None, held=held).eta_next

    twin = Twin(
        twin_model,
        base(twin_model),
        factor=factor,
        expected_batch_size=EXPECTED,
        decide=RULES.get(step_rule, posterior),
        eta=eta,
        reach=probe.distance / eta,
    )
    start = flat(model)
    for step, batch in enumerate(make_batches(sizes)):
        decay = min(1.0, 2 * (1 - step / 10))  # flat for half of the ten steps, then linear to zero
        record = optimizer.step(cross_entropy(model), batch)
        probing = step < plan.warmup_steps or (step - plan.warmup_steps) % plan.interval == 0
        taken = twin.step(batch, probing=probing, decay=decay)
        assert record.eta == pytest.approx(taken, rel=1e-8)
        assert (record.probe is not None) == probing
        if probing:
            assert record.probe.slope == pytest.approx(twin.fit.slope, rel=1e-8, abs=1e-10)
            assert record.probe.curvature == pytest.approx(twin.fit.curvature, rel=1e-6, abs=1e-8)
        torch.testing.assert_close(flat(model), flat(twin_model), rtol=1e-8, atol=1e-8)
    assert (flat(model) - start).abs().max() > 1e-3  # something was learned
    return optimizer


@together(*each(base=BASES, tuning=TUNINGS).args)
def test_equals_the_twin_for_every_tuning_mode_and_base_optimizer(tuning, base):
    """Clipping, direction, probes, fit, rule, decay and update, each as plain code would do it."""
    compare(make_model(tuning), BASES[base])


@together(*each(engine=["bookkeeping", "hooks"], tuning=TUNINGS).args)
def test_equals_the_twin_with_either_engine_in_physical_batches(tuning, engine):
    """Batches of up to 11 in pieces of 4 are the whole batch."""
    compare(make_model(tuning), adamw, gradient_engine=engine, max_physical_batch_size=4)


@together(*pairs(clipping=FACTORS, step_rule=["literal", "gen", "posterior"], probe=["losses", "contrasts"]).args)
def test_equals_the_twin_for_every_probe_rule_and_clipping(probe, step_rule, clipping):
    """Three losses and two contrasts determine the same parabola; the rules' refusals on an empty batch included."""
    sizes = SIZES if step_rule != "literal" else tuple(size or 8 for size in SIZES)
    compare(make_model(), sgd_momentum, sizes, kind=probe, step_rule=step_rule, clipping=clipping, eta=0.3)


@together("base", BASES)
def test_fixed_rate_equals_the_base_optimizer_on_clipped_gradients(base):
    """Preset "fixed" keeps the groups' own rates."""
    model = make_model()
    twin_model = copy.deepcopy(model)
    _, optimizer, _ = make_private(model, BASES[base](model), preset="fixed", clipping=AutomaticClipping())
    twin_base = BASES[base](twin_model)
    rates = [group["lr"] for group in twin_base.param_groups]
    twin = Twin(
        twin_model, twin_base, factor=FACTORS["automatic"][1], expected_batch_size=EXPECTED, decide=None, eta=rates[0]
    )
    for batch in make_batches(SIZES):
        record = optimizer.step(cross_entropy(model), batch)
        twin.step(batch, probing=False)
        assert (record.eta, record.probe) == (rates[0], None)
        assert [group["lr"] for group in optimizer.param_groups] == rates
        torch.testing.assert_close(flat(model), flat(twin_model), rtol=1e-8, atol=1e-8)


# -- clipped probes, without noise -------------------------------------------------------------------------------------


def make_probing(model, probe, *, sigma=0.0, sigma_loss=0.0, interval=1, steps=10, base=sgd_momentum, **settings):
    """An optimizer whose noise and probe are set by hand."""
    kind = "none" if probe is None else probe.kind
    split = calibrate_noise(
        target_epsilon=math.inf, target_delta=1e-3, sample_rate=0.2, steps=steps, interval=interval, probe=kind
    )
    split = dataclasses.replace(split, sigma_gradient=sigma, sigma_gradient_probe=sigma, sigma_loss=sigma_loss)
    return HyFreeDPOptimizer(
        base(model),
        module=model,
        gradient_engine=make_engine(model, AutomaticClipping()),
        split=split,
        generator=NoiseGenerator(0),
        expected_batch_size=EXPECTED,
        rate_learner=probe,
        **settings,
    )


@together("threshold_rule", ["sum", "previous"])
def test_clipped_losses_equal_the_twin(threshold_rule):
    """Each loss is clipped at R_l, which follows the released losses within [0.1, 20]."""
    model = make_model()
    twin_model = copy.deepcopy(model)
    optimizer = make_probing(model, LossSearch(rule="gen", eta=0.3, loss_threshold_rule=threshold_rule))
    threshold, heights = 1.0, []

    def average(losses):
        heights.append(sum(min(loss, threshold) for loss in losses) / EXPECTED)
        return heights[-1]

    twin = Twin(
        twin_model,
        sgd_momentum(twin_model),
        factor=FACTORS["automatic"][1],
        expected_batch_size=EXPECTED,
        decide=RULES["gen"],
        eta=0.3,
        average=average,
    )
    thresholds = set()
    for batch in make_batches(SIZES):
        heights.clear()
        record = optimizer.step(cross_entropy(model), batch)
        assert record.probe.loss_threshold == pytest.approx(threshold, rel=1e-9)
        taken = twin.step(batch, probing=True)
        assert record.probe.private_loss == pytest.approx(heights[1], rel=1e-9)
        assert record.eta == pytest.approx(taken, rel=1e-8)
        torch.testing.assert_close(flat(model), flat(twin_model), rtol=1e-8, atol=1e-8)
        threshold = min(max(sum(heights) if threshold_rule == "sum" else heights[1], 0.1), 20.0)
        thresholds.add(threshold)
    assert len(thresholds) > 3


def test_clipped_contrasts_equal_the_twin():
    """(d/R_d, c/R_c) of each sample is scaled to norm 1 at most; samples beyond their bound really occur."""
    model = make_model()
    thresholds = (0.02, 0.002)
    optimizer = make_probing(model, line_search("contrasts", "gen", eta=0.3, contrast_thresholds=thresholds))
    twin_model = make_model()
    clipped = []

    def decide(fit, losses, eta):
        difference = bend = 0.0
        for ahead, here, behind in zip(*losses, strict=True):
            d, c = (behind - ahead) / thresholds[0], (behind + ahead - 2 * here) / thresholds[1]
            norm = math.hypot(d, c)
            clipped.append(norm > 1)
            difference += d / max(norm, 1) * thresholds[0] / EXPECTED
            bend += c / max(norm, 1) * thresholds[1] / EXPECTED
        assert record.probe.slope == pytest.approx(difference / (2 * eta), rel=1e-8, abs=1e-12)
        assert record.probe.curvature == pytest.approx(bend / eta**2, rel=1e-6, abs=1e-10)
        clipped_fit = QuadraticFit(difference / (2 * eta), bend / eta**2, math.nan)
        return RULES["gen"](clipped_fit, losses, eta)

    twin = Twin(
        twin_model,
        sgd_momentum(twin_model),
        factor=FACTORS["automatic"][1],
        expected_batch_size=EXPECTED,
        decide=decide,
        eta=0.3,
    )
    for batch in make_batches(SIZES):
        record = optimizer.step(cross_entropy(model), batch)
        thresholds = (record.probe.difference_threshold, record.probe.bend_threshold)
        assert record.eta == pytest.approx(twin.step(batch, probing=True), rel=1e-8)
        torch.testing.assert_close(flat(model), flat(twin_model), rtol=1e-8, atol=1e-8)
    assert 0 < sum(clipped) < len(clipped)


# -- the base optimizer and its state ----------------------------------------------------------------------------------


def always(eta_next=None):
    """A step rule that rejects every probe, or always moves to ``eta_next``."""

    def rule(fit, eta, **_):
        if eta_next is None:
            return step_rules.StepDecision(eta, False, "rejected by the test")
        return step_rules.StepDecision(eta_next, True, "set by the test")

    return rule


@each(base=BASES, sigma=[0.0, 1.3])
def test_rejected_probes_leave_the_weights_of_a_run_without_probes_bitwise(base, sigma, monkeypatch):
    """Weights after a probe are copied back, not computed back, with noise or without; so is all optimizer state."""
    monkeypatch.setattr(step_rules, "gen", always())
    runs = []
    for kind in ("losses", "contrasts", None):
        model = make_model()
        rate = BASES[base](model).param_groups[0]["lr"]
        probe = kind and line_search(kind, "gen", eta=rate)
        optimizer = make_probing(model, probe, sigma=sigma, sigma_loss=sigma, interval=2, base=BASES[base])
        for batch in make_batches(SIZES):
            optimizer.step(cross_entropy(model), batch)
            assert all(parameter.grad is None for parameter in trainable(model))
        runs.append((flat(model), optimizer.base.state_dict()))
        assert sum("accepted" in row for row in optimizer.history) == (4 if kind else 0)
    for weights, state in runs[:2]:
        assert torch.equal(weights, runs[2][0])
        torch.testing.assert_close(state, runs[2][1], rtol=0, atol=0)


def test_gen_rejects_a_parabola_that_opens_downwards_and_leaves_the_weights_bitwise():
    """The real rule's refusal, by a loss that is concave in the weights (b > 0 > a)."""
    runs = []
    for settings in ({"preset": "paper", "initial_learning_rate": 0.1, "interval": 1}, {"preset": "fixed"}):
        torch.manual_seed(0)
        model = nn.Linear(5, 1).double()
        _, optimizer, _ = make_private(model, sgd(model, 0.1), clipping=AutomaticClipping(), **settings)
        for batch in make_batches((6, 9)):
            record = optimizer.step(lambda batch, model=model: 99 - model(batch[0])[:, 0] ** 2, batch)
            if record.probe:
                assert record.probe.slope > 0 > record.probe.curvature
                assert not record.probe.accepted and "rejected" in record.probe.reason
        runs.append(flat(model))
    assert torch.equal(*runs)


@pytest.mark.parametrize("interval", [1, 3])
def test_the_base_optimizer_advances_once_per_step(interval, monkeypatch):
    """AdamW's counter and averages move with the steps, not with the probes, wherever the rate goes."""
    monkeypatch.setattr(step_rules, "gen", always(0.07))
    model = make_model()
    _, optimizer, _ = make_private(model, adamw(model), preset="paper", interval=interval, clipping=AutomaticClipping())
    twin = copy.deepcopy(model)
    for hooks in (module._forward_hooks for module in twin.modules()):
        hooks.clear()
    gradients = Twin(
        twin, adamw(twin), factor=FACTORS["automatic"][1], expected_batch_size=EXPECTED, decide=None, eta=1.0
    )
    first, second = (torch.zeros_like(flat(model)) for _ in range(2))
    for t, batch in enumerate(make_batches((9, 6, 0, 8)), start=1):
        twin.load_state_dict(model.state_dict())
        gradient = torch.cat([g.flatten() for g in gradients.clipped_mean(batch)])
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        optimizer.step(cross_entropy(model), batch)
        states = [optimizer.base.state[parameter] for parameter in trainable(model)]
        assert {int(state["step"]) for state in states} == {t}
        torch.testing.assert_close(torch.cat([s["exp_avg"].flatten() for s in states]), first, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            torch.cat([s["exp_avg_sq"].flatten() for s in states]), second, rtol=1e-9, atol=1e-12
        )


@each(base=BASES, eta_next=[None, 0.5, 0.02])
def test_the_innermost_rate_is_the_eta_applied(base, eta_next, monkeypatch):
    """A scheduler or a log that reads the optimizer's groups sees what was really taken, decay and ratios included."""
    monkeypatch.setattr(step_rules, "gen", always(eta_next))
    model = make_model()
    optimizer_base = BASES[base](model)
    ratios = [group["lr"] / optimizer_base.param_groups[0]["lr"] for group in optimizer_base.param_groups]
    _, optimizer, _ = make_private(model, optimizer_base, preset="paper", interval=2, decay="cosine")
    for t, batch in enumerate(make_batches(SIZES)):
        record = optimizer.step(cross_entropy(model), batch)
        factor = 0.5 * (1 + math.cos(math.pi * t / 10))
        assert record.eta == pytest.approx((eta_next or 1e-4) * factor)
        assert optimizer.eta == pytest.approx(eta_next or 1e-4)
        assert [group["lr"] for group in optimizer_base.param_groups] == [record.eta * ratio for ratio in ratios]
        assert optimizer.param_groups is optimizer_base.param_groups


@each(base=BASES, eta_next=[1e-3, 0.4, -0.2])
def test_an_accepted_rate_gives_the_step_that_the_base_optimizer_would_take_with_it(base, eta_next, monkeypatch):
    """The last move is made by interpolation; it must be the base optimizer's own step, weight decay included."""
    monkeypatch.setattr(step_rules, "gen", always(eta_next))
    model, plain = make_model(), make_model()
    _, probing, _ = make_private(model, BASES[base](model), preset="paper", initial_learning_rate=0.1)
    rescaled = BASES[base](plain)
    first = rescaled.param_groups[0]["lr"]
    for group in rescaled.param_groups:
        group["lr"] *= 0.1 / first
    _, fixed, _ = make_private(plain, rescaled, preset="fixed")
    (batch,) = make_batches((8,))
    start = flat(model)
    assert probing.step(cross_entropy(model), batch).eta == pytest.approx(eta_next)
    fixed.step(cross_entropy(plain), batch)
    direction = (start - flat(plain)) / 0.1
    torch.testing.assert_close(flat(model), start - eta_next * direction, rtol=1e-10, atol=1e-12)


# -- probes by the next batch ------------------------------------------------------------------------------------------


@together(*each(interval=[1, 3], base=BASES).args)
def test_the_next_batch_looks_along_a_step_and_makes_it_anew(base, interval):
    """The twin waits for the next batch and then steps once; ours has stepped already, and corrects itself."""
    model = make_model(dropout=0.0)
    twin_model = copy.deepcopy(model)
    _, optimizer, _ = make_private(
        model,
        BASES[base](model),
        preset="paper",
        clipping=AutomaticClipping(),
        interval=interval,
        initial_learning_rate=0.3,
        smoothing=0.9,
        decay="linear",
        probe_batch="next",
    )
    twin = Twin(
        twin_model,
        BASES[base](twin_model),
        factor=FACTORS["automatic"][1],
        expected_batch_size=EXPECTED,
        decide=lambda fit, losses, eta: step_rules.gen(fit, eta, smoothing=0.9).eta,
        eta=0.3,
    )
    plan, batches = optimizer.split, make_batches(SIZES)
    for t, batch in enumerate(batches):
        record = optimizer.step(cross_entropy(model), batch)
        assert (record.probe is not None) == (t > 0 and plan.is_probe_step(t))
        if record.probe:
            assert record.probe.slope == pytest.approx(twin.fit.slope, rel=1e-8, abs=1e-10)
            assert record.probe.eta_next == pytest.approx(twin.eta, rel=1e-8)
        by = batches[t + 1] if t + 1 < len(SIZES) and plan.is_probe_step(t + 1) else None
        twin.step(batch, probing=by is not None, decay=1 - t / 10, by=by)
        if by is None:  # else ours is still to be corrected
            torch.testing.assert_close(flat(model), flat(twin_model), rtol=1e-8, atol=1e-8)
    # Every step one gradient, every probe step but the first one probe: the plan's, and not more.
    assert [[len(tags) for tags in both] for _, *both in optimizer.ledger.state_dict()["released"]] == [
        [1, int(t > 0 and plan.is_probe_step(t))] for t in range(len(SIZES))
    ]
    assert (optimizer.ledger.repeated, optimizer._base.last is not None) == (0, plan.is_probe_step(len(SIZES)))


@together("failing_call", [2, 3, 4, 5])
def test_an_exception_inside_a_probe_by_the_next_batch_leaves_the_step_before(failing_call):
    """Call 1 is the training forward, 2 to 4 are the probe, and 5 is the gradient at the corrected weights."""
    model = make_model()
    _, optimizer, _ = make_private(
        model, adamw(model), preset="paper", initial_learning_rate=0.5, interval=1, probe_batch="next"
    )
    optimizer._checks_due = []
    first, second = make_batches((8, 7))
    optimizer.step(cross_entropy(model), first)
    plain, calls = flat(model), []

    def fail(batch):
        calls.append(batch)
        if len(calls) == failing_call:
            raise Interrupt
        return cross_entropy(model)(batch)

    with pytest.raises(Interrupt):
        optimizer.step(fail, second)
    released = failing_call == 5  # so the step before stands corrected
    assert optimizer.ledger.steps == 1 and all(parameter.grad is None for parameter in trainable(model))
    assert (optimizer.eta == 0.5) == torch.equal(flat(model), plain) == (not released)
    corrected = flat(model)
    record = optimizer.step(cross_entropy(model), second)  # goes on, and does not probe again what was probed
    assert (record.probe is None, record.eta, optimizer.ledger.repeated) == (released, optimizer.eta, 0)
    assert optimizer.eta != 0.5 and not torch.equal(flat(model), corrected)


# -- what goes wrong in a probe ----------------------------------------------------------------------------------------


class Interrupt(Exception):
    pass


@together("failing_call", [1, 2, 3, 4])
def test_an_exception_inside_a_probe_leaves_the_plain_step(failing_call):
    """Two pieces: calls 1 and 2 after the training forwards are the probe ahead, 3 and 4 the one behind."""
    model, plain = make_model(dropout=0.3), make_model(dropout=0.3)
    settings = {"max_physical_batch_size": 5}
    _, optimizer, loader = make_private(
        model, adamw(model), preset="paper", initial_learning_rate=0.5, interval=2, **settings
    )
    _, fixed, _ = make_private(plain, adamw(plain), preset="fixed", **settings)
    optimizer._checks_due = fixed._checks_due = []
    calls = []

    def fail(batch):
        calls.append(len(batch[0]))
        if len(calls) == 2 + failing_call:
            raise Interrupt
        return cross_entropy(model)(batch)

    first, second = make_batches((8, 7))
    torch.manual_seed(1)
    with pytest.raises(Interrupt):
        optimizer.step(fail, first)
    random = torch.get_rng_state()
    torch.manual_seed(1)
    fixed.step(cross_entropy(plain), first)
    assert torch.equal(flat(model), flat(plain)) and torch.equal(random, torch.get_rng_state())
    assert optimizer.base.param_groups[0]["lr"] == 0.5
    # The noisy gradient is in the weights, so the release counts, and its batch must not be used again.
    assert (optimizer.ledger.steps, optimizer.ledger.probe_steps, optimizer.steps_left) == (1, 1, 9)
    assert loader.batch_sampler.position == 1
    # Training goes on.
    optimizer.step(cross_entropy(model), second)
    torch.set_rng_state(random)
    fixed.step(cross_entropy(plain), second)
    assert torch.equal(flat(model), flat(plain))


def test_an_exception_in_the_training_forward_releases_nothing():
    """The second piece fails after the first one's gradients were summed: no step, no count, no trace in the next."""
    model, plain = make_model(), make_model()
    _, optimizer, loader = make_private(model, adamw(model), max_physical_batch_size=5)
    _, undisturbed, _ = make_private(plain, adamw(plain), max_physical_batch_size=5)
    optimizer._checks_due = undisturbed._checks_due = []
    calls = []

    def fail(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise Interrupt
        return cross_entropy(model)(batch)

    start = flat(model)
    (batch,) = make_batches((8,))
    with pytest.raises(Interrupt):
        optimizer.step(fail, batch)
    assert torch.equal(flat(model), start)
    assert (optimizer.ledger.steps, loader.batch_sampler.position, optimizer.history) == (0, 0, [])
    optimizer.step(cross_entropy(model), batch)
    undisturbed.step(cross_entropy(plain), batch)
    assert torch.equal(flat(model), flat(plain))


# -- dropout -----------------------------------------------------------------------------------------------------------


@together(("kind", "pieces"), itertools.product(["losses", "contrasts"], [None, 3]))
def test_probes_see_the_masks_of_the_training_forward(kind, pieces):
    """Where the update direction is zero the three losses of every sample are equal, and so its contrasts are zero."""
    model = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 1)).double()
    settings = {"interval": 1, "initial_learning_rate": 0.1, "max_physical_batch_size": pieces}
    _, optimizer, _ = make_private(model, sgd(model), **searching(kind, "gen"), **settings)
    optimizer._checks_due = []
    seen = []

    def loss(batch):
        output = model(batch[0])[:, 0]
        seen.append(output.detach())
        return output.detach() ** 2 + 0 * output

    (batch,) = make_batches((8,))
    probe = optimizer.step(loss, batch).probe
    if kind == "contrasts":
        assert (probe.slope, probe.curvature) == (0.0, 0.0)
    else:  # a fit to three equal numbers rounds
        assert (probe.slope, probe.curvature) == pytest.approx((0.0, 0.0), abs=1e-10)
    forward, ahead, behind = torch.cat(seen).reshape(3, 8)
    assert torch.equal(forward, ahead) and torch.equal(forward, behind)
    with torch.no_grad():
        assert not torch.equal(model(batch[0])[:, 0], forward)  # another forward would have had other masks


@together("pieces", [None, 3])
def test_probing_does_not_disturb_the_global_random_stream(pieces):
    """A run with probes draws the dropout masks of a run without; noise never comes from the global generator."""
    states = []
    for settings in ({"preset": "fixed"}, {"preset": LINE_SEARCH, "interval": 1}, {"preset": "paper", "interval": 1}):
        model = make_model(dropout=0.5)
        _, optimizer, _ = make_private(
            model,
            sgd(model),
            max_physical_batch_size=pieces,
            **{"target_epsilon": 3.0, "accountant": "rdp"} | settings,
        )
        torch.manual_seed(3)
        for batch in make_batches((8, 0, 7)):
            optimizer.step(cross_entropy(model), batch)
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])
    torch.manual_seed(3)
    assert not torch.equal(torch.get_rng_state(), states[0])


def test_a_loss_function_that_draws_more_in_the_probes_does_not_disturb_the_stream():
    """As one does that looks at ``torch.is_grad_enabled()``: after the step the stream is where training left it."""
    states = []
    for preset in ("paper", "fixed"):
        model = make_model(dropout=0.5)
        _, optimizer, _ = make_private(model, sgd(model), preset=preset)

        def loss(batch, model=model):
            if not torch.is_grad_enabled():
                torch.rand(3)
            return cross_entropy(model)(batch)

        torch.manual_seed(3)
        optimizer.step(loss, make_batches((8,))[0])
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_other_random_layers_see_the_same_numbers_too():
    """Noise drawn inside the loss function itself, such as augmentation, repeats in the probes."""
    model = make_model()
    _, optimizer, _ = make_private(model, sgd(model), preset="paper", interval=1)
    optimizer._checks_due = []
    drawn = []

    def loss(batch):
        noise = torch.randn_like(batch[0])
        drawn.append(noise)
        return F.cross_entropy(model(batch[0] + noise), batch[1], reduction="none")

    for step, batch in enumerate(make_batches((8, 8, 5))):
        drawn.clear()
        optimizer.step(loss, batch)
        if step > 0:  # at the first one a larger pass tells that such an input holds samples
            assert len(drawn) == 3 and all(torch.equal(first, second) for first, second in itertools.pairwise(drawn))
