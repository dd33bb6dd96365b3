"""Sentences from a language model, by beam search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from hyfreedp.experiments.data.encoding import encode_prompts, padding_of
from hyfreedp.pytorch.layers import eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEAMS = 5
# Of a sentence. By our tokenizer 99 % of E2E's test references have at most 107, by GPT-2's a third of it.
MOST_TOKENS = 128
TOGETHER = 64  # prompts in memory at a time


def generate(model: Any, tokenizer: PreTrainedTokenizerBase, meanings: Sequence[str]) -> list[str]:
    """The most probable continuation of each prompt that beam search finds, on one line each; the mode is restored.

    An unfinished sentence is cut off after ``MOST_TOKENS``, or where the context is full; ValueError if a prompt
    fills it.
    """
    from transformers import GenerationConfig

    device = next(model.parameters()).device
    context = model.config.max_position_embeddings
    settings = {"num_beams": BEAMS, "do_sample": False, "early_stopping": True}
    special = {"pad_token_id": padding_of(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    shortest_first = sorted(range(len(meanings)), key=lambda index: len(meanings[index]))
    sentences = [""] * len(meanings)
    with torch.no_grad(), eval_mode(model.modules()):
        for start in tqdm(range(0, len(meanings), TOGETHER), desc="sentences", unit="batch", delay=60, leave=False):
            rows = shortest_first[start : start + TOGETHER]
            ids, mask = (tensor.to(device) for tensor in encode_prompts(tokenizer, [meanings[row] for row in rows]))
            room = context - ids.shape[1]
            if room < 1:
                raise ValueError(f"a prompt of {ids.shape[1]} tokens fills the model's context of {context}")
            config = GenerationConfig(max_new_tokens=min(MOST_TOKENS, room), use_cache=True, **settings, **special)
            found = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            texts = tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)
            for row, text in zip(rows, texts, strict=True):
                sentences[row] = " ".join(text.split())
    return sentences
