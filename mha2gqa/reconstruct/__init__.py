"""After merging: make each attention module's output match the original's again, one module at a time."""

from .config import ReconstructConfig
from .refit import refit
from .regress import regress
from .stages import SiteFit, reconstruct

__all__ = ["ReconstructConfig", "SiteFit", "reconstruct", "refit", "regress"]
