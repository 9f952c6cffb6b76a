"""Length presets: published distributions of prompt and answer lengths, as compact numbers."""

from __future__ import annotations

import difflib
import json
from importlib.resources import files

import numpy as np

from kvsim.errors import ConfigError
from kvsim.workload.discrete import Discrete, from_quantiles
from kvsim.workload.lengths import Coupling, Joint

PRESETS = ("alpaca", "azure-code", "azure-conv", "mooncake-conversation", "sharegpt")


def load_preset(name: str) -> Joint:
    """The joint distribution `catalog/workloads/<name>.json` describes; its source stands there.

    The files hold quantiles of the marginals and the weights of their ranks' coupling, made by
    `experiments/fit_workloads.py`. ConfigError where there is no such preset.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        allowed = ", ".join(PRESETS)
        raise ConfigError([f"preset: {name!r} is not one of {allowed}; nearest is {near!r}"])
    path = files("kvsim").joinpath("catalog", "workloads", f"{name}.json")
    return parse_preset(path.read_text(encoding="utf-8"))


def parse_preset(text: str) -> Joint:
    """The distribution that a preset file's text states."""
    preset = json.loads(text)

    def marginal(side: str) -> Discrete:
        return from_quantiles(preset["probabilities"], preset[side])

    return Joint(
        marginal("prompt_tokens"),
        marginal("output_tokens"),
        Coupling.from_weights(np.array(preset["rank_weights"])),
        preset["max_total_tokens"],
    )
