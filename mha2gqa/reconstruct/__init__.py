"""After merging: closed-form refit of the output projection, then regression, one module at a time.

Both models are walked side by side, block by block, on the same calibration text; what is kept is one hidden
stream each, never all layers' activations, and nothing is ever back-propagated through the network.
"""

from ..config.reconstruct import ReconstructConfig
from .distill import Distilled, distill
from .driver import LayerFit, reconstruct

__all__ = ["Distilled", "LayerFit", "ReconstructConfig", "distill", "reconstruct"]
