"""Our own public weights, data/checkpoints: ``<name>.safetensors`` in half precision, and ``<name>.json``, its recipe.

``tools/weights/pretrain.py`` makes them.
"""

from __future__ import annotations

import hashlib
import json

from torch import nn

from hyfreedp.experiments.store.paths import workspace

HEAD = "vit.head."


def checksum(name: str) -> str:
    """The SHA-256 of a checkpoint's weights, from its JSON; "missing" if there is none."""
    described = workspace().checkpoints / f"{name}.json"
    return json.loads(described.read_text(encoding="utf-8"))["sha256"] if described.exists() else "missing"


def load(name: str, model: nn.Module) -> None:
    """Load a checkpoint into ``model``, in place, all but its classifier.

    Raises:
        FileNotFoundError: there is no such checkpoint; names the command that makes it.
        ValueError: its checksum is wrong, or it is of another architecture.
    """
    from safetensors.torch import load as deserialized

    path = workspace().checkpoints / f"{name}.safetensors"
    command = f"python tools/weights/pretrain.py {name}"
    if not (path.exists() and path.with_suffix(".json").exists()):
        raise FileNotFoundError(f"there are no pre-trained weights {path}: make them with {command}")
    expected = checksum(name)
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"{path} is damaged: its SHA-256 is {found}, not {expected}; make it again with {command}")
    weights = {key: value.float() for key, value in deserialized(content).items()}
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # another shape
        raise ValueError(f"{path} is of another architecture: {error}") from None
    if unexpected or not all(key.startswith(HEAD) for key in missing):
        raise ValueError(f"{path} is of another architecture: {[*missing, *unexpected]}")
