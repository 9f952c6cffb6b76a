"""Charts of a results folder, for papers: PNG and SVG, the same bytes from the same inputs."""

from kvsim.study.plots.charts import draw

__all__ = ["draw"]
