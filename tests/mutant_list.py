"""The deliberate faults that the tests must notice: one change of one place each; ``mutants.py`` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One small, deliberate fault.

    Attributes:
        name: short and unique.
        file: of the package, relative to the project.
        old: what stands there now, exactly once.
        new: what the fault makes of it.
        what: one sentence: the fault and what it breaks.
        tests: what should notice and therefore runs first: test files, without "test_" and ".py", or single tests of
            slow files, as in "engine::test_ten_lines".
    """

    name: str
    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Change the file below ``root``.

        Raises:
            ValueError: the place is not there, or there are several.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.name!r}: its old text must occur exactly once in {self.file}, but it occurs {count} "
                "times: if the code has changed, change the mutant in tests/mutant_list.py with it"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


PRIVATIZE, PROBE, OPTIMIZER = "hyfreedp/privatize.py", "hyfreedp/probe.py", "hyfreedp/optimizer.py"
VOTES, CHECKPOINT = "hyfreedp/votes.py", "hyfreedp/checkpoint.py"
CONTRASTS = "hyfreedp/experiments/studies/contrasts.py"
ENGINE, SAMPLING, PASSES = "hyfreedp/engine.py", "hyfreedp/sampling.py", "hyfreedp/passes.py"
NOISE, CIPHER, BASE = "hyfreedp/noise.py", "hyfreedp/cipher.py", "hyfreedp/base.py"
ACCOUNTING, CLIPPING = "hyfreedp/accounting", "hyfreedp/clipping"

MUTANTS = [
    # -- noise ---------------------------------------------------------------------------------------------------------
    Mutant(
        "gradient-noise-off",
        PRIVATIZE,
        "as_generator(generator).add_noise(clipped_sums, noise_multiplier * sensitivity)",
        "as_generator(generator).add_noise(clipped_sums, 0.0)",
        "The gradient is released without noise: no privacy at all.",
        ("optimizer",),
    ),
    Mutant(
        "gradient-noise-on-the-mean",
        PRIVATIZE,
        "as_generator(generator).add_noise(clipped_sums, noise_multiplier * sensitivity)",
        "as_generator(generator).add_noise(clipped_sums, noise_multiplier * sensitivity / expected_batch_size)",
        "Noise meant for the mean is added to the sum, which is divided once more: a B-th of what is accounted for.",
        ("optimizer",),
    ),
    Mutant(
        "gradient-noise-without-sensitivity",
        PRIVATIZE,
        "as_generator(generator).add_noise(clipped_sums, noise_multiplier * sensitivity)",
        "as_generator(generator).add_noise(clipped_sums, noise_multiplier)",
        "The noise does not grow with the clipping threshold: too little for any threshold above one.",
        ("optimizer",),
    ),
    Mutant(
        "probe-noise-off",
        PRIVATIZE,
        "as_generator(generator).add_noise([total], noise_multiplier * clip, mechanism)",
        "as_generator(generator).add_noise([total], 0.0, mechanism)",
        "Losses and contrasts are released exactly.",
        (
            "privatize",
            "probe",
        ),
    ),
    Mutant(
        "probe-noise-on-the-mean",
        PRIVATIZE,
        "as_generator(generator).add_noise([total], noise_multiplier * clip, mechanism)",
        "as_generator(generator).add_noise([total], noise_multiplier * clip / expected_batch_size, mechanism)",
        "Noise meant for the mean loss is added to the sum of losses: a B-th of what is accounted for.",
        (
            "privatize",
            "probe",
        ),
    ),
    Mutant(
        "probe-noise-without-clip",
        PRIVATIZE,
        "as_generator(generator).add_noise([total], noise_multiplier * clip, mechanism)",
        "as_generator(generator).add_noise([total], noise_multiplier, mechanism)",
        "The noise on the losses does not follow R_l, their sensitivity.",
        (
            "privatize",
            "probe",
        ),
    ),
    Mutant(
        "laplace-scale-too-small",
        NOISE,
        "return first.mul_(second).add_(third.mul_(fourth))",
        "return first.mul_(second).add_(third.mul_(fourth)).mul_(0.7071)",
        "Laplace noise gets standard deviation 1 instead of scale 1: less than the accountant's b.",
        (
            "noise",
            "privatize",
        ),
    ),
    Mutant(
        "empty-batch-skips-gradient-noise",
        OPTIMIZER,
        "        tag = self._privatize_gradient(t)\n",
        "        tag = self._privatize_gradient(t) if len(losses) else 0\n",
        "An empty batch is released without noise, so that everybody sees that it was empty.",
        ("optimizer",),
    ),
    Mutant(
        "empty-batch-skips-probe-noise",
        PRIVATIZE,
        "    if noise_multiplier > 0:\n        if math.isinf(clip):",
        "    if noise_multiplier > 0 and clipped.shape[-1] > 0:\n        if math.isinf(clip):",
        "A probe on an empty batch is released without noise, so that everybody sees that it was empty.",
        ("privatize", "probe"),
    ),
    Mutant(
        "one-noise-stream",
        OPTIMIZER,
        'self._generator.child("probe", t)',
        'self._generator.child("gradient", t)',
        "Gradient and probe of a step have one key: where their sums agree, one release tells the noise of the other.",
        (
            "noise",
            "probe::test_probe_noise_is_independent_of_the_gradients_noise",
            "attacks_noise::test_gradient_and_probe_have_keys_of_their_own",
        ),
    ),
    Mutant(
        "sampling-and-noise-share-a-seed",
        ENGINE,
        'generator=generator.child("noise"),',
        'generator=generator.child("sampling"),',
        "The noise comes from the key that the batches come from.",
        ("engine::test_sampling_and_noise_have_seeds_of_their_own",),
    ),
    Mutant(
        "probe-step-noise-not-raised",
        f"{ACCOUNTING}/split.py",
        "return self.sigma_gradient_probe if self.is_probe_step(t) else self.sigma_gradient",
        "return self.sigma_gradient",
        "On probe steps the gradient keeps the smaller noise of plain steps: the probe is not paid for.",
        ("optimizer::test_probe_steps_have_their_own_gradient_noise",),
    ),
    # -- batch size ----------------------------------------------------------------------------------------------------
    Mutant(
        "actual-batch-size-gradient",
        OPTIMIZER,
        "                tag = self._privatize_gradient(t)\n",
        "                planned, self.expected_batch_size = self.expected_batch_size, max(len(losses), 1)\n"
        "                tag = self._privatize_gradient(t)\n"
        "                self.expected_batch_size = planned\n",
        "The gradient is divided by the size of the batch at hand, which depends on who is in it.",
        ("optimizer",),
    ),
    Mutant(
        "actual-batch-size-losses",
        PRIVATIZE,
        "    return total / expected_batch_size",
        "    return total / max(clipped.shape[-1], 1)",
        "The losses are divided by the size of the batch at hand, which depends on who is in it.",
        ("privatize",),
    ),
    # -- clipping of losses and contrasts ------------------------------------------------------------------------------
    Mutant(
        "losses-unclipped",
        PRIVATIZE,
        "finite.clamp(max=threshold), threshold, noise_multiplier",
        "finite, threshold, noise_multiplier",
        "Losses are not clipped to R_l: one record moves the release without bound.",
        ("privatize",),
    ),
    Mutant(
        "contrasts-unclipped",
        CONTRASTS,
        "        scaled = scaled / torch.linalg.vector_norm(scaled, dim=0).clamp(min=1.0)\n",
        "",
        "Contrasts are not clipped: one record moves the release without bound.",
        ("studies",),
    ),
    Mutant(
        "contrasts-clipped-one-by-one",
        CONTRASTS,
        "scaled = scaled / torch.linalg.vector_norm(scaled, dim=0).clamp(min=1.0)",
        "scaled = scaled.clamp(-1.0, 1.0)",
        "The two contrasts are clipped each instead of jointly: squared sensitivity 2.5 instead of 1.5.",
        ("studies",),
    ),
    Mutant(
        "laplace-contrasts-clipped-at-one",
        CONTRASTS,
        "scaled = (contrasts / (unit * bounds)).clamp(-0.5, 0.5)",
        "scaled = (contrasts / (unit * bounds)).clamp(-1.0, 1.0)",
        "Under Laplace noise a contrast moves by 1 instead of 1/2.",
        ("studies",),
    ),
    Mutant(
        "raw-loss-moves-the-threshold",
        PROBE,
        "self.loss_threshold = self._next_loss_threshold(tuple(private))",
        "self.loss_threshold = self._next_loss_threshold(tuple((losses.sum(dim=-1) / expected_batch_size).tolist()))",
        "The next R_l follows the raw losses instead of the released ones: an unaccounted release.",
        (
            "probe",
            "exactness",
        ),
    ),
    Mutant(
        "raw-fractions-move-the-thresholds",
        CONTRASTS,
        "fractions=(released[2] + 0.5, released[3] + 0.5)",
        "fractions=tuple((inside.sum(dim=1) / expected_batch_size + 0.5).tolist())",
        "The next R_d and R_c follow counts without noise: an unaccounted release.",
        ("studies",),
    ),
    Mutant(
        "private-loss-is-the-raw-one",
        PROBE,
        "private_loss=private[1],",
        "private_loss=losses[1].sum().item() / expected_batch_size,",
        "What is reported as the private loss is the raw one.",
        ("probe",),
    ),
    Mutant(
        "another-release-than-was-paid-for",
        OPTIMIZER,
        '        if getattr(probe, "kind", "none") != split.probe:',
        "        if False:",
        "A line search releases other numbers than those that the noise was calibrated for.",
        ("studies::test_what_is_released_must_be_what_was_paid_for",),
    ),
    # -- records that are not finite -----------------------------------------------------------------------------------
    Mutant(
        "nan-loss-not-neutralised",
        PRIVATIZE,
        "finite = losses.double().nan_to_num(nan=UNBOUNDED_LOSS, posinf=UNBOUNDED_LOSS)",
        "finite = losses.double()",
        "One record whose loss is NaN makes the whole release NaN.",
        ("privatize",),
    ),
    Mutant(
        "nan-contrast-not-neutralised",
        CONTRASTS,
        "finite = losses.double().nan_to_num(nan=UNBOUNDED_LOSS).clamp(-UNBOUNDED_LOSS, UNBOUNDED_LOSS)",
        "finite = losses.double()",
        "One record whose losses are not finite makes the released contrasts NaN.",
        ("studies",),
    ),
    Mutant(
        "nan-gradient-not-left-out",
        f"{CLIPPING}/base.py",
        "finite = norms.isfinite()",
        "finite = torch.ones_like(norms, dtype=torch.bool)",
        "One record whose gradient is not finite makes the whole sum NaN.",
        ("clipping",),
    ),
    # -- accounting ----------------------------------------------------------------------------------------------------
    Mutant(
        "independent-where-same-batch-is-asked",
        f"{ACCOUNTING}/composition.py",
        "return ((gradients[0], (probe.with_gaussian(split.sigma_gradient_probe), count)),)",
        "return (gradients + probes,)",
        "Gradient and probe of one batch are counted as if each had drawn its own: epsilon is understated.",
        ("accounting::test_a_per_step_split_costs_what_vanilla_does_under_every_accountant",),
    ),
    Mutant(
        "probe-not-counted",
        f"{ACCOUNTING}/ledger.py",
        "probe_steps = self._released_probes + (more and self.split.is_probe_step(step))",
        "probe_steps = self._released_probes",
        "The ledger does not count the probes that were released.",
        ("accounting_ledger",),
    ),
    Mutant(
        "one-step-too-many",
        f"{ACCOUNTING}/ledger.py",
        "if self._steps >= self.split.steps:",
        "if self._steps > self.split.steps:",
        "The ledger allows one step more than the noise was calibrated for.",
        ("accounting_ledger",),
    ),
    Mutant(
        "state-of-another-plan-accepted",
        f"{ACCOUNTING}/ledger.py",
        "        if different:",
        "        if False:",
        "A run resumes with noise that its own plan did not calibrate.",
        ("accounting_ledger",),
    ),
    Mutant(
        "warm-up-probes-not-counted",
        f"{ACCOUNTING}/split.py",
        "return min(steps, warmup_steps) + math.ceil(max(steps - warmup_steps, 0) / interval)",
        "return math.ceil(steps / interval)",
        "The noise is calibrated without the probes of the warm-up.",
        ("accounting::test_probe_steps_are_counted_as_planned",),
    ),
    Mutant(
        "last-probe-not-counted",
        f"{ACCOUNTING}/split.py",
        "math.ceil(max(steps - warmup_steps, 0) / interval)",
        "max(steps - warmup_steps, 0) // interval",
        "Where K does not divide T the last probe is not paid for.",
        ("accounting::test_probe_steps_are_counted_as_planned",),
    ),
    Mutant(
        "sensitivity-of-three-losses-is-one",
        f"{ACCOUNTING}/mechanisms.py",
        '"losses": 3.0, "contrasts": 1.5}',
        '"losses": 1.0, "contrasts": 1.5}',
        "Three losses are paid for like one.",
        ("accounting::test_three_losses_at_every_step_need_12_34_sigma",),
    ),
    Mutant(
        "sensitivity-of-contrasts-without-indicators",
        f"{ACCOUNTING}/mechanisms.py",
        '"losses": 3.0, "contrasts": 1.5}',
        '"losses": 3.0, "contrasts": 1.0}',
        "The two indicators that move the contrasts' thresholds are not paid for.",
        ("accounting::test_a_probe_at_every_step_meets_the_closed_form",),
    ),
    Mutant(
        "laplace-sensitivity-of-one-coordinate",
        f"{ACCOUNTING}/mechanisms.py",
        '"losses": (3, 1.0), "contrasts": (4, 0.5)}',
        '"losses": (1, 1.0), "contrasts": (1, 0.5)}',
        "Of the coordinates that have Laplace noise only one is counted.",
        ("accounting_accountants::test_a_laplace_probe_costs_its_l1_sensitivity_without_sampling",),
    ),
    Mutant(
        "nearest-noise",
        f"{ACCOUNTING}/search.py",
        "        if excess > 0:\n",
        "        if abs(excess) <= -slope * tolerance:\n            return math.exp(x)\n        if excess > 0:\n",
        "The search takes the noise nearest to the budget, also from the side that exceeds it.",
        ("accounting::test_search_ends_just_above_the_root",),
    ),
    Mutant(
        "tolerance-on-both-sides",
        f"{ACCOUNTING}/calibrate.py",
        "while split.epsilon > target_epsilon:",
        "while split.epsilon > target_epsilon * (1 + 1e-6):",
        "An epsilon a little above the target passes.",
        ("accounting::test_an_epsilon_that_rounding_lifts_above_the_target_is_met_with_more_noise",),
    ),
    Mutant(
        "accounting-with-another-sample-rate",
        ENGINE,
        "split = self._calibrate(settings, target_epsilon, target_delta, sampler.sample_rate, total)",
        "split = self._calibrate(settings, target_epsilon, target_delta, sampler.sample_rate / 2, total)",
        "The noise is calibrated for the rate of a data set twice as large.",
        ("engine::test_the_split_is_that_of_calibrate_noise",),
    ),
    Mutant(
        "pld-of-removal-only",
        f"{ACCOUNTING}/pld.py",
        "pmf_add=_connect_the_dots(-upper, -lower, add, interval),",
        "pmf_add=_connect_the_dots(-upper, -lower, 0 * add, interval),",
        "The privacy loss of an added record is taken for zero.",
        ("accounting_accountants::test_amplification_agrees_with_dp_accountings_own_where_that_has_one",),
    ),
    Mutant(
        "delta-of-another-number-of-records",
        "hyfreedp/experiments/tasks.py",
        "delta=size**-1.1",
        "delta=known.validation_start**-1.1",
        "Delta is that of a smaller data set than the one trained on: larger than N^-1.1.",
        ("tasks::test_the_protocol_is_known_before_anything_is_read",),
    ),
    # -- sampling ------------------------------------------------------------------------------------------------------
    Mutant(
        "batches-of-fixed-size",
        SAMPLING,
        'NoiseGenerator(self.seed).child("batch", step).uniform(self.num_records) < self.sample_rate',
        'NoiseGenerator(self.seed).child("batch", step).permutation(self.num_records) < '
        "round(self.num_records * self.sample_rate)",
        "Batches of fixed size are no Poisson samples: the accountant's amplification does not hold for them.",
        ("sampling",),
    ),
    Mutant(
        "same-batch-at-every-step",
        SAMPLING,
        '.child("batch", step)',
        '.child("batch", 0)',
        "Every step draws the same batch: whoever is in it is in all of them.",
        ("sampling",),
    ),
    Mutant(
        "sample-rate-of-another-number-of-records",
        SAMPLING,
        "sample_rate=loader.batch_size / num_records,",
        "sample_rate=min(1.0, loader.batch_size / max(1, num_records - loader.batch_size)),",
        "The sample rate is that of a smaller data set: expected batches are larger than the user asked for.",
        (
            "engine::test_the_split_is_that_of_calibrate_noise",
            "sampling",
        ),
    ),
    # -- resumption ----------------------------------------------------------------------------------------------------
    Mutant(
        "gradient-noise-not-resumed",
        CHECKPOINT,
        '        self._generator.load_state_dict(state["generator"])\n',
        "",
        "A resumed run has other noise: a step that is made again is released twice, with independent noise.",
        ("resume::test_resumes_bitwise_from_every_step",),
    ),
    Mutant(
        "sampler-not-resumed",
        SAMPLING,
        '        self.seed, self.position, self.given = state["seed"], state["position"], None\n',
        '        self.seed = state["seed"]\n',
        "A resumed run takes its first batches again.",
        ("sampling",),
    ),
    Mutant(
        "spent-budget-forgotten-on-resume",
        f"{ACCOUNTING}/ledger.py",
        "        self._steps = position\n",
        "        self._steps = 0\n",
        "A resumed run starts with the whole budget again.",
        ("accounting_ledger",),
    ),
    # -- the step ------------------------------------------------------------------------------------------------------
    Mutant(
        "eta-does-not-reach-the-optimizer",
        BASE,
        'group["lr"] = eta * ratio',
        'group["lr"] = self.eta * ratio',
        "The base optimizer steps with its own rate instead of the learned one.",
        ("exactness",),
    ),
    Mutant(
        "new-eta-not-told",
        BASE,
        "            self._set_rates(distance)\n",
        "",
        "After a probe the base optimizer's rate is not the one that the step took.",
        ("exactness",),
    ),
    Mutant(
        "decay-not-applied",
        OPTIMIZER,
        "eta = self.eta * decay_factor(t, self.split.steps, self.decay, self.decay_start)",
        "eta = self.eta",
        "The learning rate does not fall to zero at the end of the run.",
        (
            "exactness",
            "optimizer::test_counters_and_schedule",
        ),
    ),
    Mutant(
        "gen-smoothing-reversed",
        "hyfreedp/stepsize.py",
        "smoothing * next_eta + (1 - smoothing) * eta",
        "(1 - smoothing) * next_eta + smoothing * eta",
        "Rule gen keeps a tenth of the old rate, where its authors keep nine tenths.",
        ("gen_optim",),
    ),
    Mutant(
        "probe-on-the-same-batch",
        OPTIMIZER,
        'late = self.probe_batch == "next"',
        "late = False",
        "A line search that is to look by the next batch looks by the one that its direction comes from.",
        ("gen_optim",),
    ),
    Mutant(
        "gradient-before-the-correction",
        OPTIMIZER,
        "if retreated or (result and result.eta_next != result.eta_probed):",
        "if retreated:",
        "After a probe by the next batch, its gradient is that of the weights before they moved to the new rate.",
        ("gen_optim",),
    ),
    Mutant(
        "kept-step-not-saved",
        "hyfreedp/checkpoint.py",
        '"last_step": None if self._base.last is None else list(self._base.last)',
        '"last_step": None',
        "A run resumed between a step and the next batch's probe along it does not probe.",
        ("resume",),
    ),
    Mutant(
        "two-base-steps-per-probe",
        BASE,
        "        self.step(eta, keep=True)\n        return",
        "        self.step(eta)\n        self.step(eta, keep=True)\n        return",
        "The base optimizer advances twice on steps that probe.",
        ("exactness",),
    ),
    Mutant(
        "weights-restored-by-arithmetic",
        BASE,
        "            torch._foreach_copy_(self.parameters, plain if distance == eta else start)\n"
        "            if distance != eta:\n"
        "                torch._foreach_lerp_(self.parameters, plain, distance / eta)\n",
        "            torch._foreach_sub_(self.parameters, start)\n"
        "            torch._foreach_mul_(self.parameters, distance / (getattr(self, '_at', 0.0) or eta))\n"
        "            torch._foreach_add_(self.parameters, start)\n"
        "            self._at = distance\n",
        "After a rejected probe the weights are computed back instead of restored, and drift by rounding.",
        ("exactness",),
    ),
    Mutant(
        "other-dropout-masks-in-probes",
        PASSES,
        "                state.restore()\n",
        "",
        "Probes see other dropout masks than the forward pass, so the contrasts measure the masks.",
        ("exactness",),
    ),
    Mutant(
        "probes-disturb-the-random-stream",
        PASSES,
        "            present.restore()\n        return self._in_order",
        "            pass\n        return self._in_order",
        "After a probe the next forward pass repeats dropout masks.",
        ("exactness",),
    ),
    Mutant(
        "difference-with-the-wrong-sign",
        CONTRASTS,
        "torch.stack([behind - ahead, ",
        "torch.stack([ahead - behind, ",
        "Downhill is taken for uphill.",
        ("studies", "exactness"),
    ),
    Mutant(
        "curvature-halved",
        "hyfreedp/curvefit.py",
        "curvature_weights = 2 * quadratic_weights / scale**2",
        "curvature_weights = quadratic_weights / scale**2",
        "The parabola's second derivative is taken for its quadratic coefficient: eta comes out twice too large.",
        ("curvefit",),
    ),
    # -- per-sample gradients ------------------------------------------------------------------------------------------
    Mutant(
        "norms-without-biases",
        f"{CLIPPING}/base.py",
        "sum((g.squared_norms for g in gradients.values()), start=zeros)",
        "sum((g.squared_norms for p, g in gradients.items() if p.dim() > 1), start=zeros)",
        "Biases are missing in the norms: clipped gradients are longer than the sensitivity.",
        ("clipping",),
    ),
    Mutant(
        "cross-term-of-tied-weights-missing",
        f"{CLIPPING}/persample.py",
        "+ 2 * (cross + rounding)",
        "+ 2 * (0 * cross + rounding)",
        "The two uses of a tied table are taken for orthogonal: norms come out too small.",
        (
            "clipping_models::test_full_fine_tuning",
            "clipping_models::test_equals_vmap_of_grad",
        ),
    ),
    Mutant(
        "repeated-tokens-not-added",
        f"{CLIPPING}/persample.py",
        "return norms.index_add_(0, pairs // self.entries, _squared_norms(sums))",
        "return self.rows.to(wide).square().sum((1, 2))",
        "Rows of a token that occurs twice are not added up before the norm is taken: it comes out too small.",
        ("clipping::test_rows_of_a_token_that_occurs_twice_add_up",),
    ),
    Mutant(
        "stability-constant-dropped",
        f"{CLIPPING}/factors.py",
        "1 / (norms + self.stability)",
        "1 / norms",
        "Automatic clipping without its constant: tiny gradients are blown up, that of norm zero becomes NaN.",
        ("exactness::test_equals_the_twin_for_every_probe_rule_and_clipping",),
    ),
    Mutant(
        "clipped-layer-by-layer",
        f"{CLIPPING}/base.py",
        "self._add(p, gradients.pop(p).weighted_sum(factors) if p in gradients else None)",
        "g = gradients.pop(p, None)\n"
        "            own = None if g is None else self.clipping.factors(g.squared_norms.clamp(min=0).sqrt())\n"
        "            self._add(p, None if g is None else g.weighted_sum(own))",
        "Each parameter is clipped by its own norm: the whole gradient exceeds the sensitivity.",
        ("clipping",),
    ),
    Mutant(
        "sensitivity-of-clipping-is-one",
        f"{CLIPPING}/factors.py",
        "return float(self.threshold)",
        "return 1.0",
        "The noise does not know the clipping threshold.",
        ("optimizer",),
    ),
    Mutant(
        "norms-in-half-precision",
        f"{CLIPPING}/persample.py",
        "return torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32)).square()",
        "return torch.linalg.vector_norm(x, dim=1).square()",
        "Norms of half-precision gradients are summed in half precision: they round, and overflow to no gradient.",
        ("clipping::test_norms_of_half_precision_gradients_are_those_of_single_precision",),
    ),
    # -- what is shown -------------------------------------------------------------------------------------------------
    Mutant(
        "diagnostics-unasked",
        OPTIMIZER,
        "        if self.diagnostics:",
        "        if True:",
        "Raw losses and norms are recorded though nobody asked for them.",
        ("optimizer::test_history_makes_a_frame_and_marks_all_that_is_raw",),
    ),
    Mutant(
        "raw-values-unmarked",
        "hyfreedp/records.py",
        '{f"not_private_{name}": value',
        '{f"{name}": value',
        "Raw values stand in the history under names that do not say so.",
        ("optimizer::test_history_makes_a_frame_and_marks_all_that_is_raw",),
    ),
    # -- several processes ---------------------------------------------------------------------------------------------
    Mutant(
        "every-process-adds-gradient-noise",
        OPTIMIZER,
        '        self.processes.add_up(sums)\n        generator = self._generator.child("gradient", t)\n',
        '        add_up, generator = self.processes.add_up, self._generator.child("gradient", t)\n'
        "        if (sigma := self.split.gradient_noise_multiplier(t)) > 0 and self.processes.rank > 0:\n"
        '            generator.child("more").add_noise(sums, sigma * self._engine.clipping.sensitivity)\n'
        "        add_up(sums)\n",
        "Each process adds noise before the sums are added up: too much, and the wrong epsilon.",
        ("distributed",),
    ),
    Mutant(
        "shards-overlap",
        SAMPLING,
        "return drawn[drawn % self.world_size == self.rank].tolist()",
        "return drawn.tolist()",
        "Every process takes the whole batch: each record counts as often as there are processes.",
        ("distributed",),
    ),
    # -- what an adversary tried ---------------------------------------------------------------------------------------
    Mutant(
        "seed-of-32-bits",
        NOISE,
        'derive(b"", "seed", int(seed))',
        'derive(b"", "seed", int(seed) % 2**32)',
        "The key comes from 32 bits of the seed, which a search finds from one published step.",
        ("noise",),
    ),
    Mutant(
        "constant-key-without-seed",
        NOISE,
        "secrets.token_bytes(32) if seed is None",
        "bytes(32) if seed is None",
        "Without a seed every run has the same key: all noise is known.",
        ("noise",),
    ),
    Mutant(
        "noise-not-bound-to-the-data",
        NOISE,
        'digest = universal_hash(joined, derive(self.key, "hash", self.releases))',
        'digest = b""',
        "A step that is computed again on other data has the same noise: two releases differ by the raw difference.",
        ("attacks_noise",),
    ),
    Mutant(
        "noise-not-bound-to-its-scale",
        NOISE,
        "float(scale).hex(), ",
        "",
        "The same noise under two noise multipliers: two equations give the raw sum.",
        (
            "noise",
            "attacks_noise",
        ),
    ),
    Mutant(
        "every-release-has-the-same-noise",
        NOISE,
        "        self.releases += 1\n        self.tag",
        "        self.tag",
        "One generator draws the same noise for each of its releases.",
        ("noise",),
    ),
    Mutant(
        "truncated-tails",
        NOISE,
        "radius.add_(0.5)",
        "radius.add_(2.0**38)",
        "Noise ends at 5.9 sigma: outputs beyond are possible with one record only.",
        ("attacks_noise",),
    ),
    Mutant(
        "last-bits-tell",
        NOISE,
        ".round_().mul_(grid)",
        ".mul_(grid)",
        "The last bits of a release tell what the noise was added to.",
        ("noise",),
    ),
    Mutant(
        "secure-noise-is-not",
        NOISE,
        "        if not self.secure:\n",
        "        if True:\n",
        "secure_noise=True changes nothing.",
        ("noise",),
    ),
    Mutant(
        "hash-ignores-half-the-bits",
        CIPHER,
        "integers = flat.view(torch.int16)",
        "integers = flat.view(torch.int16)[::2]",
        "On accelerators sums that differ in half of their bits have the same noise.",
        ("noise",),
    ),
    Mutant(
        "one-engine-one-key",
        ENGINE,
        '.child("run", self._runs)',
        '.child("run", 0)',
        "Two runs of one engine repeat batches and noise: two equations give the raw sum.",
        ("engine::test_an_engine_gives_every_run_keys_of_its_own",),
    ),
    Mutant(
        "default-key",
        OPTIMIZER,
        "        generator: NoiseGenerator,\n",
        "        generator: NoiseGenerator = NoiseGenerator(0),  # noqa: B008\n",
        "An optimizer that is built by hand has noise that everybody knows.",
        ("attacks_noise",),
    ),
    Mutant(
        "modes-not-checked-before-the-forward-pass",
        OPTIMIZER,
        "        self._engine.check_modes()\n        due",
        "        due",
        "A batch norm that has woken up sees the batch before it is refused.",
        ("attacks_model::test_t3_bn_a_frozen_batch_norm_that_wakes_up_is_refused_before_it_sees_the_batch",),
    ),
    Mutant(
        "modes-not-checked-by-the-engine",
        f"{CLIPPING}/base.py",
        "        self.check_modes()\n",
        "",
        "An engine used by itself trains through a batch norm that has woken up.",
        ("attacks_model::test_t3b_an_engine_alone_refuses_it_too",),
    ),
    Mutant(
        "buffers-may-learn",
        PASSES,
        "with self._buffers.unchanged(by_value=self._check):",
        "if True:",
        "A buffer takes in raw data, and the state_dict publishes it.",
        ("attacks_model::test_t10_buffer_that_learns_is_refused_by_name_and_put_back",),
    ),
    Mutant(
        "buffers-not-put-back",
        "hyfreedp/buffers.py",
        "                buffer.copy_(copy)\n",
        "",
        "A refused forward pass leaves raw data in a buffer.",
        ("attacks_model::test_t10_buffer_that_learns_is_refused_by_name_and_put_back",),
    ),
    Mutant(
        "settings-not-compared-on-resume",
        CHECKPOINT,
        '        check_same_run(self._settings, state["settings"])\n',
        "",
        "A run is resumed with other clipping, rule or data than its noise was made for.",
        ("attacks_noise::test_t23_a_state_of_another_run_is_refused_by_the_field_that_differs",),
    ),
    Mutant(
        "a-step-made-again-counts-once",
        f"{ACCOUNTING}/ledger.py",
        "        if tag in tags[kind]:\n",
        "        if tags[kind]:\n",
        "Steps that are released again with other data are not counted.",
        ("attacks_noise::test_t23_steps_released_twice_count_twice_where_that_is_known",),
    ),
    Mutant(
        "going-back-forgets-releases",
        CHECKPOINT,
        'also=self._runs.get(state["generator"]["key"], ())',
        "also=()",
        "Going back to an earlier state forgets what was released since.",
        ("attacks_noise::test_t23_steps_released_twice_count_twice_where_that_is_known",),
    ),
    Mutant(
        "products-in-half-precision",
        f"{CLIPPING}/persample.py",
        "        left, right = widened(self.left), widened(self.right)\n        weights",
        "        left, right = self.left, self.right\n        weights",
        "Under autocast the clipped sum is rounded to half precision: one record moves it by several times its clip.",
        ("attacks_model::test_t5_bf16_one_of_4096_aligned_records_moves_the_sum_by_one",),
    ),
    Mutant(
        "sums-in-half-precision",
        f"{CLIPPING}/persample.py",
        "        flat = widened(self._flat())\n        return (weights",
        "        flat = self._flat()\n        return (weights",
        "The same in sums of gradients that are kept one by one.",
        ("attacks_model::test_t5_bf16_one_of_4096_aligned_records_moves_the_sum_by_one",),
    ),
    Mutant(
        "samples-not-compared",
        OPTIMIZER,
        "        if due and passes.check_samples(",
        "        if due or passes.check_samples(",
        "Nobody looks whether losses depend on other samples.",
        ("attacks_model::test_t7_mix_through_values_without_gradient_is_refused",),
    ),
    Mutant(
        "weights-not-shaken",
        "hyfreedp/mixing.py",
        "            with _shaken(parameters, generator):\n",
        "            if True:\n",
        "Samples that mix behind a weight that is zero are not noticed before that opens.",
        ("attacks_model::test_t21_check_gap_a_closed_branch_is_refused_before_it_opens",),
    ),
    Mutant(
        "checked-once-only",
        "hyfreedp/mixing.py",
        "    return [first, *sorted(step for step in chosen.tolist() if step > first)]",
        "    return [first]",
        "What begins after the first batch is never noticed.",
        ("attacks_model::test_t21_check_gap_mixing_that_begins_later_is_refused",),
    ),
    Mutant(
        "gradients-checked-once-only",
        PASSES,
        "            engine.verify(self._values(samples))\n",
        "",
        "Samples that change places between layers after the first batch are not noticed.",
        ("attacks_model::test_t21_check_gap_an_order_that_changes_later_is_refused",),
    ),
    Mutant(
        "check-with-one-sign",
        f"{CLIPPING}/base.py",
        "torch.where(uniform[1] < 0.5, -1.0, 1.0)",
        "1.0",
        "The check weighs samples by positive numbers: similar records hide that they are taken for each other.",
        ("attacks_model::test_wrong_batch_attention_is_noticed_by_an_engine_alone",),
    ),
    Mutant(
        "one-record-refuses",
        "hyfreedp/mixing.py",
        "if int(differs.sum()) > min(max(1, len(differs) // 4), max(0, len(differs) - 1)):",
        "if int(differs.sum()) > 0:",
        "One bad record can end a run.",
        ("mixing",),
    ),
    Mutant(
        "samplers-dropped",
        SAMPLING,
        "    _check_order(loader.sampler, num_records)\n",
        "",
        "A sampler that leaves records out is dropped, and they are trained on.",
        ("attacks_model::test_t4_subset_samplers_that_choose_records_are_refused",),
    ),
    Mutant(
        "skipped-batches-come-again",
        SAMPLING,
        "        if sampler.position not in (*allowed, sampler.horizon):",
        "        if False:",
        "Who skips a batch is served used batches again as fresh ones.",
        ("attacks_noise::test_t15_skip_a_batch_is_never_served_again_as_fresh",),
    ),
    Mutant(
        "negative-losses-raise-in-a-probe",
        PROBE,
        "losses.clamp(min=0),",
        "losses,",
        "One record whose loss turns negative in a probe ends the run, after the release.",
        ("attacks_model::test_t11_doc_losses_that_turn_negative_in_a_probe_are_clipped_like_others",),
    ),
    Mutant(
        "raw-steps-allowed",
        BASE,
        "    if not optimizer._private_owner._stepping:",
        "    if False:",
        "loss.backward() and the old optimizer's step train without privacy, and epsilon stays 0.",
        ("attacks_noise::test_old_optimizers_own_step_is_refused",),
    ),
    # -- votes ---------------------------------------------------------------------------------------------------------
    Mutant(
        "votes-for-the-loser",
        PRIVATIZE,
        "votes = (there > here).double() - (there < here).double()",
        "votes = (there < here).double() - (there > here).double()",
        "Records vote against the weights that they prefer.",
        ("votes::test_without_noise_the_sum_of_the_votes_over_the_expected_size",),
    ),
    Mutant(
        "votes-by-how-much",
        PRIVATIZE,
        "votes = (there > here).double() - (there < here).double()",
        "votes = (there - here).nan_to_num(nan=0.0).clamp(-2, 2)",
        "A vote weighs as much as the losses differ, up to 2: twice the sensitivity that the accountant assumes.",
        ("votes::test_one_more_record_of_any_losses_moves_the_sum_by_one_at_most",),
    ),
    Mutant(
        "votes-without-noise",
        PRIVATIZE,
        "return noisy_mean(sums, 1.0, noise_multiplier,",
        "return noisy_mean(sums, 1.0, 0 * noise_multiplier,",
        "Votes are counted exactly and released so.",
        ("votes::test_noise_has_the_stated_distribution",),
    ),
    Mutant(
        "votes-with-other-noise",
        OPTIMIZER,
        "            mechanism=mechanism,\n            generator=generator,",
        "            generator=generator,",
        "The noise of votes is Gaussian where the accountant counts on Laplace noise of that scale.",
        ("votes::test_an_empty_batch_votes_with_noise_alone",),
    ),
    Mutant(
        "votes-at-half-the-price",
        f"{ACCOUNTING}/mechanisms.py",
        'SQUARED_L2_SENSITIVITY = {"votes": 1.0,',
        'SQUARED_L2_SENSITIVITY = {"votes": 0.5,',
        "The accountant counts the votes' squared sensitivity as one half: their noise is too small.",
        ("votes::test_a_split_with_votes_meets_the_closed_form",),
    ),
    Mutant(
        "votes-not-counted",
        OPTIMIZER,
        "        self.ledger.record_vote(generator.tag)\n",
        "",
        "A vote that is followed by an error is released and forgotten: the next one on its step is free.",
        ("votes::test_another_batch_after_an_error_is_a_further_release",),
    ),
    Mutant(
        "raw-votes-decide",
        OPTIMIZER,
        "        return voted.count(margin, ",
        "        margin = (rival - losses).sign().sum().item() / expected\n        return voted.count(margin, ",
        "The run goes back by the raw votes: an unaccounted release.",
        ("votes::test_an_empty_batch_votes_with_noise_alone",),
    ),
    Mutant(
        "votes-and-gradients-share-a-key",
        OPTIMIZER,
        'generator, sigma = self._generator.child("vote", t), self.split.sigma_loss',
        'generator, sigma = self._generator.child("gradient", t), self.split.sigma_loss',
        "Vote and gradient of a step have one key: where their sums agree, one release tells the noise of the other.",
        ("votes::test_an_empty_batch_votes_with_noise_alone",),
    ),
    Mutant(
        "average-stays-after-a-kept-vote",
        VOTES,
        "        finally:\n            self._set(present)\n",
        "        finally:\n            pass\n",
        "Weights that won their vote are replaced by the average.",
        ("votes::test_a_run_is_that_of_the_twin",),
    ),
    Mutant(
        "no-warm-up",
        VOTES,
        "warmup = 1 - self._beta ** (self._made + 1) if self._warm and self._beta is not None else 1.0",
        "warmup = 1.0",
        "A run that begins again does so with the steps that had shattered its weights.",
        ("votes::test_a_run_is_that_of_the_twin",),
    ),
    Mutant(
        "no-brake",
        VOTES,
        "            self._peak *= BRAKE\n",
        "            pass\n",
        "A lost review sets the weights back and leaves the rate that had lost.",
        ("votes::test_a_run_is_that_of_the_twin",),
    ),
    Mutant(
        "gradient-of-lost-weights",
        OPTIMIZER,
        "                if retreated or (result and",
        "                if (result and",
        "After a lost vote the step is taken by the gradient of the weights that lost.",
        ("votes::test_a_run_is_that_of_the_twin",),
    ),
    Mutant(
        "retreat-not-undone",
        VOTES,
        "            self._peak, self._warm = before\n",
        "",
        "An error after a lost vote brakes once more at each attempt.",
        ("votes::test_an_error_leaves_all_as_it_was_and_the_same_batch_votes_the_same",),
    ),
    Mutant(
        "average-begins-anew-where-resumed",
        VOTES,
        '        self._unit, self._averaged = state["unit"], state["averaged"]\n',
        '        self._unit = state["unit"]\n',
        "A resumed run weighs its next weights in the average as if they were the first.",
        ("votes::test_resumes_bitwise_from_every_step",),
    ),
    # -- baselines -----------------------------------------------------------------------------------------------------
    Mutant(
        "adaptive-clipping-count-for-free",
        "hyfreedp/experiments/adaptive_clipping.py",
        "return self.threshold * share",
        "return self.threshold",
        "Adaptive clipping's count is released, and the gradients' noise does not pay for it.",
        ("adaptive_clipping",),
    ),
    Mutant(
        "adaptive-clipping-count-without-noise",
        "hyfreedp/experiments/adaptive_clipping.py",
        "        if self.count_noise > 0:\n            self._generator",
        "        if False:\n            self._generator",
        "Adaptive clipping's threshold follows the exact number of small gradients.",
        ("adaptive_clipping",),
    ),
]
