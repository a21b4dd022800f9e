"""Where the loaded pipeline is kept; `shared.sd_model` of the host would load one if there is none."""

from __future__ import annotations

from typing import Any


class ModelData:
    sd_model: Any = None
    sd_refiner: Any = None


model_data = ModelData()
