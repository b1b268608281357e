"""Fetch a model from a Hugging Face repository; token and offline mode come from the library's variables."""

from __future__ import annotations

from pathlib import Path

from kairox_jax.io.errors import FetchError
from kairox_jax.io.pickles import HOW_TO_CONVERT

_SAFETENSORS = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
# The same weights once more, under other names (Mistral).
_DUPLICATES = ["consolidated*"]
# The library retries an unreachable hub for 25 s; it is asked once, with this limit, before anything is fetched.
_TIMEOUT_S = 5.0


def pull_from_hub(name: str, *, revision: str | None = None, progress: bool = True) -> Path:
    """Return the local file or folder of ``org/name`` or ``org/name:file.gguf``, downloading what is missing.

    Safetensors are preferred; a repository with GGUF files alone must hold one, or the name must say which.
    Offline, or where the hub cannot be reached, what the library's cache holds is used.

    Args:
        name: the repository, and perhaps one of its files.
        revision: branch, tag or commit; None takes the main branch.
        progress: draw the library's progress bars.

    Raises:
        FetchError: the repository, revision or file is not there, not allowed, or not reachable.
        ValueError: the repository holds several GGUF files and the name does not say which.
    """
    # Imported here: it takes a noticeable part of a second, and most runs never need it.
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    repo, _, file = name.partition(":")
    where = f"{repo}@{revision}" if revision else repo
    try:
        return _pull(repo, file, revision)
    except errors.GatedRepoError as error:
        raise FetchError(f"{where} is gated: ask for access on its page, then set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(
            f"{where} is not on Hugging Face, or is private: check the name, or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(f"{repo} has no revision {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise FetchError(_unreachable(where, file)) from error
    except errors.EntryNotFoundError as error:
        raise FetchError(f"{where} has no file {file!r}") from error
    except errors.HFValidationError as error:
        raise FetchError(f"{name!r} is no valid repository name: {error}") from error
    except _network_errors() as error:
        raise FetchError(f"{_unreachable(where, file)} ({type(error).__name__})") from error
    except OSError as error:
        raise FetchError(f"{where} could not be stored: {error}; set HF_HOME elsewhere") from error


def _pull(repo: str, file: str, revision: str | None) -> Path:
    import huggingface_hub
    import huggingface_hub.errors

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return _cached(repo, file, revision)
    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=_TIMEOUT_S)
    except huggingface_hub.errors.HfHubHTTPError as error:
        if error.response is None or error.response.status_code < 500:
            raise
        return _cached(repo, file, revision)
    except _network_errors():
        return _cached(repo, file, revision)
    if file:
        return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
    wanted = _choose(repo, [sibling.rfilename for sibling in info.siblings or ()])
    return Path(
        huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=wanted, ignore_patterns=_DUPLICATES
        )
    )


def _cached(repo: str, file: str, revision: str | None) -> Path:
    import huggingface_hub

    if file:
        return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision, local_files_only=True))
    return Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))


def _choose(repo: str, files: list[str]) -> list[str]:
    if any(file.endswith(".safetensors") for file in files):
        return _SAFETENSORS
    ggufs = [file for file in files if file.endswith(".gguf")]
    if len(ggufs) > 1:
        raise ValueError(f"{repo} holds {len(ggufs)} GGUF files: name one, such as {repo}:{ggufs[0]}")
    if not ggufs and any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        raise FetchError(f"{repo} holds only {HOW_TO_CONVERT.format(source=repo)}")
    if not ggufs:
        raise FetchError(f"{repo} holds neither safetensors nor GGUF files: it is no model that can be read")
    return ggufs


def _unreachable(where: str, file: str) -> str:
    what = f"{where}:{file}" if file else where
    return (
        f"{what} is not in the Hugging Face cache and cannot be reached: check the network and "
        "HF_HUB_OFFLINE, or download it elsewhere and pass its path"
    )


def _network_errors() -> tuple[type[Exception], ...]:
    """Errors of the library's HTTP client, whichever that is (requests or httpx), and the system's."""
    from huggingface_hub import errors

    client = [base for base in errors.HfHubHTTPError.__mro__ if base.__module__ != "builtins"]
    return (ConnectionError, TimeoutError, *client)
