"""The words of a command line, or a pasted serve line, as values by key."""

from __future__ import annotations

import difflib
import re
import shlex
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.plan.flags import FLAGS, SHORT, Fault, other_flags, switch

API_SERVER = "vllm.entrypoints.openai.api_server"
IMAGE = re.compile(r"(?:\S+/)?vllm(?:-openai)?(?::v?(\d+\.\d+\S*)|:\S+)?")
SHELL = re.compile(r"&&?|\|\|?|;|\d?>>?.*|\d>&\d")  # the line's end, as a shell sees it
NEGATIVE = re.compile(r"-\d")
MAX_LINE = 100_000


class Words(NamedTuple):
    """values by key; places: all that stands alone; ignored and unmodelled: flags by name."""

    values: dict[str, Any]
    places: list[str]
    ignored: list[str]
    unmodelled: list[str]


def read_serve_line(line: str) -> Words:
    """`vllm serve MODEL …`, `python -m vllm.entrypoints.openai.api_server …`, `docker run …
    vllm/vllm-openai:TAG …`, or their flags alone; comments, continued lines, assignments before
    and pipes after it are passed over. ConfigError with all its faults."""
    if len(line) > MAX_LINE:
        raise ConfigError([f"--serve: longer than {MAX_LINE:,} characters: not a serve line"])
    joined = re.sub(r"\\[ \t]*\r?(?:\n|$)", " ", line)
    try:
        words = shlex.split(joined, comments=True)
    except ValueError as error:
        raise ConfigError([f"--serve: {str(error).lower()} in it"]) from None
    rest, version = _after_program(words)
    end = next((n for n, word in enumerate(rest) if SHELL.fullmatch(word)), len(rest))
    found = read_words([word.rstrip(";") for word in rest[:end]], "--serve: ")
    if version and "engine" not in found.values:
        found.values["engine"] = f"vllm@{version}"
    if found.places and "model" not in found.values:
        found.values["model"] = found.places.pop(0)
    if found.places:
        raise ConfigError([f"--serve: {found.places[0]!r} belongs to no flag"])
    return found


def _after_program(words: list[str]) -> tuple[list[str], str | None]:
    """The words after the program, and the engine's version where an image names it."""
    for n, word in enumerate(words):
        if word == API_SERVER or word.endswith(f"/{API_SERVER.replace('.', '/')}.py"):
            return words[n + 1 :], None
        if word.rpartition("/")[2] == "vllm" and words[n + 1 : n + 2] == ["serve"]:
            return words[n + 2 :], None
        if "docker" in words[:n] or "podman" in words[:n]:
            image = IMAGE.fullmatch(word)
            if image and words[n - 1] not in ("--name", "-v", "--volume", "-w", "--entrypoint"):
                return _without_serve(words[n + 1 :]), image[1]
    if words and _is_flag(words[0]):
        return words, None
    text = "no `vllm serve`, `python -m vllm.entrypoints.openai.api_server` or `docker run … "
    raise ConfigError([f"--serve: {text}vllm/vllm-openai` in it"])


def _without_serve(words: list[str]) -> list[str]:
    starts = [n for n in range(len(words)) if words[n : n + 2] == ["vllm", "serve"]]
    return words[starts[0] + 2 :] if starts else words[words[:1] == ["serve"] :]


def read_words(words: list[str], where: str = "") -> Words:
    """Values as read by their flags; the last of a flag given twice counts, as in vLLM. Raises
    ConfigError with a line for each flag that is not known (the nearest named) or badly valued."""
    found, faults, n = Words({}, [], [], []), [], 0
    while n < len(words):
        word, n = _plain_dashes(words[n]), n + 1
        if not _is_flag(word):
            found.places.append(word)
            continue
        ahead = next((m for m in range(n, len(words)) if _is_flag(words[m])), len(words))
        try:
            n += _take(word, words[n:ahead], found)
        except Fault as fault:
            faults.append(f"{where}{fault}")
            n = ahead
    if faults:
        raise ConfigError(faults)
    return found


def _plain_dashes(word: str) -> str:
    """Dashes as word processors turn them back into the two that were typed."""
    return re.sub(r"^[–—]+(?=[A-Za-z])", "--", word)


def _is_flag(word: str) -> bool:
    return _plain_dashes(word).startswith("-") and not NEGATIVE.match(word)


def _take(word: str, following: list[str], found: Words) -> int:
    """Put a flag's value in `found`; how many of the words that follow it are the flag's."""
    flag, sign, inner = re.sub(r"^-O(?=\d)", "-O=", word).partition("=")
    name, is_on = _name_of(flag)
    others = other_flags()
    is_switch = FLAGS[name].read is switch if name in FLAGS else name in others.switches
    taken = 0
    if not sign and not is_switch:
        if not following:
            raise Fault(f"{flag}: a value is missing")
        inner, taken = following[0], len(following) if name in others.several else 1
    if name not in FLAGS:
        kind = found.unmodelled if name in others.memory else found.ignored
        kind.append(f"--{name.replace('_', '-')}")
    elif is_switch:
        found.values[name] = _read(flag, name, inner) == is_on if sign else is_on
    else:
        found.values[name] = _read(flag, name, inner)
    return taken


def _name_of(flag: str) -> tuple[str, bool]:
    """The key of a flag, dotted parts and a leading no- off, and whether it is on. Faults on an
    unknown one, with the nearest."""
    others = other_flags()
    bare = flag.lstrip("-").partition(".")[0]
    if not flag.startswith("--"):
        by_short = {**others.short, **SHORT}
        if bare in by_short:
            return by_short[bare], True
    name = bare.replace("-", "_")
    known = {*FLAGS, *others.switches, *others.values} - {"shape"}
    if name in known:
        return name, True
    if name.startswith("no_") and name[3:] in known:
        return name[3:], False
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
    raise Fault(f"{flag}: is not a flag known here; nearest is --{near.replace('_', '-')}")


def _read(flag: str, name: str, value: str) -> Any:
    try:
        return FLAGS[name].read(value)
    except Fault as fault:
        raise Fault(f"{flag}: {shown(value)} {fault}") from None


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
