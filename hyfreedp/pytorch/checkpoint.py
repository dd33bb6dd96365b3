"""Files of a run: its state with the user's own entries, or its secret key alone."""

import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

_STATE = "optimizer_state_dict"  # as in Opacus's files


def write_checkpoint(path: str | os.PathLike[str], state: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Save a run's ``state`` and the entries of ``more``; an interruption or error leaves an existing file as it was.

    ValueError if ``more`` has an entry with the state's name, or a value is neither a tensor nor a plain value.
    """
    if _STATE in more:
        raise ValueError(f"checkpoint_dict must not have the entry {_STATE!r}, which is the run's own: rename it")
    with _private_file(Path(path)) as file:
        try:
            torch.save({**more, _STATE: state}, file)
            file.flush()
            torch.load(file.name, map_location="cpu", weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise ValueError(
                "a checkpoint must hold tensors and plain values only, since loading it must run no code: look for "
                f"others in checkpoint_dict and the optimizer's settings ({error})"
            ) from None


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``state`` and ``more`` of :func:`write_checkpoint`, with tensors on the CPU; ValueError for other files."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # any kind, since the file may hold anything
        raise ValueError(f"{path} must be a file of save_checkpoint, but torch cannot read it: {error}") from error
    state = saved.pop(_STATE, None) if isinstance(saved, dict) else None
    if not isinstance(state, dict) or "ledger" not in state:
        raise ValueError(f"{path} must be a file of save_checkpoint, but it holds no state of a run of hyfreedp")
    return state, saved


def write_key(folder: str | os.PathLike[str], secret: Mapping[str, Any]) -> str:
    """Save the secrets of a run, plain values, to a file in ``folder`` that only its owner may read; returns its name.

    Its name has a hash of the content, so no run overwrites another's, and begins with "_", so no Trainer uploads it.
    """
    text = json.dumps(secret, sort_keys=True).encode()
    target = Path(folder, _key_name(text))
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with _private_file(target) as file:
            file.write(text)
    return target.name


def read_key(folder: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """The ``secret`` of :func:`write_key`; FileNotFoundError, or ValueError if the file is damaged."""
    path = Path(folder, name)
    if not path.is_file():
        raise FileNotFoundError(
            f"the run cannot be resumed without the key of its noise: put the file {name}, which was written where the "
            f"run was begun, into the folder {path.parent}"
        )
    text = path.read_bytes()
    if _key_name(text) != name:
        raise ValueError(f"{path} must hold the key of the run, but it is damaged, or that of another run renamed")
    return dict(json.loads(text))


def _key_name(text: bytes) -> str:
    return f"_hyfreedp-{hashlib.sha256(text).hexdigest()[:16]}.key"


@contextmanager
def _private_file(target: Path) -> Iterator[IO[bytes]]:
    """A context with a temporary file to write, which only its owner may read; at the end it replaces ``target``."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
