"""Files of a run: its state, with what its user wants kept beside it."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_STATE = "optimizer_state_dict"  # as in Opacus's files


def write_checkpoint(path: str | os.PathLike[str], state: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Save a run's state and ``more`` to a file, by a temporary name, so that an interruption leaves the old one.

    Raises:
        ValueError: ``more`` has an entry of the state's name, or something is no tensor and no plain value; the file
            that was there is still there.
    """
    if _STATE in more:
        raise ValueError(f"checkpoint_dict must not have the entry {_STATE!r}, which is the run's own: rename it")
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # for its owner only
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save({**more, _STATE: state}, file)
            file.flush()
            os.fsync(descriptor)
        try:
            torch.load(temporary, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                "a checkpoint must hold tensors and plain values only, since loading it must run no code: look for "
                f"others in checkpoint_dict and the optimizer's settings ({error})"
            ) from None
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and what else :func:`write_checkpoint` saved, on the CPU.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of any kind: the bytes may be anything
        raise ValueError(f"{path} must be a file of save_checkpoint, but torch cannot read it: {error}") from error
    state = saved.pop(_STATE, None) if isinstance(saved, dict) else None
    if not isinstance(state, dict) or "ledger" not in state:
        raise ValueError(f"{path} must be a file of save_checkpoint, but it holds no state of a run of hyfreedp")
    return state, saved
