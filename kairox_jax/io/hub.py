"""Fetch a model from a Hugging Face repository; token and offline mode come from the library's variables."""

from __future__ import annotations

from pathlib import Path

from kairox_jax.io.errors import FetchError

_SAFETENSORS = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
# The same weights once more, under other names (Mistral).
_DUPLICATES = ["consolidated*"]


def pull_from_hub(name: str, *, revision: str | None = None, progress: bool = True) -> Path:
    """Return the local file or folder of ``org/name`` or ``org/name:file.gguf``, downloading what is missing.

    Safetensors are preferred; a repository with GGUF files alone must hold one, or the name must say which.

    Raises:
        FetchError: the repository, revision or file is not there, not allowed, or not reachable.
        ValueError: the repository holds several GGUF files and the name does not say which.
    """
    # Imported here: it takes a noticeable part of a second, and most runs never need it.
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    repo, _, file = name.partition(":")
    where = f"{repo}@{revision}" if revision else repo
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            return Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
        wanted = _choose(repo, huggingface_hub.HfApi().list_repo_files(repo, revision=revision))
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=wanted, ignore_patterns=_DUPLICATES
            )
        )
    except errors.GatedRepoError as error:
        raise FetchError(f"{where} is gated: ask for access on its page, then set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(
            f"{where} is not on Hugging Face, or is private: check the name, or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(f"{repo} has no revision {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise FetchError(_unreachable(name)) from error
    except errors.EntryNotFoundError as error:
        raise FetchError(f"{where} has no file {file!r}") from error
    except errors.HFValidationError as error:
        raise FetchError(f"{name!r} is no valid repository name: {error}") from error
    except (OSError, *_network_errors()) as error:
        raise FetchError(f"{_unreachable(name)} ({type(error).__name__})") from error


def _choose(repo: str, files: list[str]) -> list[str]:
    if any(file.endswith(".safetensors") for file in files):
        return _SAFETENSORS
    ggufs = [file for file in files if file.endswith(".gguf")]
    if len(ggufs) > 1:
        raise ValueError(f"{repo} holds {len(ggufs)} GGUF files: name one, such as {repo}:{ggufs[0]}")
    if not ggufs:
        raise FetchError(
            f"{repo} holds neither safetensors nor GGUF files: convert its weights to safetensors"
        )
    return ggufs


def _unreachable(name: str) -> str:
    return (
        f"{name} is not in the Hugging Face cache and cannot be reached: check the network and "
        "HF_HUB_OFFLINE, or download it elsewhere and pass its path"
    )


def _network_errors() -> tuple[type[Exception], ...]:
    """Errors of the library's HTTP client: requests' are OSErrors, those of newer clients are not."""
    from huggingface_hub import errors

    client_error = getattr(errors, "HTTPError", None)
    return (client_error,) if isinstance(client_error, type) and issubclass(client_error, Exception) else ()
