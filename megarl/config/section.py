"""What every section of the configuration is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Seconds = Above0
Share = Annotated[float, Field(gt=0, lt=1)]
Interval = tuple[float, float]


class Section(BaseModel):
    """Unknown keys are errors; a built configuration does not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
