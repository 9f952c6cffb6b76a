"""What every config model has in common: frozen, strict, no unknown keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, le=1e12)]
PositiveInt = Annotated[int, Field(ge=1, le=1_000_000_000)]
FilePath = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
Share = Annotated[float, Field(ge=0, lt=1)]


class Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True
    )
