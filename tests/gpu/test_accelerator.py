"""The package on an accelerator: engines, noise, resumption, processes, memory and waiting, in its own types."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from models import conv1d_net, groupnorm_convnet, mlp, of_catalog, tied_language_model
from scipy import stats
from twins import adamw, cross_entropy, flat, make_data, make_model, make_private, train

from hyfreedp import NoiseGenerator, PrivacyEngine
from hyfreedp.experiments.benchmark.contenders import CONTENDERS, Setup
from hyfreedp.experiments.benchmark.measure import peak_memory
from hyfreedp.experiments.benchmark.workloads import MODELS, make_workload
from hyfreedp.gradients import AbadiClipping, AutomaticClipping, GradientEngine
from hyfreedp.noise import cipher
from hyfreedp.pytorch.devices import CPU, backend

pytestmark = [
    pytest.mark.gpu,
    # What torch tells of its own choice of kernels.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

VIT = "timm/deit3_small_patch16_224"
NAMES = ["transformers/GPT2LMHeadModel", "transformers/LlamaForCausalLM", "transformers/BertForSequenceClassification"]
BUILDS = {build.__name__: build for build in (mlp, groupnorm_convnet, conv1d_net, tied_language_model)}
BUILDS |= {name: partial(of_catalog, name) for name in (VIT, *NAMES, "peft/LoRA, LLaMA")}
# Relative error of norms and of the clipped sum. On a CPU it is 1.2e-4 in float32: book-keeping adds to norms what
# rounding may have lost.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def moved(build, device, dtype):
    example = BUILDS[build]()
    example.model.to(device, dtype)
    example.batch = tuple(t.to(device, dtype if t.is_floating_point() else None) for t in example.batch)
    return example


def far(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("build", BUILDS)
def test_gradients_equal_per_sample_autograd(build, kind, device):
    """Samples one by one through the same model, in the same types, on the same device; summed in float64."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    example = moved(build, device, dtype)
    clipping = AbadiClipping(1.0)
    half = torch.autocast(device.type, torch.bfloat16, enabled=kind == "autocast")
    with half:
        gradients = example.gradients().double()
    norms = gradients.norm(dim=1)
    expected = clipping.factors(norms) @ gradients
    with half:
        found, sums = example.by_engine(GradientEngine(example.model, clipping))
    rounding = ROUNDING[torch.float32 if kind == "float32" else torch.bfloat16]
    assert found.device.type == sums.device.type == device.type and sums.dtype == torch.float32
    assert far(found, norms) < rounding and far(sums, expected) < rounding


def test_keystream_hash_and_noise_are_those_of_the_cpu(device):
    key = bytes(range(32))
    assert cipher.computes_noise(device)
    assert torch.equal(cipher.chacha20(key, 5, 1000, device).cpu(), cipher.chacha20(key, 5, 1000, CPU))
    assert device.type != "cuda" or cipher._kernel(device) is not None  # Triton's, which is much faster
    numbers = torch.randn(100_000)
    there = cipher.compress(numbers.to(device), cipher.secret_table(key, device)).cpu()
    assert torch.equal(there, cipher.compress(numbers, cipher.secret_table(key, cipher.CPU)))


@pytest.mark.parametrize("secure", [False, True])
def test_noise_has_its_distribution_and_is_bound_to_the_sums(secure, device):
    def noise(of):
        total = of.to(device, copy=True)
        NoiseGenerator(0, secure=secure).add_noise([total], 2.5)
        return total.cpu().double() - of

    size = 20_000_001  # in several pieces
    first = noise(torch.zeros(size))
    assert stats.kstest(first[::5].numpy() / 2.5, "norm").pvalue > 1e-4
    assert abs(float(torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1])) < 4.5 / math.sqrt(size)
    assert torch.equal(first, noise(torch.zeros(size)))
    other = torch.zeros(size)
    other[-1] = 1e-30
    assert abs(float(torch.corrcoef(torch.stack([first, noise(other)]))[0, 1])) < 4.5 / math.sqrt(size)


# -- whole runs --------------------------------------------------------------------------------------------------------


def run(device, preset, tuning="full", *, steps=6, stop=None, seed=0, checkpoint=None, **settings):
    """A private run on a device, from its beginning or from a checkpoint; its optimizer."""
    torch.manual_seed(seed)
    model = make_model(tuning, dropout=0.1, seed=0 if tuning == "lora" else seed).to(device)
    settings = {"target_epsilon": 8.0, "preset": preset, "steps": steps} | settings
    _, optimizer, loader = make_private(model, adamw(model), **settings)
    if checkpoint:
        PrivacyEngine().load_checkpoint(path=checkpoint, module=model, optimizer=optimizer)
    go_on(optimizer, loader, device, stop)
    return optimizer


def without_noise(device, **settings):
    """A run without privacy and without dropout, in float64; its optimizer."""
    model = make_model().to(device)
    _, optimizer, loader = make_private(model, adamw(model), **settings)
    go_on(optimizer, loader, device)
    return optimizer


def go_on(optimizer, loader, device, stop=None):
    """The run to its end, or so far."""

    def loss(batch):
        return cross_entropy(optimizer.module)([tensor.to(device, non_blocking=True) for tensor in batch])

    train(optimizer, loader, loss, until=stop)


@pytest.mark.parametrize("tuning", ["full", "biases", "lora"])
@pytest.mark.parametrize("preset", ["robust", "paper", "fixed"])
def test_a_run_goes_on_bit_for_bit(preset, tuning, device, tmp_path):
    whole = run(device, preset, tuning, steps=8)
    first = run(device, preset, tuning, steps=8, stop=5)
    PrivacyEngine().save_checkpoint(path=tmp_path / "run", module=first.module, optimizer=first)
    second = run(device, preset, tuning, steps=8, seed=7, checkpoint=tmp_path / "run")
    assert torch.equal(flat(whole.module), flat(second.module)) and str(whole.history) == str(second.history)


@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_a_run_is_that_on_the_cpu_but_for_rounding(preset, device):
    here, there = (without_noise(place, preset=preset) for place in (CPU, device))
    assert far(flat(there.module).cpu(), flat(here.module)) < 1e-6


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_waits_once_per_physical_batch_and_once_per_release(device):
    """As torch counts it, where it can."""
    if not hasattr(backend(device), "set_sync_debug_mode"):
        pytest.skip("torch counts no synchronisations on this device")
    optimizer = run(device, "paper", interval=2, steps=8, stop=3, without_guarantee=True)
    x, y = (tensor[:8].to(device) for tensor in make_data().tensors)

    counts = []
    for _ in range(4):
        try:
            backend(device).set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                record = optimizer.step(cross_entropy(optimizer.module), (x, y))
        finally:
            backend(device).set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(w.message) for w in caught) - 2 - (record.probe is not None))
    assert counts == [0] * 4


def clipped_alone(example):
    """The norm of each sample's clipped gradient, normalised to one at most."""
    engine = GradientEngine(example.model, AutomaticClipping())
    for row in range(len(example.batch[0])):
        yield example.by_engine(engine, slice(row, row + 1))[1].norm()


@pytest.mark.parametrize("build", ["groupnorm_convnet", "conv1d_net", VIT])
def test_no_sample_weighs_more_than_one_whatever_rounds(build, device):
    """Clipped sums of convolutions in TF32, as CUDA would by default, and of a transformer in half precision."""
    if hasattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision"):
        torch.backends.cudnn.conv.fp32_precision = "tf32"  # put back by the fixture around
    else:
        torch.backends.cudnn.allow_tf32 = True
    example = moved(build, device, torch.bfloat16 if build == VIT else torch.float32)
    assert max(clipped_alone(example)) <= 1 + (1e-3 if build == VIT else 1e-5)


@pytest.mark.parametrize(("tuning", "limit"), [("full", 1.15), ("biases", 1.05)])
def test_peak_memory_is_near_that_of_a_plain_step(tuning, limit, device):
    work = make_workload(MODELS["gpt2_d256" if device == CPU else "vit_small"], tuning, device)
    ours, plain = (peak_memory(CONTENDERS[name], work.copy(), Setup()) for name in ("ours", "plain"))
    assert ours < limit * plain


# -- processes ---------------------------------------------------------------------------------------------------------


def processes_train(rank, size, kind, store, results):
    """One of several processes: it trains its part, and says what it holds."""
    device = CPU if kind == "cpu" else torch.device(kind, rank)
    if device != CPU:
        backend(device).set_device(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device), init_method=f"file://{store}", rank=rank, world_size=size
    )
    total = torch.ones(3, device=device)
    dist.all_reduce(total)
    optimizer = without_noise(device, preset="paper", steps=4)
    results[rank] = (total.tolist(), flat(optimizer.module).cpu().tolist(), str(optimizer.history))
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_processes_train_one_model(size, device, tmp_path):
    """By the backend that torch has for the device, NCCL on CUDA; without noise, the weights of one process alone."""
    if device != CPU and size > torch.accelerator.device_count():
        pytest.skip(f"there are fewer than {size} accelerators")
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        arguments = (size, device.type, tmp_path / "store", results)
        torch.multiprocessing.spawn(processes_train, arguments, nprocs=size)
        found = [results[rank] for rank in range(size)]
    alone = flat(without_noise(device, preset="paper", steps=4).module).cpu()
    for total, weights, history in found:
        assert total == [size] * 3 and weights == found[0][1] and history == found[0][2]
        assert far(torch.tensor(weights), alone) < 1e-6
