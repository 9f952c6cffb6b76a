"""GiB of weights, activation and KV pool from a model's shape, as engines size and print them."""

from kvsim.memory.budget import Budget, Known, Term, budget
from kvsim.memory.catalog import (
    Gpu,
    engine_of_version,
    find_engine,
    find_gpu,
    find_model,
    inline_model,
)
from kvsim.memory.hf_config import read_hf_config
from kvsim.memory.kv import Limits, kv_bytes_of, request_table
from kvsim.memory.printed import Finding, Printed, findings
from kvsim.memory.remedies import Remedy, remedies
from kvsim.memory.start_log import StartLog, read_start_log
from kvsim.memory.weights import Parallel

__all__ = [
    "Budget",
    "Finding",
    "Gpu",
    "Known",
    "Limits",
    "Parallel",
    "Printed",
    "Remedy",
    "StartLog",
    "Term",
    "budget",
    "engine_of_version",
    "find_engine",
    "find_gpu",
    "find_model",
    "findings",
    "inline_model",
    "kv_bytes_of",
    "read_hf_config",
    "read_start_log",
    "remedies",
    "request_table",
]
