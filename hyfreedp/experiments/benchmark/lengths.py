"""What many lengths of texts in a batch cost: ``python -m hyfreedp.experiments.benchmark.lengths``.

A private step on 256 texts of fifty lengths, each as it is, beside the same texts padded: each to a multiple of eight,
and all to the longest, which is what one form costs. All take turns, on one thread; medians of processor time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, TensorDataset

from hyfreedp import PrivacyEngine
from hyfreedp.data.batches import stack_records
from hyfreedp.experiments.data.encoding import IGNORED

TEXTS, LENGTHS, WORDS, ROUNDS = 256, range(15, 65), 600, 7
PADDINGS = {"each its own length": 1, "to a multiple of 8": 8, "to the longest": max(LENGTHS)}


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    more = torch.randint(LENGTHS.start, LENGTHS.stop, (TEXTS - len(LENGTHS),), generator=generator)
    texts = [torch.randint(WORDS, (1, length), generator=generator) for length in (*LENGTHS, *more.tolist())]
    steps = {name: _step(texts, multiple) for name, multiple in PADDINGS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(own[1:]) for name, own in seconds.items()}
    for name, median in medians.items():
        print(f"{name:20} {1e3 * median:6.0f} ms, {median / medians['to the longest']:.2f} of the longest")


def _step(texts: list[Tensor], multiple: int) -> Callable[[], object]:
    """A step of a GPT of 0.4 million weights on the texts, each padded to a multiple, as a batch of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def padded(text: Tensor) -> dict[str, Tensor]:
        more = (0, -text.shape[1] % multiple)
        return {"input_ids": pad(text, more), "labels": pad(text, more, value=IGNORED)}

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    sizes |= {"vocab_size": WORDS, "n_positions": max(LENGTHS), "n_embd": 96, "n_layer": 3, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).train()
    _, optimizer, _ = PrivacyEngine(seed=0).make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        data_loader=DataLoader(TensorDataset(torch.zeros(100 * TEXTS)), batch_size=TEXTS),
        target_epsilon=3.0,
        target_delta=1e-6,
        steps=1000,
        preset="fixed",
        accountant="rdp",
    )
    optimizer.sampler = None  # the batch is given
    batch = stack_records(map(padded, texts))
    return partial(optimizer.step, lambda record: model(**record, use_cache=False).loss, batch)


if __name__ == "__main__":
    main()
