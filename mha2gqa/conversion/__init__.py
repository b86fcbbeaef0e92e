"""What a conversion learns from text before it writes: second moments, groupings, and fitted modules."""

from .calibrated import Calibrated, calibrate, convert_model
from .calibration_options import CalibrationOptions, Stage
from .inputs import Inputs, calibration_inputs

__all__ = [
    "Calibrated",
    "CalibrationOptions",
    "Inputs",
    "Stage",
    "calibrate",
    "calibration_inputs",
    "convert_model",
]
