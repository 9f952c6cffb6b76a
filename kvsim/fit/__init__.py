"""Constants of the step-time model from measured steps, kernels and serving runs."""

from kvsim.fit.calibrate import Calibration, calibrate, held_out
from kvsim.fit.read import Given, read_observed
from kvsim.fit.report import as_yaml, table, test_table

__all__ = [
    "Calibration",
    "Given",
    "as_yaml",
    "calibrate",
    "held_out",
    "read_observed",
    "table",
    "test_table",
]
