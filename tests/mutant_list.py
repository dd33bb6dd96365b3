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
ENGINE, SAMPLING, PASSES = "hyfreedp/engine.py", "hyfreedp/sampling.py", "hyfreedp/passes.py"
ACCOUNTING, CLIPPING = "hyfreedp/accounting", "hyfreedp/clipping"

MUTANTS = [
    # -- noise ---------------------------------------------------------------------------------------------------------
    Mutant(
        "gradient-noise-off",
        PRIVATIZE,
        "alpha=noise_multiplier * sensitivity)",
        "alpha=0.0)",
        "The gradient is released without noise: no privacy at all.",
        ("optimizer",),
    ),
    Mutant(
        "gradient-noise-on-the-mean",
        PRIVATIZE,
        "alpha=noise_multiplier * sensitivity)",
        "alpha=noise_multiplier * sensitivity / expected_batch_size)",
        "Noise meant for the mean is added to the sum, which is divided once more: a B-th of what is accounted for.",
        ("optimizer",),
    ),
    Mutant(
        "gradient-noise-without-sensitivity",
        PRIVATIZE,
        "alpha=noise_multiplier * sensitivity)",
        "alpha=noise_multiplier)",
        "The noise does not grow with the clipping threshold: too little for any threshold above one.",
        ("optimizer",),
    ),
    Mutant(
        "probe-noise-off",
        PRIVATIZE,
        "total = total + noise_multiplier * clip * _standard_noise",
        "total = total + 0.0 * _standard_noise",
        "Losses and contrasts are released exactly.",
        ("privatize", "probe"),
    ),
    Mutant(
        "probe-noise-on-the-mean",
        PRIVATIZE,
        "total = total + noise_multiplier * clip * _standard_noise",
        "total = total + noise_multiplier * clip / expected_batch_size * _standard_noise",
        "Noise meant for the mean loss is added to the sum of losses: a B-th of what is accounted for.",
        ("privatize", "probe"),
    ),
    Mutant(
        "probe-noise-without-clip",
        PRIVATIZE,
        "total = total + noise_multiplier * clip * _standard_noise",
        "total = total + noise_multiplier * _standard_noise",
        "The noise on the losses does not follow R_l, their sensitivity.",
        ("privatize", "probe"),
    ),
    Mutant(
        "laplace-scale-too-small",
        PRIVATIZE,
        "return exponentials[0] - exponentials[1]",
        "return (exponentials[0] - exponentials[1]) / math.sqrt(2)",
        "Laplace noise gets standard deviation 1 instead of scale 1: less than the accountant's b.",
        ("privatize",),
    ),
    Mutant(
        "empty-batch-skips-gradient-noise",
        OPTIMIZER,
        "        self._privatize_gradient(self.split.gradient_noise_multiplier(t))",
        "        if len(losses):\n            self._privatize_gradient(self.split.gradient_noise_multiplier(t))",
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
        "self._probe_noise = torch.Generator(device).manual_seed(probe_seed)",
        "self._probe_noise = torch.Generator(device).manual_seed(gradient_seed)",
        "Gradient and probe draw the same numbers, so that one release tells the noise of the other.",
        ("probe::test_probe_noise_is_independent_of_the_gradients_noise",),
    ),
    Mutant(
        "sampling-and-noise-share-a-seed",
        ENGINE,
        "seed=self._stream(1),",
        "seed=self._stream(0),",
        "The noise comes from the seed that the batches come from.",
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
        "        self._privatize_gradient(self.split.gradient_noise_multiplier(t))",
        "        planned, self.expected_batch_size = self.expected_batch_size, max(len(losses), 1)\n"
        "        self._privatize_gradient(self.split.gradient_noise_multiplier(t))\n"
        "        self.expected_batch_size = planned",
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
        PRIVATIZE,
        "        scaled = scaled / torch.linalg.vector_norm(scaled, dim=0).clamp(min=1.0)\n",
        "",
        "Contrasts are not clipped: one record moves the release without bound.",
        ("privatize",),
    ),
    Mutant(
        "contrasts-clipped-one-by-one",
        PRIVATIZE,
        "scaled = scaled / torch.linalg.vector_norm(scaled, dim=0).clamp(min=1.0)",
        "scaled = scaled.clamp(-1.0, 1.0)",
        "The two contrasts are clipped each instead of jointly: squared sensitivity 2.5 instead of 1.5.",
        ("privatize",),
    ),
    Mutant(
        "laplace-contrasts-clipped-at-one",
        PRIVATIZE,
        "scaled = (contrasts / (unit * bounds)).clamp(-0.5, 0.5)",
        "scaled = (contrasts / (unit * bounds)).clamp(-1.0, 1.0)",
        "Under Laplace noise a contrast moves by 1 instead of 1/2.",
        ("privatize",),
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
        PRIVATIZE,
        "fractions=(released[2] + 0.5, released[3] + 0.5)",
        "fractions=tuple((inside.sum(dim=1) / expected_batch_size + 0.5).tolist())",
        "The next R_d and R_c follow counts without noise: an unaccounted release.",
        ("privatize",),
    ),
    Mutant(
        "private-loss-is-the-raw-one",
        PROBE,
        '{"private_loss": private[1], ',
        '{"private_loss": losses[1].sum().item() / expected_batch_size, ',
        "What is reported as the private loss is the raw one.",
        ("probe",),
    ),
    # -- records that are not finite -----------------------------------------------------------------------------------
    Mutant(
        "nan-loss-not-neutralised",
        PRIVATIZE,
        "finite = losses.double().nan_to_num(nan=_UNBOUNDED_LOSS, posinf=_UNBOUNDED_LOSS)",
        "finite = losses.double()",
        "One record whose loss is NaN makes the whole release NaN.",
        ("privatize",),
    ),
    Mutant(
        "nan-contrast-not-neutralised",
        PRIVATIZE,
        "finite = losses.double().nan_to_num(nan=_UNBOUNDED_LOSS).clamp(-_UNBOUNDED_LOSS, _UNBOUNDED_LOSS)",
        "finite = losses.double()",
        "One record whose losses are not finite makes the released contrasts NaN.",
        ("privatize",),
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
        "self._probe_steps += bool(probe)",
        "self._probe_steps += 0",
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
        '{"losses": 3.0, "contrasts": 1.5}',
        '{"losses": 1.0, "contrasts": 1.5}',
        "Three losses are paid for like one.",
        ("accounting::test_three_losses_at_every_step_need_12_34_sigma",),
    ),
    Mutant(
        "sensitivity-of-contrasts-without-indicators",
        f"{ACCOUNTING}/mechanisms.py",
        '{"losses": 3.0, "contrasts": 1.5}',
        '{"losses": 3.0, "contrasts": 1.0}',
        "The two indicators that move the contrasts' thresholds are not paid for.",
        ("accounting::test_a_probe_at_every_step_meets_the_closed_form",),
    ),
    Mutant(
        "laplace-sensitivity-of-one-coordinate",
        f"{ACCOUNTING}/mechanisms.py",
        '{"losses": (3, 1.0), "contrasts": (4, 0.5)}',
        '{"losses": (1, 1.0), "contrasts": (1, 0.5)}',
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
        "np.flatnonzero(generator.random(self.num_records) < self.sample_rate)",
        "np.sort(generator.choice(self.num_records, round(self.num_records * self.sample_rate), replace=False))",
        "Batches of fixed size are no Poisson samples: the accountant's amplification does not hold for them.",
        ("sampling",),
    ),
    Mutant(
        "same-batch-at-every-step",
        SAMPLING,
        "spawn_key=(step,)",
        "spawn_key=(0,)",
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
        OPTIMIZER,
        '        self._gradient_noise.set_state(state["gradient_noise"].cpu())\n',
        "",
        "A resumed run draws the noise of its first steps again: the difference of two releases has none.",
        ("resume::test_resumes_bitwise_from_every_step",),
    ),
    Mutant(
        "probe-noise-not-resumed",
        OPTIMIZER,
        '        self._probe_noise.set_state(state["probe_noise"].cpu())\n',
        "",
        "A resumed run probes with the noise of its first probes again.",
        ("resume::test_resumes_bitwise_from_every_step",),
    ),
    Mutant(
        "sampler-not-resumed",
        SAMPLING,
        'self.seed, self.position = state["seed"], state["position"]',
        'self.seed = state["seed"]',
        "A resumed run takes its first batches again.",
        ("sampling",),
    ),
    Mutant(
        "spent-budget-forgotten-on-resume",
        f"{ACCOUNTING}/ledger.py",
        "        self._steps, self._probe_steps = steps, probe_steps\n",
        "        self._steps, self._probe_steps = 0, 0\n",
        "A resumed run starts with the whole budget again.",
        ("accounting_ledger",),
    ),
    # -- the step ------------------------------------------------------------------------------------------------------
    Mutant(
        "eta-does-not-reach-the-optimizer",
        OPTIMIZER,
        'group["lr"] = eta * ratio',
        'group["lr"] = self._fixed_eta * ratio',
        "The base optimizer steps with its own rate instead of the learned one.",
        ("exactness",),
    ),
    Mutant(
        "new-eta-not-told",
        OPTIMIZER,
        "        self._set_rates(new_eta)\n",
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
        "two-base-steps-per-probe",
        OPTIMIZER,
        "        self._base_step(eta)\n        plain =",
        "        self._base_step(eta)\n        self._base_step(eta)\n        plain =",
        "The base optimizer advances twice on steps that probe.",
        ("exactness",),
    ),
    Mutant(
        "weights-restored-by-arithmetic",
        OPTIMIZER,
        "        if result.eta_next == result.eta_probed:\n            torch._foreach_copy_(self._parameters, plain)\n",
        "        if result.eta_next == result.eta_probed:\n"
        "            torch._foreach_sub_(self._parameters, start)\n"
        "            torch._foreach_mul_(self._parameters, -eta / distance)\n"
        "            torch._foreach_add_(self._parameters, start)\n",
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
        "            present.restore()\n",
        "            pass\n",
        "After a probe the next forward pass repeats dropout masks.",
        ("exactness",),
    ),
    Mutant(
        "difference-with-the-wrong-sign",
        PRIVATIZE,
        "torch.stack([behind - ahead, ",
        "torch.stack([ahead - behind, ",
        "Downhill is taken for uphill.",
        ("privatize", "exactness"),
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
        "return self.embedding.squared_norms + self.head.squared_norms + 2 * cross",
        "return self.embedding.squared_norms + self.head.squared_norms",
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
        "_add_to_grad(p, gradients.pop(p).weighted_sum(factors) if p in gradients else None)",
        "g = gradients.pop(p, None)\n"
        "            own = None if g is None else self.clipping.factors(g.squared_norms.clamp(min=0).sqrt())\n"
        "            _add_to_grad(p, None if g is None else g.weighted_sum(own))",
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
        "        self.processes.add_up(gradients)\n        privatize_gradient(\n"
        "            gradients,\n"
        "            noise_multiplier,\n"
        "            sensitivity=self._engine.clipping.sensitivity,\n"
        "            expected_batch_size=self.expected_batch_size,\n"
        "            generator=self._gradient_noise,\n"
        "        )\n",
        "        privatize_gradient(\n"
        "            gradients,\n"
        "            noise_multiplier,\n"
        "            sensitivity=self._engine.clipping.sensitivity,\n"
        "            expected_batch_size=self.expected_batch_size,\n"
        "            generator=self._gradient_noise,\n"
        "        )\n"
        "        self.processes.add_up(gradients)\n",
        "Each process adds the same noise before the sums are added up: too much, and the wrong epsilon.",
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
        "share = 0.5 + (self._centred_count + noise)",
        "share = 0.5 + (self._centred_count + 0 * noise)",
        "Adaptive clipping's threshold follows the exact number of small gradients.",
        ("adaptive_clipping",),
    ),
]
